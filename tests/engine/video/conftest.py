# SPDX-License-Identifier: Apache-2.0
"""Devices, models and frames for the video tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from engine import pvrm
from engine.backends.base import Backend
from engine.backends.cpu import CpuBackend
from engine.video import frames, plain
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


def synthetic(
    path: Path,
    scale: int = 2,
    channels: int = 8,
    blocks: int = 1,
    skips: list[tuple[int, int]] | None = None,
    chroma: dict[str, int] | None = None,
) -> Path:
    """A model file of random weights: bicubic interpolation and some noise of the network's."""
    rng = np.random.default_rng(scale)
    blobs: dict[str, npt.NDArray[np.float32]] = {}

    def network(prefix: str, inputs: int, channels: int, blocks: int, siting: str) -> None:
        sizes = [inputs, *[channels] * (blocks + 1), -(-scale * scale // 4) * 4]
        for i, (cin, cout) in enumerate(pairwise(sizes)):
            last = i == blocks + 1
            w = rng.normal(0, 0.03 if last else 1 / np.sqrt(9 * cin), (cin, 9, cout))
            w[:, :, scale * scale if last else cout :] = 0
            bias = rng.normal(0, 0.02, cout)
            slope = np.ones(cout) if last else rng.uniform(0, 0.5, cout)
            if any(b == i for _, b in skips or []) and not prefix:
                blobs[f"skip{i}"] = slope.astype(np.float32)
                slope = np.ones(cout)
            blobs[f"{prefix}conv{i}"] = np.concatenate([w.ravel(), bias, slope]).astype(np.float32)
        blobs[f"{prefix}base"] = plain.bicubic_filters(scale, siting).ravel()

    network("", 1, channels, blocks, "centre")
    for siting in ("left", "centre"):
        blobs[f"chroma.{siting}"] = plain.bicubic_filters(scale, siting).ravel()
        if chroma:
            network(f"chroma.{siting}.", 5, chroma["channels"], chroma["blocks"], siting)
    blobs["chroma.plain"] = plain.bicubic_filters(scale).ravel()
    metadata = {
        "kind": "video", "arch": "nsr", "name": path.stem, "scale": scale, "channels": channels,
        "blocks": blocks, "licence": "Apache-2.0",
    } | ({"skips": skips} if skips else {}) | ({"chroma": chroma} if chroma else {})  # fmt: skip
    pvrm.write(path, metadata, [pvrm.array_blob(n, a) for n, a in blobs.items()])
    return path


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
    wide = fmt.scaled(model.scale)
    dst = frames.empty(wide)
    pipeline.begin(src, dst)
    slices = 1
    while not pipeline.step():
        slices += 1
    assert slices == pipeline.slices
    assert (pipeline.tiles, pipeline.tiles_fallback) == (pipeline.tiling.tiles, 0)
    pipeline.close()
    out = wide.planes()
    return [frames.samples(d, p.width, fmt.depth).copy() for d, p in zip(dst, out, strict=True)]


def psnr(a: npt.NDArray[Any], b: npt.NDArray[Any], border: int = 2) -> float:
    e = (np.asarray(a, np.float64) - b)[border:-border, border:-border]
    return float(10 * np.log10(255**2 / np.square(e).mean()))
