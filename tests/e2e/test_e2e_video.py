# SPDX-License-Identifier: Apache-2.0
"""Video and pictures over the bus: each frame once and in order, whatever happens to the worker."""

from __future__ import annotations

import fcntl
import io
import os
import signal
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from PIL import Image

from engine.backends.cpu import CpuBackend
from engine.video.frames import FrameFormat, empty, samples
from engine.video.network import VideoModel
from engine.video.upscale import VideoPipeline
from pvrd.client import Client
from pvrd.client_video import Done, VideoSession
from tests.buses import ROOT
from tests.daemons import Daemon

pytestmark = pytest.mark.bus

Start = Callable[..., Daemon]
WIDTH, HEIGHT, FRAMES = 96, 64, 12
MODEL = "nsr-fast"
GPU = pytest.param("gpu", marks=pytest.mark.gpu)
FORMAT = FrameFormat(WIDTH, HEIGHT)


def frame(seq: int) -> list[np.ndarray]:
    """Planes of a frame that differs from all others."""
    planes = empty(FORMAT)
    for i, plane in enumerate(planes):
        y, x = np.mgrid[: plane.shape[0], : plane.shape[1]]
        plane[:] = 128 + 90 * np.sin((x + 7 * seq) / (5 + i)) * np.cos((y - seq) / 6)
    return planes


def enlarged() -> list[list[np.ndarray]]:
    """What the engine itself makes of each frame, on the CPU."""
    backend = CpuBackend(1)
    model = VideoModel.load(str(ROOT / f"engine/video/models/{MODEL}.pvrm"), backend)
    pipeline = VideoPipeline(backend, model, FORMAT)
    found = []
    for seq in range(FRAMES):
        out = empty(pipeline.out_format)
        pipeline.begin(frame(seq), out)
        while not pipeline.step():
            pass
        sizes = [p.width for p in pipeline.out_format.planes()]
        found.append([samples(v, w, 8) for v, w in zip(out, sizes, strict=True)])
    return found


@pytest.fixture(scope="module")
def expected() -> list[list[np.ndarray]]:
    return enlarged()


def write(video: VideoSession, slot: int, seq: int) -> None:
    for pieces, plane in zip(video.input(slot), frame(seq), strict=True):
        rows = np.ascontiguousarray(plane[:, : sum(map(len, pieces)) // plane.shape[0]])
        at = 0
        for piece in pieces:
            piece[:] = memoryview(rows.reshape(-1)[at : at + len(piece)])
            at += len(piece)


def read(video: VideoSession, slot: int, shapes: list[tuple[int, ...]]) -> list[np.ndarray]:
    planes = zip(video.output(slot), shapes, strict=True)
    return [np.frombuffer(b"".join(pieces), np.uint8).reshape(shape) for pieces, shape in planes]


def play(
    client: Client, expected: list[list[np.ndarray]], at: int = -1, action: Any = None
) -> list[Done]:
    """Sends all frames through a session and compares each; `action` follows frame `at`."""
    done: list[Done] = []
    free: list[int] = []
    settings = {"width": WIDTH, "height": HEIGHT, "model": MODEL, "slots": 3}
    with client.open_video(settings) as video:
        free.extend(range(video.slots))
        sent = 0
        while len(done) < FRAMES:
            while sent < FRAMES and video.credits and free:
                slot = free.pop(0)
                write(video, slot, sent)
                video.submit(sent, slot, pts=1000 + sent)
                sent += 1
            message = video.receive()
            if message is None:
                continue
            planes = expected[message.seq]
            got = read(video, message.slot, [p.shape for p in planes])
            for a, b in zip(got, planes, strict=True):
                assert np.abs(a.astype(int) - b.astype(int)).max() <= 1
            done.append(message)
            free.append(message.slot)
            if message.seq == at:
                action()
    assert [d.seq for d in done] == list(range(FRAMES))
    assert [d.pts for d in done] == [1000 + s for s in range(FRAMES)]
    assert not any(d.dropped or d.degraded or d.tiles_fallback for d in done)
    return done


@pytest.mark.parametrize("kind", ["cpu", GPU])
def test_undisturbed(daemon: Start, expected: list[list[np.ndarray]], kind: str) -> None:
    running = daemon({"gpu.allow_software": kind == "gpu"})
    with running.client() as client:
        running.ready(client, kind)
        assert {d.device for d in play(client, expected)} == {kind}


@pytest.mark.parametrize("kind", ["cpu", GPU])
@pytest.mark.parametrize("how", ["killed", "stopped", "device_lost"])
def test_each_frame_once_and_in_order(
    daemon: Start, expected: list[list[np.ndarray]], kind: str, how: str
) -> None:
    fault = f"{kind}:device_lost:5" if how == "device_lost" else f"{kind}:slow:30"
    running = daemon(
        {
            "gpu.allow_software": kind == "gpu",
            "deadlines.slice_s": 4.0,
            "deadlines.ping_s": 0.2,
            "workers.backoff_s": 0.1,
            "debug.faults": [fault],
        }
    )
    with running.client() as client:
        pid = running.ready(client, kind)["pid"]
        if how == "device_lost":
            done = play(client, expected)
        else:
            number = {"killed": signal.SIGKILL, "stopped": signal.SIGSTOP}[how]
            done = play(client, expected, 3, lambda: os.kill(pid, number))
        assert done[0].device == kind
        if kind == "gpu":
            assert "cpu" in {d.device for d in done}
        running.ready(client, kind, 2)
        assert {d.device for d in play(client, expected)} == {kind}
        assert client.statistics()["frames"]["reissued"] >= 1
    assert "Traceback" not in running.log.read_text()


def picture() -> bytes:
    out = io.BytesIO()
    rgb = np.stack([samples(frame(i)[0], 48, 8)[:32] for i in range(3)], axis=2)
    Image.fromarray(np.ascontiguousarray(rgb)).save(out, "png")
    return out.getvalue()


def test_picture_survives_its_worker(daemon: Start) -> None:
    running = daemon({"debug.faults": ["cpu:device_lost:1"], "workers.backoff_s": 0.1})
    source = os.memfd_create("picture", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.write(source, picture())
    with running.client() as client:
        fcntl.fcntl(source, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
        progress, result = client.upscale(source, {"model": MODEL})
        info = list(progress)[-1]
        assert info["restarts"] == 1
        again, second = client.upscale(source, {"model": MODEL})
        assert list(again)[-1]["restarts"] == 0
    os.close(source)
    with os.fdopen(result, "rb") as a, os.fdopen(second, "rb") as b:
        assert a.read() == b.read()
        with Image.open(a) as image:
            assert image.size == (96, 64)
