# SPDX-License-Identifier: Apache-2.0
"""upscale as a process: clips through the ring, pictures, pipes, and every way to end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from pvrd.y4m import Header
from tests.buses import until

pytestmark = pytest.mark.bus

PNG = b"\x89PNG\r\n\x1a\n" + bytes(range(100))
JPEG = b"\xff\xd8\xff\xe0" + bytes(range(100))


def clip(header: Header, frames: int, params: bytes = b"") -> bytes:
    body = [
        b"FRAME" + params + b"\n" + bytes((n * 37 + at) % 256 for at in range(header.frame_bytes))
        for n in range(frames)
    ]
    return header.line() + b"".join(body)


def doubled(data: bytes, header: Header, frames: int, params: bytes = b"") -> bytes:
    """What the fake makes of a clip: each sample repeated."""
    found = [header.sized(2 * header.width, 2 * header.height).line()]
    at = len(header.line())
    for _ in range(frames):
        at += len(b"FRAME" + params + b"\n")
        found.append(b"FRAME" + params + b"\n")
        for (width, height), (wide, high) in zip(
            header.planes, header.sized(2 * header.width, 2 * header.height).planes, strict=True
        ):
            for y in range(high):
                row = data[at + y // 2 * width : at + (y // 2 + 1) * width]
                found.append(bytes(sample for sample in row for _ in range(2))[:wide])
            at += width * height
    return b"".join(found)


HEADERS = [
    Header(16, 12, "25:1", "1:1", "p", "420jpeg", ("YSCSS=420JPEG", "COLORRANGE=FULL")),
    Header(7, 5, "30000:1001", "10:11", "", "420mpeg2"),
    Header(1, 1, colour="mono"),
    Header(5, 300, colour=""),
]


@pytest.mark.parametrize("header", HEADERS, ids=lambda header: f"{header.width}x{header.height}")
@pytest.mark.parametrize("model", ["luma", "gaps"])
def test_a_clip_through_pipes(fake, header: Header, model: str) -> None:
    data = clip(header, 5, b" Xa=b")
    done = fake.run("upscale", "--model", model, "-", "-", stdin=data)
    assert (done.code, done.err) == (0, "")
    assert done.out == doubled(data, header, 5, b" Xa=b")
    options = fake.expect("options", model=model, width=header.width)
    assert options["pixel"] == ("gray" if header.mono else "i420")
    assert options["siting"] == ("left" if header.colour == "420mpeg2" else "centre")
    assert options["full_range"] is header.full_range


def test_a_clip_through_files(fake, tmp_path: Path) -> None:
    header = HEADERS[0]
    source, target = tmp_path / "in 名.y4m", tmp_path / "out 名.y4m"
    source.write_bytes(clip(header, 3))
    done = fake.run("--json", "upscale", str(source), str(target))
    record = done.json
    assert (done.code, done.err) == (0, "")
    assert record.pop("fps") > 0
    assert record == {
        "frames": 3, "width": 32, "height": 24, "scale": 2, "model": "luma", "device": "cpu",
        "device_name": "Fake \x1b[31mCPU", "ms_p50": 2.5, "ms_p99": 2.5, "tiles": 12,
        "tiles_reused": 0, "tiles_fallback": 3, "restarts": 1, "precision": "",
    }  # fmt: skip
    assert target.read_bytes() == doubled(source.read_bytes(), header, 3)
    assert sorted(os.listdir(tmp_path)) == sorted([source.name, target.name])


def test_json_goes_aside_when_the_clip_takes_standard_output(fake) -> None:
    header = HEADERS[1]
    data = clip(header, 1)
    done = fake.run("--json", "upscale", "-", "-", stdin=data)
    assert done.out == doubled(data, header, 1)
    assert json.loads(done.err)["frames"] == 1
    done = fake.run("--json", "upscale", "-", "-", stdin=b"")
    assert (done.code, done.out) == (5, b"")
    assert json.loads(done.err.splitlines()[-1])["exit_code"] == 5


@pytest.mark.parametrize(
    ("data", "part"),
    [
        (b"", "empty"),
        (b"YUV", "neither"),
        (b"RIFF1234", "neither"),
        (b"YUV4MPEG2 W16 H12\n", "no frames"),
        (b"YUV4MPEG2 W16 H12 It\n", "interlaced"),
        (b"YUV4MPEG2 W16 H12 C422\n", "'422'"),
        (b"YUV4MPEG2 W0 H12\n", "W0"),
        (b"YUV4MPEG2 W16", "within the y4m header"),
        (clip(HEADERS[0], 2)[:-1], "ends within frame 1"),
        (clip(HEADERS[0], 1) + b"GARBAGE", "no frame mark before frame 1"),
    ],
)
def test_bad_clips_are_a_sentence(fake, tmp_path: Path, data: bytes, part: str) -> None:
    source, target = tmp_path / "in", tmp_path / "out"
    source.write_bytes(data)
    target.write_bytes(b"kept")
    assert part in fake.run("upscale", str(source), str(target)).failed(5)
    assert target.read_bytes() == b"kept"
    assert sorted(os.listdir(tmp_path)) == ["in", "out"]


def test_frames_before_the_damage_are_delivered(fake) -> None:
    header = HEADERS[0]
    data = clip(header, 4)
    done = fake.run("upscale", "-", "-", stdin=data[:-5])
    assert done.code == 5
    assert done.out == doubled(data, header, 3)


def test_a_frame_comes_back_before_the_next_goes_in(fake) -> None:
    header = HEADERS[0]
    data = clip(header, 2)
    one = len(header.line()) + 6 + header.frame_bytes
    expected = doubled(data, header, 2)
    first = len(doubled(data, header, 1))
    with fake.start("upscale", "-", "-") as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(data[:one])
        process.stdin.flush()
        assert process.stdout.read(first) == expected[:first]
        process.stdin.write(data[one:])
        process.stdin.close()
        assert process.stdout.read() == expected[first:]
        assert process.wait(60) == 0


@pytest.mark.parametrize(("data", "name"), [(PNG, "a.png"), (JPEG, "b.jpeg")])
def test_pictures(fake, tmp_path: Path, data: bytes, name: str) -> None:
    source, target = tmp_path / name, tmp_path / "out.png"
    source.write_bytes(data)
    done = fake.run("--json", "upscale", "--scale", "2", str(source), str(target))
    assert done.code == 0
    assert done.json == {
        "frames": 1, "width": 8, "height": 6, "scale": 2, "model": "luma", "device": "cpu",
        "device_name": "Fake \x1b[31mCPU", "fps": 250.0, "ms_p50": 4.0, "ms_p99": 4.0, "tiles": 2,
        "tiles_reused": 0, "tiles_fallback": 0, "restarts": 0, "precision": "", "format": "png",
    }  # fmt: skip
    assert target.read_bytes() == data * 2
    assert fake.expect("options", stream=True)["format"] == "png"


def test_sizes_and_tiles_go_to_the_daemon(fake, tmp_path: Path) -> None:
    source, target = tmp_path / "a.png", tmp_path / "b.png"
    source.write_bytes(PNG)
    files = [str(source), str(target)]
    env = {**fake.env, "PVRD_TILE": "64", "PVRD_OVERLAP": "8"}
    assert fake.run("upscale", "--scale", "2.5", *files, env=env).code == 0
    options = fake.expect("options", stream=True)
    assert (options["scale"], options["tile"], options["overlap"]) == (2.5, 64, 8)
    assert fake.run("upscale", "--size", "90x60", "--tile", "32", *files, env=env).code == 0
    options = fake.expect("options", stream=True)
    assert (options["out_width"], options["out_height"], options["tile"]) == (90, 60, 32)
    for wrong in (["--scale", "9"], ["--size", "90"], ["--size", "0x4"], ["--tile", "-1"]):
        assert fake.run("upscale", *wrong, *files).code == 2
    many = fake.run("upscale", *files, env={**env, "PVRD_TILE": "many"})
    assert "PVRD_TILE" in many.failed(2)


def test_a_picture_through_pipes(fake) -> None:
    done = fake.run("upscale", "--format", "jpeg", "-", "-", stdin=PNG)
    assert (done.code, done.out) == (0, PNG * 2)
    assert "cannot become" in fake.run("upscale", "--format", "y4m", "-", "-", stdin=PNG).failed(2)
    bad = fake.run("upscale", "--format", "png", "-", "-", stdin=clip(HEADERS[0], 1))
    assert "cannot become" in bad.failed(2)


def test_out_is_what_its_name_says(fake, tmp_path: Path) -> None:
    clip_file, picture = tmp_path / "in.y4m", tmp_path / "in.png"
    clip_file.write_bytes(clip(HEADERS[0], 1))
    picture.write_bytes(PNG)

    def refused(source: Path, name: str, *options: str) -> str:
        done = fake.run("upscale", *options, str(source), str(tmp_path / name) if name else "")
        return str(done.failed(2))

    assert "y4m input cannot become png" in refused(clip_file, "out.PNG")
    assert "png input cannot become y4m" in refused(picture, "out.y4m")
    assert "not mp4" in refused(clip_file, "out.mp4")
    assert "not webp" in refused(picture, "out.WebP")
    assert "named" in refused(picture, "")
    assert sorted(os.listdir(tmp_path)) == ["in.png", "in.y4m"]
    named = fake.run("upscale", "--format", "png", str(picture), str(tmp_path / "out.webp"))
    assert (named.code, (tmp_path / "out.webp").read_bytes()) == (0, PNG * 2)


def test_refusals(fake, tmp_path: Path) -> None:
    source = tmp_path / "in.y4m"
    source.write_bytes(clip(HEADERS[0], 1))
    refused = fake.run("upscale", "--model", "QuotaExceeded", str(source), str(tmp_path / "o"))
    assert refused.failed(4) == "The fake says QuotaExceeded."
    failed = fake.run("upscale", "--model", "late", str(source), str(tmp_path / "o"))
    assert failed.failed(5) == "It fell over."
    assert os.listdir(tmp_path) == ["in.y4m"]


def test_out_must_not_be_in(fake, tmp_path: Path) -> None:
    source, link = tmp_path / "in.png", tmp_path / "link.png"
    source.write_bytes(PNG)
    link.symlink_to(source)
    for name in (source, link):
        assert "OUT is IN" in fake.run("upscale", str(source), str(name)).failed(2)
    assert source.read_bytes() == PNG
    assert "directory" in fake.run("upscale", str(source), str(tmp_path)).failed(2)
    assert "No such file" in fake.run("upscale", str(tmp_path / "no"), "x").failed(5)
    assert "directory" in fake.run("upscale", str(tmp_path), "x").failed(5)
    nowhere = fake.run("upscale", str(source), str(tmp_path / "no/out.png")).failed(1)
    assert "cannot be written: No such file or directory" in nowhere


def test_a_link_stays_a_link_and_a_mode_a_mode(fake, tmp_path: Path) -> None:
    source, link, real = tmp_path / "in.png", tmp_path / "link.png", tmp_path / "real.png"
    source.write_bytes(PNG)
    real.write_bytes(b"old")
    real.chmod(0o640)
    link.symlink_to("real.png")
    assert fake.run("upscale", str(source), str(link)).code == 0
    assert link.is_symlink()
    assert real.read_bytes() == PNG * 2
    assert real.stat().st_mode & 0o777 == 0o640


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_terminal_that_closes_leaves_nothing_behind(
    fake, tmp_path: Path, number: signal.Signals
) -> None:
    with fake.start("upscale", "-", str(tmp_path / "o.y4m"), start_new_session=True) as process:
        process.stdin.write(clip(HEADERS[0], 1))
        process.stdin.flush()  # and stays open: it waits for more
        until(lambda: os.listdir(tmp_path), "the unfinished file")
        process.send_signal(number)
        assert process.wait(60) == 130
    assert os.listdir(tmp_path) == []


def test_what_cannot_be_said_has_its_exit_code_still(fake, tmp_path: Path) -> None:
    with open("/dev/full", "wb") as full:
        assert fake.run("upscale", str(tmp_path / "no"), "x", stderr=full).code == 5


def test_a_full_disk_is_a_sentence(fake, tmp_path: Path) -> None:
    data = clip(HEADERS[0], 2)
    sentence = fake.run("upscale", "-", "/dev/full", stdin=data).failed(1)
    assert sentence == "/dev/full cannot be written: the disk is full."
    with open("/dev/full", "wb") as full:
        assert "full" in fake.run("upscale", "-", "-", stdin=data, stdout=full).failed(1)


def test_a_file_that_may_not_grow_leaves_nothing_behind(fake, tmp_path: Path) -> None:
    source = tmp_path / "in.y4m"
    source.write_bytes(clip(HEADERS[0], 40))
    script = 'trap "" XFSZ; ulimit -f 8; exec "$@"'
    command = [sys.executable, "-m", "pvrd.ctl.main", "upscale", "in.y4m", "out.y4m"]
    done = subprocess.run(
        ["sh", "-c", script, "sh", *command],
        cwd=tmp_path, env=fake.env, stderr=subprocess.PIPE, text=True, timeout=60,
    )  # fmt: skip
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert "out.y4m cannot be written: File too large." in done.stderr
    assert os.listdir(tmp_path) == ["in.y4m"]


def test_a_reader_that_goes_away_ends_it_quietly(fake) -> None:
    header = HEADERS[0]
    with fake.start("upscale", "-", "-") as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        process.stdin.write(clip(header, 1))
        process.stdin.flush()
        assert process.wait(60) == 1
        assert process.stderr.read() == b""
    fake.expect("close")


def test_ctrl_c_closes_the_session_and_leaves_nothing(fake, tmp_path: Path) -> None:
    target = tmp_path / "out.y4m"
    with fake.start("upscale", "--model", "endless", "-", str(target)) as process:
        assert process.stdin is not None
        process.stdin.write(clip(HEADERS[0], 1))
        process.stdin.flush()
        fake.expect("frame")
        process.send_signal(signal.SIGINT)
        fake.expect("close")
        _out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (130, b"")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("kind", ["clip", "picture"])
def test_the_daemon_dies_in_the_middle(mortal, tmp_path: Path, kind: str) -> None:
    source = tmp_path / "in"
    source.write_bytes(clip(HEADERS[0], 9) if kind == "clip" else PNG)
    done = mortal.run("upscale", "--model", "dies", str(source), str(tmp_path / "out"))
    assert done.failed(1) == "The daemon ended before the work was done."
    assert os.listdir(tmp_path) == ["in"]
