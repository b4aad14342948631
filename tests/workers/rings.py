# SPDX-License-Identifier: Apache-2.0
"""A video session's ring as pvrd makes it, and a worker with a video model."""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest

from engine.backends.cpu import CpuBackend
from engine.video.frames import FrameFormat, empty, samples, views
from engine.video.network import VideoModel
from engine.video.upscale import VideoPipeline
from pvrd.video_layout import Format, Layout, lay_out
from tests.workers.conftest import ROOT, Peer

Start = Callable[..., Peer]
MODEL = ROOT / "engine/video/models/nsr-fast.pvrm"
SLOTS = 3


class Ring:
    """A ring of 40x30 frames and the frames that the engine itself makes of them."""

    def __init__(self, stack: ExitStack) -> None:
        self.layout: Layout = lay_out(Format(40, 30, "i420"), Format(80, 60, "i420"), SLOTS)
        self.fd = os.memfd_create("ring", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        stack.callback(os.close, self.fd)
        os.ftruncate(self.fd, self.layout.ring_bytes)
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
        self.memory = mmap.mmap(self.fd, self.layout.ring_bytes)
        self.format = FrameFormat(40, 30)
        self.out = self.format.scaled(2)
        backend = CpuBackend(1)
        self._pipeline = VideoPipeline(backend, VideoModel.load(str(MODEL), backend), self.format)

    def put(self, slot: int, seed: int) -> None:
        rng = np.random.default_rng(seed)
        for plane in self._planes(slot, self.format, 0):
            plane[:] = rng.integers(16, 236, (1, plane.shape[1]), np.uint8)

    def get(self, slot: int) -> list[np.ndarray]:
        planes = self._planes(slot, self.out, self.layout.output[0].offset)
        return [
            samples(v, p.width, 8).copy() for v, p in zip(planes, self.out.planes(), strict=True)
        ]

    def expected(self, slot: int) -> list[np.ndarray]:
        out = empty(self.out)
        self._pipeline.begin(self._planes(slot, self.format, 0), out)
        while not self._pipeline.step():
            pass
        return [samples(v, p.width, 8) for v, p in zip(out, self.out.planes(), strict=True)]

    def _planes(self, slot: int, fmt: FrameFormat, begin: int) -> list[np.ndarray]:
        return views(self.memory, fmt.planes(begin), slot * self.layout.slot_bytes)

    def message(self, **other: Any) -> dict[str, Any]:
        return {
            "session": "v", "format": self.layout.format.message(), "models": ["m"],
            "out": {"width": 80, "height": 60},
            "slots": SLOTS, "layout": self.layout.message(), "tile": 0, "overlap": 0, **other,
        }  # fmt: skip


@pytest.fixture
def ring() -> Iterator[Ring]:
    with ExitStack() as stack:
        yield Ring(stack)


@pytest.fixture
def worker(peer: Start) -> Peer:
    made = peer(threads=1)
    made.load(MODEL, kind="video")
    return made


def same(a: list[np.ndarray], b: list[np.ndarray]) -> bool:
    return all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))
