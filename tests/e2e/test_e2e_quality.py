# SPDX-License-Identifier: Apache-2.0
"""Set5 through `pvrctl upscale` as I420 frames: as good as promised, alike on both devices."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import numpy as np
import pytest

from benchmarks.nsr_quality import luma, psnr

ROOT = Path(__file__).resolve().parents[2]
DATA = Path(os.environ.get("PVRD_TEST_DATA", ROOT.parent / "shared/data/test"))

pytestmark = pytest.mark.bus


def upscale(folder: Path, low: np.ndarray, *arguments: str, software: bool) -> np.ndarray:
    """The enlarged luma of one frame [2H, 2W]; chroma is grey."""
    height, width = low.shape
    chroma = 2 * ((width + 1) // 2) * ((height + 1) // 2)
    head = f"YUV4MPEG2 W{width} H{height} F25:1 Ip A1:1 C420jpeg\nFRAME\n".encode()
    (folder / "in.y4m").write_bytes(head + low.tobytes() + bytes([128]) * chroma)
    tool = [str(ROOT / "tools/with-pvrd"), *(["--allow-software"] if software else [])]
    command = [*tool, "pvrctl", "--json", "upscale", *arguments]
    done = subprocess.run(
        [*command, str(folder / "in.y4m"), str(folder / "out.y4m")],
        capture_output=True,
        text=True,
        timeout=600,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert (report["frames"], report["width"], report["height"]) == (1, 2 * width, 2 * height)
    assert report["device"] == ("gpu" if software else "cpu")
    raw = (folder / "out.y4m").read_bytes()
    frame = raw[raw.index(b"FRAME\n") + 6 :]
    return np.frombuffer(frame, np.uint8, 4 * width * height).reshape(2 * height, 2 * width)


@pytest.mark.gpu
def test_set5_through_pvrctl(tmp_path: Path) -> None:
    folder = DATA / "Set5/image_SRF_2"
    pictures = sorted(folder.glob("*_HR.png"))
    if not pictures:
        pytest.skip("shared pictures absent")
    found = []
    for high in pictures:
        low = np.rint(luma(high.with_name(high.name.replace("_HR", "_LR")))).astype(np.uint8)
        frame = upscale(tmp_path, low, "--device", "cpu", software=False)
        found.append(psnr(frame.astype(np.float64), luma(high)[: frame.shape[0], : frame.shape[1]]))
    assert np.mean(found) >= 36.0

    # The last picture again: by the GPU, and in tiles of another size.
    gpu = upscale(tmp_path, low, "--device", "gpu", software=True)
    assert np.abs(gpu.astype(int) - frame.astype(int)).max() <= 1
    tiled = upscale(tmp_path, low, "--device", "cpu", "--tile", "32", software=False)
    assert np.array_equal(tiled, frame)
