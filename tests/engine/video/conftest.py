# SPDX-License-Identifier: Apache-2.0
"""Devices, models and frames for the video tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from engine.backends.base import Backend
from engine.backends.cpu import CpuBackend
from engine.video import frames
from engine.video.frames import Bytes, FrameFormat
from engine.video.network import VideoModel
from engine.video.upscale import VideoPipeline

MODELS = Path(frames.__file__).with_name("models")
FAST = MODELS / "nsr-fast.pvrm"
Samples = npt.NDArray[np.uint16] | npt.NDArray[np.uint8]


@pytest.fixture(scope="session")
def cpu_backend() -> Iterator[Backend]:
    backend = CpuBackend(threads=2)
    yield backend
    backend.close()


@pytest.fixture(scope="session")
def gpu_backend() -> Iterator[Backend]:
    from engine.backends.vulkan import VulkanBackend

    backend = VulkanBackend(allow_software=True)
    yield backend
    backend.close()


@pytest.fixture(scope="session")
def model(cpu_backend: Backend) -> Iterator[VideoModel]:
    """The fast model on the CPU."""
    found = VideoModel.load(str(FAST), cpu_backend)
    yield found
    found.close()


@pytest.fixture(scope="session")
def gpu_model(gpu_backend: Backend) -> Iterator[VideoModel]:
    found = VideoModel.load(str(FAST), gpu_backend)
    yield found
    found.close()


def noise(fmt: FrameFormat, seed: int = 0) -> list[Bytes]:
    """A frame of noise; the bytes between the rows are noise, too, and must not matter."""
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 256, (p.height, p.stride), np.uint8) for p in fmt.planes()]


def scene(height: int, width: int, seed: int = 0) -> npt.NDArray[np.float64]:
    """Discs, bars and a gradient with soft edges, 16..235: content that an enlarger is for."""
    rng = np.random.default_rng(seed)
    y, x = np.mgrid[0:height, 0:width] + 0.5
    out = 60 + 80 * x / width + 40 * y / height
    for _ in range(max(4, height * width // 600)):
        cy, cx, r = rng.uniform(0, height), rng.uniform(0, width), rng.uniform(2, 14)
        angle, level = rng.uniform(0, np.pi), rng.uniform(16, 235)
        along = np.abs((x - cx) * np.cos(angle) + (y - cy) * np.sin(angle))
        disc = np.hypot(x - cx, y - cy)
        distance = disc if rng.random() < 0.5 else np.maximum(along * 3, disc)
        cover = np.clip(r - distance + 0.5, 0, 1)
        out = out * (1 - cover) + level * cover
    return np.asarray(np.clip(out, 16, 235))


Enlarge = Callable[..., list[Samples]]


def enlarge(
    backend: Backend, model: VideoModel, fmt: FrameFormat, src: list[Bytes], tile: int = 0
) -> list[Samples]:
    """The planes of the enlarged frame, without what lies between their rows. No tile fell back."""
    pipeline = VideoPipeline(backend, model, fmt, tile=tile)
    dst = frames.empty(fmt.scaled(2))
    pipeline.begin(src, dst)
    slices = 1
    while not pipeline.step():
        slices += 1
    assert slices == pipeline.slices
    assert (pipeline.tiles, pipeline.tiles_fallback) == (pipeline.tiling.tiles, 0)
    pipeline.close()
    out = fmt.scaled(2).planes()
    return [frames.samples(d, p.width, fmt.depth).copy() for d, p in zip(dst, out, strict=True)]


def psnr(a: npt.NDArray[Any], b: npt.NDArray[Any], border: int = 2) -> float:
    e = (np.asarray(a, np.float64) - b)[border:-border, border:-border]
    return float(10 * np.log10(255**2 / np.square(e).mean()))
