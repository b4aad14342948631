# SPDX-License-Identifier: Apache-2.0
"""int8 on the CPU: how near it comes to float32, and that users are told which it is."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import engine.video
from engine.backends.cpu import CpuBackend
from engine.video import calibrate
from engine.video.frames import FrameFormat, empty
from engine.video.network import VideoModel
from engine.video.upscale import VideoPipeline

MODELS = Path(engine.video.__file__).parent / "models"


def enlarged(model: VideoModel, backend: CpuBackend) -> np.ndarray:
    picture = np.concatenate(calibrate.pictures()[:2], 1)
    fmt = FrameFormat(picture.shape[1], picture.shape[0], "gray")
    source, target = empty(fmt), empty(fmt.scaled(model.scale))
    source[0][:, : fmt.width] = picture * 255
    pipeline = VideoPipeline(backend, model, fmt)
    pipeline.begin(source, target)
    while not pipeline.step():
        pass
    pipeline.close()
    return target[0][:, : model.scale * fmt.width].astype(float)


@pytest.mark.parametrize("tier", ["fast", "balanced", "fast-x3"])
def test_int8_comes_near_to_float32(tier: str) -> None:
    backend = CpuBackend(threads=2)
    found = []
    for precision in ("f32", "int8"):
        model = VideoModel.load(str(MODELS / f"nsr-{tier}.pvrm"), backend, precision=precision)
        assert model.info["format"] == precision
        found.append(enlarged(model, backend))
        model.close()
    error = float(np.mean((found[0] - found[1]) ** 2))
    assert error > 0, "both are the same"
    assert 10 * np.log10(255**2 / error) > 45


def test_auto_is_one_of_them() -> None:
    backend = CpuBackend(threads=1)
    model = VideoModel.load(str(MODELS / "nsr-fast.pvrm"), backend, precision="auto")
    fast = {"isa:avx512", "isa:dotprod"} & backend.info.features
    assert model.info["format"] == ("int8" if fast else "f32")
    model.close()
