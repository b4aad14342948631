# SPDX-License-Identifier: Apache-2.0
"""pvrctl upscale between two ffmpeg: the recipes of docs/hooks.md, formats, long clips."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path

import numpy as np
import pytest

from pvrd.client import Client
from pvrd.rawvideo import FORMATS, parse
from tests.buses import ROOT
from tests.daemons import Restartable
from tests.hooks.conftest import Shell

pytestmark = pytest.mark.bus

_SECTION = (ROOT / "docs/hooks.md").read_text().partition("## ffmpeg")[2].partition("\n## ")[0]
RECIPES = re.findall(r"```sh\n(.*?)```", _SECTION, re.DOTALL)
MAKE = (
    "ffmpeg -v error -f lavfi -i testsrc2=size=64x48:rate=25 -f lavfi -i sine -t 0.24 "
    "-c:v ffv1 -pix_fmt yuv420p -c:a pcm_s16le -shortest in.mkv"
)


def probe(shell: Shell, name: str) -> dict[str, str]:
    out = shell(f"ffprobe -v error -count_frames -show_streams -of json {name}").stdout
    streams = json.loads(out)["streams"]
    found = dict(next(s for s in streams if s["codec_type"] == "video"))
    return {**found, "audio": str(any(s["codec_type"] == "audio" for s in streams))}


@pytest.mark.parametrize("number", range(len(RECIPES)))
def test_recipes(shell: Shell, tmp_path: Path, number: int) -> None:
    shell(MAKE)
    shell(RECIPES[number])
    name = "out.mkv" if (tmp_path / "out.mkv").exists() else "out.y4m"
    found = probe(shell, name)
    size = re.search(r"--size (\d+)x(\d+)", RECIPES[number])
    scale = re.search(r"--scale (\d)", RECIPES[number])
    times = int(scale[1]) if scale else 2
    expected = (int(size[1]), int(size[2])) if size else (64 * times, 48 * times)
    assert (found["width"], found["height"]) == expected
    assert found["nb_read_frames"] == "6"
    assert ("10le" in RECIPES[number]) == (found["pix_fmt"] == "yuv420p10le")
    assert (found["audio"] == "True") == ("1:a?" in RECIPES[number])


def test_there_are_recipes() -> None:
    assert len(RECIPES) >= 4


def planes(form: str) -> bytes:
    """Three frames of raw video, of which the last is the one before it: the daemon keeps its
    tiles."""
    header = parse(f"64x48:{form}")
    shift = (16 if header.upper else header.bits) - 8
    made = b""
    for seq in (0, 1, 1):
        for width, height in header.planes:
            y, x = np.mgrid[:height, :width]
            plane = (128 + 90 * np.sin((x + 9 * seq) / 7) * np.cos(y / 5)).astype(np.uint16)
            made += (plane << shift).astype("<u2" if header.bits > 8 else np.uint8).tobytes()
    return made


def luma(data: bytes, form: str) -> np.ndarray:
    """The luma of the enlarged frames, on the scale of 8 bits."""
    header = parse(f"128x96:{form}")
    samples = np.frombuffer(data, "<u2" if header.bits > 8 else np.uint8).reshape(3, -1)
    assert samples.size == 3 * sum(w * h for w, h in header.planes)
    if header.upper:
        assert not (samples & 63).any()
    return samples[:, : 128 * 96] / 2 ** ((16 if header.upper else header.bits) - 8)


@pytest.fixture(scope="module")
def expected(pvrd: Restartable) -> np.ndarray:
    settings = {"width": 64, "height": 48, "model": "nsr-fast", "device": "cpu"}
    data = np.frombuffer(planes("yuv420p"), np.uint8).reshape(3, -1)
    cuts = [64 * 48, 64 * 48 + 32 * 24]
    frames = [
        [part.reshape(shape) for part, shape in zip(np.split(f, cuts), SHAPES, strict=True)]
        for f in data
    ]
    with Client(pvrd.address) as client, client.open_video(settings) as video:
        return np.array([planes[0].flatten() for _, planes in video.enlarge(frames)], float)


SHAPES = [(48, 64), (24, 32), (24, 32)]


@pytest.mark.parametrize("form", ["nv12", "yuv420p10le", "p010le"])
def test_raw_formats(shell: Shell, tmp_path: Path, expected: np.ndarray, form: str) -> None:
    """A clip of any format is the enlarged clip of 8 bits, to the rounding."""
    (tmp_path / "in.raw").write_bytes(planes(form))
    options = "--device cpu --model nsr-fast"
    shell(f"pvrctl upscale {options} --raw 64x48:{form} - - < in.raw | cat > out.raw")
    assert np.abs(luma((tmp_path / "out.raw").read_bytes(), form) - expected).max() <= 1.01


@pytest.mark.parametrize(("colour", "form"), [("420p10", "yuv420p10le"), ("mono12", "gray12le")])
def test_deep_y4m(
    shell: Shell, tmp_path: Path, expected: np.ndarray, colour: str, form: str
) -> None:
    size = parse(f"64x48:{form}").frame_bytes
    data = planes(form)
    clip = b"YUV4MPEG2 W64 H48 F25:1 Ip C%s XTAG\n" % colour.encode()
    for at in range(0, 3 * size, size):
        clip += b"FRAME\n" + data[at : at + size]
    (tmp_path / "in.y4m").write_bytes(clip)
    shell("pvrctl upscale --device cpu --model nsr-fast in.y4m out.y4m")
    head, *frames = (tmp_path / "out.y4m").read_bytes().split(b"FRAME\n")
    assert head == b"YUV4MPEG2 W128 H96 F25:1 Ip C%s XTAG\n" % colour.encode()
    assert np.abs(luma(b"".join(frames), form) - expected).max() <= 1.01


def test_refusals(shell: Shell, tmp_path: Path) -> None:
    shell(MAKE)
    y4m = "ffmpeg -v error -i in.mkv -strict -1 -f yuv4mpegpipe"
    said = shell(f"{y4m} -flags +ilme+ildct -vf setfield=tff - | pvrctl upscale - o.y4m", 5)
    assert said.stderr.splitlines()[-1] == (
        "pvrctl: The clip is interlaced; deinterlace it first (ffmpeg: -vf yadif), "
        "pvrd takes progressive video."
    )
    said = shell(f"{y4m} -t 0.04 -pix_fmt yuv422p - | pvrctl upscale - o.y4m", 5)
    assert "pvrd takes 4:2:0, 4:4:4 and mono" in said.stderr
    said = shell("head -c 5000 in.mkv | pvrctl upscale --raw 64x48:nv12 - o.raw", 5)
    assert said.stderr == "pvrctl: The clip ends within frame 1.\n"
    assert "raw video such as" in shell("pvrctl upscale --raw 64:nv12 - o.raw", 2).stderr
    assert "raw video such as" in shell("pvrctl upscale --raw 64x48:rgb24 - o.raw", 2).stderr
    said = shell("pvrctl upscale --raw 64x48 --format png - o.raw", 2)
    assert said.stderr == "pvrctl: A raw input cannot become png.\n"
    assert not [name for name in os.listdir(tmp_path) if name.startswith("o.")]


def test_names_of_formats_are_ffmpegs(shell: Shell) -> None:
    known = set(shell("ffmpeg -v error -pix_fmts | awk '{print $2}'").stdout.split())
    assert set(FORMATS) <= known


def test_memory_does_not_grow_with_the_clip(pvrd: Restartable, environment: dict[str, str]) -> None:
    """Ten times the frames, and not a page more (1 MB for the allocator)."""
    frame = bytes(range(256)) * 6  # 32x32 of 4:2:0
    process = subprocess.Popen(
        ["pvrctl", "upscale", "--device", "cpu", "--raw", "32x32:yuv420p", "-", "-"],
        env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    assert process.stdin is not None
    assert process.stdout is not None

    def send(count: int) -> int:
        for _ in range(count):
            process.stdin.write(frame)  # type: ignore[union-attr]
            process.stdin.flush()  # type: ignore[union-attr]
            assert len(process.stdout.read(4 * len(frame))) == 4 * len(frame)  # type: ignore[union-attr]
        status = Path(f"/proc/{process.pid}/status").read_text()
        return int(re.findall(r"VmHWM:\s+(\d+)", status)[0])

    try:
        before = send(100)
        assert send(1000) - before < 1024
        process.stdin.close()
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.stdout.close()
        process.wait()
