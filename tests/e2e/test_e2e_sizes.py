# SPDX-License-Identifier: Apache-2.0
"""Any size, kept tiles, late frames and sheets, from the command line to the worker and back."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from pvrd.client import Client
from tests.buses import ROOT, until
from tests.daemons import Daemon

pytestmark = pytest.mark.bus
Start = Callable[..., Daemon]


@pytest.fixture(scope="module")
def running(
    tmp_path_factory: pytest.TempPathFactory, models: Path
) -> Iterator[tuple[Daemon, Client]]:
    """A daemon on the CPU, for all of these."""
    folder = tmp_path_factory.mktemp("daemon")
    with Daemon(folder, models, {"gpu.enabled": False}) as made, made.client() as client:
        made.ready(client, "cpu")
        yield made, client


def pvrctl(running: tuple[Daemon, Client], *arguments: str, **env: str) -> Any:
    """The object that a command prints."""
    done = subprocess.run(
        [sys.executable, "-m", "pvrd.ctl.main", "--bus", running[0].address, "--json", *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT), **env}, stdin=subprocess.DEVNULL,
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def picture(path: Path, width: int, height: int) -> Path:
    y, x = np.mgrid[:height, :width]
    gray = 128 + 80 * np.sin(x / 5) * np.cos(y / 7)
    Image.fromarray(np.stack([gray, gray * 0.8, 255 - gray], axis=2).astype(np.uint8)).save(path)
    return path


def clip(path: Path, frames: int, moving: bool) -> Path:
    """A clip of 64x48, still or with a square that moves in its corner."""
    with path.open("wb") as file:
        file.write(b"YUV4MPEG2 W64 H48 F25:1 C420mpeg2\n")
        for n in range(frames):
            luma = np.tile(np.arange(64, dtype=np.uint8) * 3, (48, 1))
            if moving:
                luma[2:6, 2 + n : 6 + n] = 250
            file.write(b"FRAME\n" + luma.tobytes() + bytes([120]) * (2 * 32 * 24))
    return path


@pytest.mark.parametrize(
    ("options", "size"),
    [
        (["--scale", "2.5"], (50, 35)),
        (["--scale", "3"], (60, 42)),
        (["--size", "47x110"], (47, 110)),
        (["--scale", "8", "--model", "fast"], (160, 112)),
    ],
)
def test_pictures_of_any_size(
    running: tuple[Daemon, Client], tmp_path: Path, options: list[str], size: tuple[int, int]
) -> None:
    source, target = picture(tmp_path / "a.png", 20, 14), tmp_path / "b.png"
    record = pvrctl(running, "upscale", *options, str(source), str(target))
    assert (record["width"], record["height"], record["precision"]) == (*size, "f32")
    with Image.open(target) as image:
        assert image.size == size


def test_clips_of_any_size_and_kept_tiles(running: tuple[Daemon, Client], tmp_path: Path) -> None:
    source, target = clip(tmp_path / "a.y4m", 6, True), tmp_path / "b.y4m"
    drawn = tmp_path / "tiles.png"
    record = pvrctl(
        running, "upscale", "--size", "150x100", "--debug-tiles", str(drawn), str(source),
        str(target), PVRD_TILE="32",
    )  # fmt: skip
    assert target.read_bytes().startswith(b"YUV4MPEG2 W150 H100 F25:1 C420mpeg2\n")
    assert record["tiles"] == 6 * 2 * 2
    # The square stays in the first tile; its neighbours see it, too, when it comes near.
    assert 0 < record["tiles_reused"] < 5 * 4
    with Image.open(drawn) as file:
        image = file.convert("RGB")
    assert image.size == (150, 100)
    assert image.getpixel((10, 10)) == (64, 96, 200)  # the CPU
    assert image.getpixel((140, 90)) == (150, 150, 150)  # the frame before
    still = clip(tmp_path / "c.y4m", 6, False)
    kept = pvrctl(running, "upscale", str(still), str(target))
    whole = pvrctl(running, "upscale", "--unchanged", "off", str(still), str(tmp_path / "d.y4m"))
    assert kept["tiles_reused"] == 5 * kept["tiles"] // 6
    assert whole["tiles_reused"] == 0
    assert target.read_bytes() == (tmp_path / "d.y4m").read_bytes()
    assert running[1].statistics()["tiles_reused"] >= kept["tiles_reused"]
    rough = pvrctl(running, "upscale", "--precision", "int8", str(still), str(target))
    assert (kept["precision"], rough["precision"]) == ("f32", "int8")
    assert target.read_bytes() != (tmp_path / "d.y4m").read_bytes()


def test_a_frame_that_would_be_late_is_interpolated(daemon: Start) -> None:
    slow = daemon({"gpu.enabled": False, "debug.faults": ["cpu:slow:100"]})
    with slow.client() as client:
        slow.ready(client, "cpu")
        settings = {"width": 256, "height": 256, "tile": 32, "slots": 1, "adapt": False}
        with client.open_video(settings) as video:
            for pieces in video.input(0):
                for piece in pieces:
                    piece[:] = bytes([77]) * len(piece)
            until(lambda: video.session.properties()["Ready"], "the session")
            # 64 tiles of 0.1 s do not fit; what is left is interpolated in time.
            video.submit(0, 0, deadline=time.monotonic_ns() + 2_000_000_000)
            while (done := video.receive()) is None:
                pass
            assert done.degraded
            assert 0 < done.tiles_fallback < done.tiles == 64
            assert all(abs(b - 77) <= 1 for pieces in video.output(0) for b in pieces[-1][-64:])
        assert client.statistics()["frames"]["degraded"] == 1


def test_compare(running: tuple[Daemon, Client], tmp_path: Path) -> None:
    truth = picture(tmp_path / "truth.png", 120, 90)
    small = tmp_path / "small.png"
    with Image.open(truth) as image:
        image.resize((40, 30), Image.Resampling.BICUBIC).save(small)
    sheet = tmp_path / "sheet.png"
    found = pvrctl(running, "compare", "--truth", str(truth), str(small), str(sheet))
    assert (found["width"], found["height"], found["device"]) == (120, 90, "cpu")
    assert found["psnr"]["ours"] > 20
    assert Image.open(io.BytesIO(sheet.read_bytes())).width > 4 * 300
