# SPDX-License-Identifier: Apache-2.0
"""int8 on the CPU: how near it comes to float32, and that users are told which it is."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import engine.video
from engine import pvrm
from engine.backends.cpu import CpuBackend
from engine.errors import BadModel, InvalidArgument
from engine.pvrm import Pvrm
from engine.video import calibrate, kinds
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


@pytest.mark.parametrize("tier", ["fast", "balanced", "fast-x3", "fast-x4", "fast-compressed"])
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


def test_auto_is_the_faster_one(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = CpuBackend(threads=1)
    model = VideoModel.load(str(MODELS / "nsr-fast.pvrm"), backend)
    assert kinds.precise(model, "auto").info["format"] == ("int8" if model.int8_faster else "f32")
    assert kinds.precise(model, "f32") is model
    for seconds, wanted in (({"int8": 1, "f32": 2}, "int8"), ({"int8": 2, "f32": 1}, "f32")):
        model.int8_faster = None
        monkeypatch.setattr(kinds, "_trial_s", lambda m, s=seconds: s[m.info["format"]])
        assert kinds.precise(model, "auto").info["format"] == wanted
        monkeypatch.setattr(kinds, "_trial_s", lambda m: 1 / 0)  # it is tried once
        assert kinds.precise(model, "auto").info["format"] == wanted
    with pytest.raises(InvalidArgument, match="precision"):
        kinds.precise(model, "f64")
    model.close()


def test_a_model_says_what_it_is_made_for(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = CpuBackend(threads=1)
    for tier, made_for in (("fast", True), ("fast-x4", True), ("balanced", False)):
        model = VideoModel.load(str(MODELS / f"nsr-{tier}.pvrm"), backend)
        assert bool(model.info["int8"]) == made_for
        for isa in ("avx2", "avx512", "dotprod", "rvv"):
            info = replace(backend.info, features=frozenset({f"isa:{isa}"}))
            monkeypatch.setattr(backend, "info", info)
            fits = made_for and isa in ("avx512", "dotprod")
            assert kinds.precise(model, "model").info["format"] == ("int8" if fits else "f32")
        model.close()


@pytest.mark.parametrize("share", [-0.5, 1.5, "half", True])
def test_a_share_that_is_none(tmp_path: Path, share: object) -> None:
    file = Pvrm.open(str(MODELS / "nsr-fast.pvrm"))
    metadata = {k: v for k, v in file.metadata.items() if k != "tensors"} | {"int8": share}
    blobs = [pvrm.array_blob(name, file.blob(name)) for name in file.entries]
    pvrm.write(tmp_path / "a.pvrm", metadata, blobs)
    with pytest.raises(BadModel, match="int8"):
        VideoModel.load(str(tmp_path / "a.pvrm"), CpuBackend(threads=1))


def test_deep_networks_stay_in_float32() -> None:
    backend = CpuBackend(threads=1)
    model = VideoModel.load(str(MODELS / "nsr-quality.pvrm"), backend)
    for precision in ("int8", "auto"):
        assert kinds.precise(model, precision) is model
    assert "0.1 dB" in model.info["why_f32"]
    model.close()
