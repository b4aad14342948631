# SPDX-License-Identifier: Apache-2.0
"""`engine.compile` and `pvrctl compile`: one file for every size, and sentences for what fails."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine import compile, pvrm
from engine.video import convnet
from pvrd.ctl import main as ctl
from tests.engine import networks
from tests.engine.networks import node, weights

ROOT = Path(__file__).resolve().parents[2]
Capture = pytest.CaptureFixture[str]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """An ONNX file of 150,000 weights."""
    rng = np.random.default_rng(1)
    nodes = [node("Conv", "x w0", "a", pads=[1] * 4), node("Relu", "a", "b")]
    nodes += [node("Conv", "b w1", "c", pads=[1] * 4), node("Relu", "c", "d")]
    nodes += [node("Conv", "d w2", "e", pads=[1] * 4)]
    nodes += [node("DepthToSpace", "e", "y", blocksize=2, mode="CRD")]
    shapes = {"w0": (128, 3, 3), "w1": (112, 128, 3), "w2": (12, 112, 3)}
    path = tmp_path / "net.onnx"
    path.write_bytes(networks.onnx(nodes, {k: weights(rng, *v) for k, v in shapes.items()}))
    return path


def test_a_file_beside_the_source(source: Path, capsys: Capture) -> None:
    assert compile.main([str(source)]) == compile.OK
    target = source.with_suffix(".pvrm")
    with target.open("rb") as f:
        info = convnet.inspect(f.fileno())
    assert (info["scale"], info["format"], info["name"]) == (2, "f16", "net")
    text = capsys.readouterr().out
    assert "x2 of red, green, blue, 4 operations" in text
    assert "radius 4" in text


def test_int8_is_about_a_quarter(source: Path, tmp_path: Path, capsys: Capture) -> None:
    target = tmp_path / "out.pvrm"
    args = [str(source), "-o", str(target), "--weights", "q8", "--json", "--explain"]
    assert compile.main([*args, "--profile", "phone", "--name", "A", "--licence", "MIT"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["output_bytes"] == target.stat().st_size < 0.3 * facts["source_bytes"]
    assert facts["profile"]["profile"] == "phone"
    assert "fuse_acts" in facts["text"]
    metadata = pvrm.Pvrm.open(target).metadata
    assert (metadata["name"], metadata["licence"], metadata["format"]) == ("A", "MIT", "q8")


def test_nothing_is_written_when_something_is_not_run(tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "bad.onnx"
    path.write_bytes(networks.onnx([node("GridSample", "x x", "y")], {}))
    assert compile.main([str(path)]) == compile.NOT_RUN
    assert "GridSample (node /y)" in capsys.readouterr().err
    assert [p.name for p in tmp_path.iterdir()] == ["bad.onnx"]


def test_the_source_stays(source: Path, capsys: Capture) -> None:
    before = source.read_bytes()
    assert compile.main([str(source), "-o", str(source)]) == compile.NOT_RUN
    assert "source's place" in capsys.readouterr().err
    assert source.read_bytes() == before


def test_a_folder_that_is_not_there(source: Path, tmp_path: Path, capsys: Capture) -> None:
    args = [str(source), "-o", str(tmp_path / "no" / "out.pvrm"), "--json"]
    assert compile.main(args) == compile.FAILED
    assert "cannot be written" in json.loads(capsys.readouterr().out)["message"]


def test_checkpoints_need_packages_that_are_named(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "spandrel", None)
    path = tmp_path / "net.pth"
    path.write_bytes(b"PK\x03\x04" + bytes(100))
    assert compile.main([str(path)]) == compile.NOT_RUN
    assert "pip install 'pvrd[pth]'" in capsys.readouterr().err


def pvrctl(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "pvrd.ctl.main", *args],
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "error"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_pvrctl_compile(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "out.pvrm"
    done = pvrctl("compile", str(source), "-o", str(target), "--weights", "q8", "--profile", "old")
    assert done.returncode == 0, done.stderr
    assert "weights q8" in done.stdout
    assert "old: a frame of 960x540" in done.stdout
    assert target.exists()


@pytest.mark.parametrize(
    ("args", "code", "message"),
    [
        (["none.onnx"], 5, "cannot be opened"),
        (["."], 5, "config.json"),
        (["--weights", "q3", "a"], 2, "q3"),
        (["--profile", "toaster", "a.onnx"], 2, "toaster"),
    ],
)
def test_pvrctl_compile_says_what_is_wrong(args: list[str], code: int, message: str) -> None:
    done = pvrctl("compile", *args)
    assert done.returncode == code
    assert message in done.stderr.splitlines()[-1]
    assert done.stdout == ""


def test_errors_are_objects_with_json(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    assert ctl.main(["compile", "none.onnx", "--json"]) == 5
    record: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert (record["error"], record["exit_code"]) == ("InvalidArgument", 5)
