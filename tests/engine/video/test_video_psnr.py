# SPDX-License-Identifier: Apache-2.0
"""Set5 by the usual protocol, where the pictures are at hand: they may not travel with the
project.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from PIL import Image

from engine.backends.base import Backend
from engine.video import frames
from engine.video.frames import FrameFormat
from engine.video.network import VideoModel
from tests.engine.video.conftest import MODELS, enlarge, psnr

SHARED = Path(__file__).parents[4] / "shared" / "data" / "test"


def luma(path: Path) -> npt.NDArray[np.uint8]:
    rgb = np.asarray(Image.open(path).convert("RGB"), np.float64)
    y = 16 + rgb @ np.array([65.481, 128.553, 24.966]) / 255
    return np.asarray(np.round(y), np.uint8)


@pytest.mark.parametrize(
    ("name", "least"),
    [
        ("nsr-fast", 36.7),
        ("nsr-balanced", 37.25),
        ("nsr-quality", 37.55),
        ("nsr-balanced-x4", 30.8),
        ("nsr-quality-x4", 31.4),
    ],
)
def test_set5(cpu_backend: Backend, name: str, least: float) -> None:
    scale = 4 if name.endswith("-x4") else 2
    pairs = sorted((SHARED / "Set5" / f"image_SRF_{scale}").glob("*_HR.png"))
    if not pairs:
        pytest.skip("shared pictures absent")
    model = VideoModel.load(str(MODELS / f"{name}.pvrm"), cpu_backend)
    assert model.scale == scale
    found = []
    for path in pairs:
        low = luma(path.with_name(path.name.replace("_HR", "_LR")))
        h, w = low.shape
        fmt = FrameFormat(w, h, "gray")
        src = frames.empty(fmt)
        src[0][:, :w] = low
        out = enlarge(cpu_backend, model, fmt, src)[0]
        found.append(psnr(out.astype(np.float64), luma(path)[: scale * h, : scale * w], scale))
    model.close()
    assert np.mean(found) >= least
