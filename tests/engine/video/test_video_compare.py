# SPDX-License-Identifier: Apache-2.0
"""The sheet of `pvrctl compare`: its measures, its columns, and the program itself."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from engine.video import compare
from engine.video.compare import COLUMN, CROP, GAP
from tests.engine.video.conftest import scene


def picture(height: int, width: int) -> compare.Pixels:
    """A scene in slightly different colours."""
    gray = np.round(scene(height, width))
    return np.stack([gray, 255 - gray / 2, gray / 3], axis=2).astype(np.uint8)


def test_psnr() -> None:
    a = np.full((20, 20), 100.0)
    assert compare.psnr(a, a) is None
    assert compare.psnr(a, a + 5) == pytest.approx(10 * np.log10(255**2 / 25))


def test_ssim_is_one_for_equals_and_follows_the_formula() -> None:
    a = scene(40, 50)
    assert compare.ssim(a, a) == pytest.approx(1)
    assert compare.ssim(a[:10], a[:10]) is None
    # Of flat planes only the term of the means is left.
    flat, other = np.full((11, 11), 50.0), np.full((11, 11), 80.0)
    c1 = (0.01 * 255) ** 2
    assert compare.ssim(flat, other) == pytest.approx((2 * 50 * 80 + c1) / (50**2 + 80**2 + c1))
    noise = a + np.random.default_rng(1).normal(0, 20, a.shape)
    assert 0 < (compare.ssim(a, noise) or 0) < 0.8


def test_the_crop_is_where_they_differ() -> None:
    a = picture(200, 300)
    b = a.copy()
    b[150:160, 220:230] ^= 255
    x, y = compare.busiest(a, b)
    assert x <= 220 <= 230 <= x + CROP
    assert y <= 150 <= 160 <= y + CROP


@pytest.mark.parametrize("size", [(120, 160), (5, 7)])
def test_columns(size: tuple[int, int]) -> None:
    truth = picture(*size)
    small = np.asarray(Image.fromarray(truth).resize((max(1, size[1] // 2), max(1, size[0] // 2))))
    shown = compare.columns(small, truth, truth)
    assert [c.title.split()[0] for c in shown] == ["input", "bicubic", "ours", "truth"]
    assert shown[2].psnr is None  # equal
    assert (shown[1].psnr or 0) > 10
    sheet = compare.sheet(shown, (0, 0))
    assert sheet.width == GAP + 4 * (COLUMN + GAP)
    assert len(compare.columns(small, truth, None)) == 3


def test_the_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    truth = picture(120, 160)
    files = {name: tmp_path / f"{name}.png" for name in ("small", "ours", "truth", "sheet")}
    Image.fromarray(truth).save(files["truth"])
    Image.fromarray(truth).resize((80, 60)).save(files["small"])
    ours = truth.copy()
    ours[60, 80] ^= 8
    Image.fromarray(ours).save(files["ours"])

    def run(*arguments: str) -> int:
        monkeypatch.setattr(sys, "argv", ["compare", *arguments])
        return compare.main()

    three = [str(files[name]) for name in ("small", "ours", "sheet")]
    assert run("--truth", str(files["truth"]), "--crop", "999,8", *three) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["crop"] == [160 - CROP, 8, CROP, CROP]
    assert found["psnr"]["ours"] > found["psnr"]["bicubic"]
    with Image.open(files["sheet"]) as sheet:
        assert sheet.format == "PNG"
    assert run(*three) == 0
    assert json.loads(capsys.readouterr().out)["psnr"] == {"bicubic": None, "ours": None}
    for wrong in (
        ["--truth", str(files["small"]), *three],
        ["--crop", "here", *three],
        [str(tmp_path / "none.png"), *three[1:]],
    ):
        assert run(*wrong) == compare.BAD_INPUT
        assert capsys.readouterr().err.count("\n") == 1


def test_depth_and_transparency(tmp_path: Path) -> None:
    clear = Image.new("LA", (4, 3), (0, 0))
    clear.save(tmp_path / "clear.png")
    assert (compare.read(str(tmp_path / "clear.png")) == 255).all()
    Image.fromarray(np.full((3, 4), 0x8080, np.uint16)).save(tmp_path / "deep.png")
    assert (compare.read(str(tmp_path / "deep.png")) == 0x80).all()
