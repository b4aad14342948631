# SPDX-License-Identifier: Apache-2.0
"""The measures of benchmarks/nsr_quality: places of samples, errors, both chroma sitings."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from benchmarks import nsr_clips, nsr_export, nsr_quality


@pytest.mark.parametrize("scale", [2, 3, 4])
def test_smaller_frames_keep_places(scale: int) -> None:
    """A ramp is read where each small sample lies: luma and chroma rows between large ones, chroma
    of siting left over its luma's column.
    """
    luma = np.tile(np.arange(24 * scale, dtype=np.float64), (24 * scale, 1))
    chroma = luma[: 12 * scale, : 12 * scale]
    frame = [p.astype(np.uint8) for p in (luma, chroma.T, chroma)]
    y, down, across = nsr_clips.smaller(frame, scale)
    k = np.arange(24)
    inner = slice(4, -4)

    def close(found: np.ndarray, wanted: np.ndarray) -> bool:
        return bool(np.abs(found[inner] - wanted[inner]).max() <= 0.51)  # rounded

    assert close(y[9].astype(float), k * scale + (scale - 1) / 2)
    assert close(down[:, 5].astype(float), k[:12] * scale + (scale - 1) / 2)
    assert close(across[5].astype(float), k[:12] * scale + (scale - 1) / 4)


def test_reduced_keeps_a_flat_signal_to_the_border() -> None:
    assert np.allclose(nsr_clips.reduced(np.full((2, 30), 7.0), 3, 1.0), 7.0)


def test_psnr_leaves_the_border_out() -> None:
    truth = np.zeros((12, 12))
    found = truth.copy()
    found[0] = 200
    assert nsr_quality.psnr(found, truth) > 100
    found[5] = 255
    assert nsr_quality.psnr(found, truth) == pytest.approx(10 * np.log10(8))


@pytest.mark.parametrize("siting", ["left", "centre"])
def test_chroma_of_a_picture(tmp_path: Path, siting: str) -> None:
    """A colour step between columns 7 and 8: the sample of siting left on column 8 still weighs
    column 7 by a quarter, no pair of siting centre straddles the step.
    """
    rgb = np.zeros((8, 16, 3), np.uint8)
    rgb[:, 8:, 2] = 255
    Image.fromarray(rgb).save(tmp_path / "step.png")
    blue, _ = nsr_quality.chroma(tmp_path / "step.png", siting, 16, 8)
    assert blue.shape == (4, 8)
    middle = 128 + 112 * 0.75 if siting == "left" else 240
    assert blue[1].tolist() == [128] * 4 + [round(middle)] + [240] * 3


@pytest.mark.parametrize("scale", [2, 3, 4])
@pytest.mark.parametrize("siting", ["left", "centre"])
def test_bicubic_chroma_of_a_ramp(scale: int, siting: str) -> None:
    """A linear ramp is continued exactly, at the places of the siting."""
    low = np.tile(np.arange(20, 220, 10, dtype=np.uint8), (9, 1))
    found = nsr_quality.bicubic_chroma(low, scale, siting)[4 * scale]
    shift = 0.25 if siting == "left" else 0.5
    at = (np.arange(len(found)) + shift) / scale - shift
    inner = slice(3 * scale, -3 * scale)
    assert np.abs(found[inner] - (20 + 10 * at[inner])).max() <= 0.51


def test_costs_of_the_shipped_networks() -> None:
    """Multiplications per output pixel stay within what each tier promises."""
    most = {"fast": (700, 400, 250), "balanced": (3500, 1600, 950), "quality": (26000, 12000, 7000)}
    for tier, limits in most.items():
        for scale, limit in zip((2, 3, 4), limits, strict=True):
            net = nsr_export.read(nsr_export.shipped(tier, scale))
            assert net.scale == scale
            assert net.macs <= limit
    assert nsr_export.read(nsr_export.shipped("quality")).kept == {0}
