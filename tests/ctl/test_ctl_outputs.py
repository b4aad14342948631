# SPDX-License-Identifier: Apache-2.0
"""What pvrctl reads has a bound, what it writes spares what is there, and no encoding stops it."""

from __future__ import annotations

import argparse
import contextlib
import os
import stat
import struct
import subprocess
import sys
import threading
import zlib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from PIL import Image

from pvrd.ctl import common
from pvrd.ctl.main import main
from tests.ctl.test_ctl_upscale import HEADERS, PNG, clip

TRACE = b'{"traceEvents":[]}'


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A daemon that makes traces; the seconds that it was asked for."""
    asked: list[float] = []

    def trace(seconds: float) -> int:
        asked.append(seconds)
        memory = os.memfd_create("trace")
        os.pwrite(memory, TRACE, 0)
        return memory

    @contextlib.contextmanager
    def client(_args: argparse.Namespace) -> Iterator[SimpleNamespace]:
        yield SimpleNamespace(trace=trace)

    monkeypatch.setattr(common, "client", client)
    return asked


def test_a_trace_goes_into_files_and_pipes(
    traced: list[float], tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    file, pipe = tmp_path / "trace.json", tmp_path / "pipe"
    assert main(["trace", str(file)]) == 0
    assert file.read_bytes() == TRACE
    os.mkfifo(pipe)
    read: list[bytes] = []
    reader = threading.Thread(target=lambda: read.append(pipe.read_bytes()), daemon=True)
    reader.start()
    assert main(["trace", str(pipe)]) == 0
    reader.join()
    assert read == [TRACE]
    assert stat.S_ISFIFO(pipe.stat().st_mode), "nothing took its place"
    capfdbinary.readouterr()
    assert main(["trace", "-"]) == 0
    assert capfdbinary.readouterr().out == TRACE
    assert len(traced) == 3


def test_a_trace_that_has_no_place_costs_no_time(
    traced: list[float], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["trace", str(tmp_path / "no" / "t.json")]) == 1
    assert "t.json cannot be written: No such file or directory." in capsys.readouterr().err
    assert main(["trace", str(tmp_path)]) == 2
    assert not traced
    assert os.listdir(tmp_path) == []


@pytest.mark.bus
def test_where_tiles_are_drawn_is_known_before_the_work(fake, tmp_path: Path) -> None:
    source, target, drawn = tmp_path / "in.png", tmp_path / "out.png", tmp_path / "tiles.png"
    source.write_bytes(PNG)
    files = [str(source), str(target)]
    wrong = fake.run("upscale", "--debug-tiles", str(tmp_path / "no/x.png"), *files)
    assert "x.png cannot be written: No such file or directory." in wrong.failed(1)
    assert "names OUT" in fake.run("upscale", "--debug-tiles", str(target), *files).failed(2)
    assert "OUT is IN" in fake.run("upscale", "--debug-tiles", str(source), *files).failed(2)
    assert os.listdir(tmp_path) == ["in.png"]
    full = fake.run("upscale", "--debug-tiles", "/dev/full", *files)
    assert full.failed(1) == "/dev/full cannot be written: the disk is full."
    assert target.read_bytes() == PNG * 2, "the work is not lost"
    done = fake.run("--json", "upscale", "--debug-tiles", str(drawn), *files)
    assert (done.code, done.json["width"]) == (0, 8)
    assert "tile_map" not in done.json
    with Image.open(drawn) as picture:
        assert picture.size == (8, 6)
    drawn.unlink()
    video = clip(HEADERS[0], 2)
    assert fake.run("upscale", "--debug-tiles", str(drawn), "-", "-", stdin=video).code == 0
    assert drawn.exists()


@pytest.mark.bus
def test_input_without_an_end_is_a_sentence(fake) -> None:
    for arguments, said in (
        (["generate", "-"], "The text has more than the 1 MiB that pvrd takes."),
        (["chat"], "A line has more than 1048576 characters."),
        (["extract", "/dev/zero", "x"], "The schema /dev/zero cannot be read: it has more than"),
    ):
        # By way of sh: what run() is given for standard input has an end.
        command = [sys.executable, "-m", "pvrd.ctl.main", *arguments]
        done = subprocess.run(
            ["sh", "-c", 'ulimit -v 4000000; exec "$@" </dev/zero', "sh", *command],
            env=fake.env, capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
        assert (done.returncode, done.stderr.count("\n")) == (5, 1), done.stderr
        assert said in done.stderr


def test_schemas_that_cannot_be_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    latin = tmp_path / "latin.json"
    latin.write_bytes(b'{"title": "\xe4"}')
    for name, why in (
        (str(tmp_path), "Is a directory"),
        (str(tmp_path / "none"), "No such file or directory"),
        (str(latin), "it is not UTF-8"),
    ):
        assert main(["extract", name, "text"]) == 5
        assert capsys.readouterr().err == f"pvrctl: The schema {name} cannot be read: {why}.\n"


def test_a_truth_that_is_no_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = tmp_path / "text"
    text.write_text("no picture")
    assert main(["compare", "--truth", str(text), "in.png", str(tmp_path / "out.png")]) == 5
    assert capsys.readouterr().err == f"pvrctl: {text}: neither a PNG nor a JPEG picture.\n"


@pytest.mark.parametrize(
    ("side", "text", "why"),
    [(16000, b"", "the picture is too large"),
     (4, bytes(80 << 20), "neither a PNG nor a JPEG picture")],
)  # fmt: skip
def test_a_truth_that_would_burst(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], side: int, text: bytes, why: str
) -> None:
    """Pillow has words of its own for sides, and for texts inside that are too long."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        check = struct.pack(">I", zlib.crc32(kind + body))
        return struct.pack(">I", len(body)) + kind + body + check

    truth = tmp_path / "t.png"
    head = chunk(b"IHDR", struct.pack(">IIBBBBB", side, side, 8, 0, 0, 0, 0))
    note = chunk(b"zTXt", b"a\0\0" + zlib.compress(text, 1))
    rows = chunk(b"IDAT", zlib.compress(bytes(20)))
    truth.write_bytes(PNG[:8] + head + note + rows + chunk(b"IEND", b""))
    assert main(["compare", "--truth", str(truth), "in.png", str(tmp_path / "out.png")]) == 5
    assert capsys.readouterr().err == f"pvrctl: {truth}: {why}.\n"


@pytest.mark.bus
def test_what_an_encoding_lacks_stops_nothing(fake) -> None:
    env = {**fake.env, "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}
    plain = fake.run("generate", "x ä☃", env=env)
    assert plain.code == 0
    assert b"?" in plain.out
    said = fake.run("--json", "generate", "x ä☃", env=env)
    assert said.out.isascii()
    assert "ä☃" in said.json["text"]


def test_wrong_counts_are_told_by_what_is_right(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "text", "-p", "many"]) == 2
    assert "invalid list such as 128,512 value: 'many'" in capsys.readouterr().err
