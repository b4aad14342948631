# SPDX-License-Identifier: Apache-2.0
"""Frames for benchmarks, in memory as the daemon has it: slots of a memfd."""

from __future__ import annotations

import mmap
import os

import numpy as np

from engine.backends.base import Array
from engine.video.frames import Bytes, FrameFormat, views

Place = tuple[list[Bytes], list[Bytes]]  # planes of a frame and of its result

PAGE = 4096


def picture(width: int, height: int) -> Bytes:
    """Luma with edges, ramps and noise, the same each time: u8 [height, width]."""
    y, x = np.mgrid[0:height, 0:width]
    rings = 60 * np.sin((x - width / 2) ** 2 / 900 + (y - height / 3) ** 2 / 700)
    noise = np.random.default_rng(1).normal(0, 3, (height, width))
    luma: Bytes = np.clip(128 + rings + 40 * (x > y) + noise, 16, 235).astype(np.uint8)
    return luma


def slots(fmt: FrameFormat, out: FrameFormat, count: int) -> tuple[Array, list[Place]]:
    """A ring as the daemon makes it, and the planes of each slot."""
    ends = [-(-(p[-1].offset + p[-1].nbytes) // PAGE) * PAGE for p in (fmt.planes(), out.planes())]
    each = sum(ends)
    fd = os.memfd_create("ring")
    os.ftruncate(fd, count * each)
    memory = np.frombuffer(mmap.mmap(fd, count * each), np.uint8)
    os.close(fd)
    memory[:] = 0  # every page is there
    found = [
        (views(memory, fmt.planes(), i * each), views(memory, out.planes(ends[0]), i * each))
        for i in range(count)
    ]
    for number, (source, _) in enumerate(found):
        luma = picture(fmt.width, fmt.height)
        for plane in source:
            plane[:] = 128
        source[0][:, : fmt.width] = np.roll(luma, 8 * number, 1)
    return memory, found
