# SPDX-License-Identifier: Apache-2.0
"""`engine.compile` of language models: folders and GGUF files."""

from __future__ import annotations

import json
import os
import stat
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine import compile
from engine.backends import profiles
from engine.backends.null import NullBackend
from engine.errors import UnsupportedModel
from engine.importers import ggml
from engine.text import compiled
from engine.text.model import TextModel
from tests.engine.family_models import CASES, IDS, write_folder, write_gguf, write_tokenizer_json

Capture = pytest.CaptureFixture[str]


def logits(path: Path) -> np.ndarray:
    model = TextModel.load(path, "", NullBackend(reference=True))
    state = model.state()
    state.run(IDS, True)
    out = state.logits()
    state.close()
    model.close()
    return out


def test_a_folder(tmp_path: Path, capsys: Capture) -> None:
    source = write_tokenizer_json(write_folder(tmp_path / "qwen3", CASES["qwen3"]))
    assert compile.main([str(source), "--json", "--explain"]) == compile.OK
    facts = json.loads(capsys.readouterr().out)
    assert facts["output"] == str(tmp_path / "qwen3.pvrm")
    assert (facts["arch"], facts["format"], facts["layers"]) == ("qwen3", "f16", 2)
    assert "fuse_qkv" in facts["text"]
    np.testing.assert_array_equal(logits(tmp_path / "qwen3.pvrm"), logits(source))


@pytest.mark.parametrize("kind", ["F16", "Q4_0"])
@pytest.mark.parametrize("threads", [1, 3])
def test_in_how_many_pieces_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, threads: int
) -> None:
    source = write_gguf(tmp_path / "m.gguf", CASES["llama"], kind)
    compiled.write(source, tmp_path / "whole.pvrm", "", "")
    monkeypatch.setattr(compiled, "_CHUNK_ELEMENTS", 1)  # a tile at a time
    monkeypatch.setattr(compiled, "_packers", lambda: threads)
    compiled.write(source, tmp_path / "pieces.pvrm", "", "")
    assert (tmp_path / "pieces.pvrm").read_bytes() == (tmp_path / "whole.pvrm").read_bytes()


def test_no_more_threads_than_the_kernels_have(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    for given, threads in (("3", 3), ("1", 1), ("64", 4), ("0", 1), ("4,2", 4), ("", 4)):
        monkeypatch.setenv("OMP_NUM_THREADS", given)
        assert compiled._packers() == threads
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {5})
    assert compiled._packers() == 1


def test_no_thread_outlives_what_is_broken_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_gguf(tmp_path / "m.gguf", CASES["llama"])
    monkeypatch.setattr(compiled, "_CHUNK_ELEMENTS", 1)
    before = set(threading.enumerate())
    told: list[float] = []

    def ends(done: float) -> None:
        told.append(done)
        raise KeyboardInterrupt

    with source.open("rb") as file:
        with pytest.raises(KeyboardInterrupt):
            compiled.compiled_model(file.fileno(), "", ends)
        assert set(threading.enumerate()) <= before
        wrong = UnsupportedModel("not this one")

        def refuse(*_: Any) -> Any:
            raise wrong

        monkeypatch.setattr(ggml, "pack_rows", refuse)
        with pytest.raises(UnsupportedModel, match="not this one"):
            compiled.compiled_model(file.fileno(), "")
    assert set(threading.enumerate()) <= before
    assert len(told) == 1


def test_float_matrices_in_eight_bits(tmp_path: Path, capsys: Capture) -> None:
    source = write_gguf(tmp_path / "m.gguf", CASES["llama"])
    args = [str(source), "-o", str(tmp_path / "q8.pvrm"), "--weights", "q8", "--name", "small"]
    assert compile.main(args) == compile.OK
    assert "million parameters in q8" in capsys.readouterr().out
    rounded, exact = logits(tmp_path / "q8.pvrm"), logits(source)
    assert 0 < np.abs(rounded - exact).max() < 0.3
    # Matrices that are no floats stay what they are.
    source = write_gguf(tmp_path / "q4.gguf", CASES["llama"], "Q4_0")
    args = [str(source), "-o", str(tmp_path / "o.pvrm"), "--weights", "q8", "--json"]
    assert compile.main(args) == compile.OK
    assert json.loads(capsys.readouterr().out)["format"] == "q4"


def test_how_it_fits_a_profile(tmp_path: Path, capsys: Capture) -> None:
    source = write_gguf(tmp_path / "m.gguf", CASES["llama"])

    def facts(*more: str) -> dict[str, Any]:
        args = [str(source), "--json", "--explain", "--profile", "bxs-4-64", *more]
        assert compile.main(args) == compile.OK
        found: dict[str, Any] = json.loads(capsys.readouterr().out)
        return found

    whole = facts("--rate", "10")
    assert "tokens/s" in whole["text"]
    assert "glu_into_matvec" in whole["text"]
    less = facts("--without", "glu_into_matvec", "--without", "join")
    assert "glu_into_matvec" not in less["text"]
    # In each layer a gate, two matrices of Q, K and V and one of gate and up.
    layers = whole["layers"]
    assert less["profile"]["calls"] - whole["profile"]["calls"] == 4 * layers
    assert less["profile"]["weights"] == whole["profile"]["weights"]


def test_what_cannot_fit_is_refused(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_gguf(tmp_path / "m.gguf", CASES["llama"])
    small = replace(profiles.load("old"), limits={"max_storage_range": 1 << 10})
    monkeypatch.setattr(profiles, "load", lambda name: small)
    assert compile.main([str(source), "--profile", "old"]) != compile.OK
    assert "can bind" in capsys.readouterr().err
    assert not (tmp_path / "m.pvrm").exists()


def test_what_does_not_go(tmp_path: Path, capsys: Capture) -> None:
    source = write_gguf(tmp_path / "m.gguf", CASES["llama"])
    assert compile.main([str(source), "--licence", "MIT"]) == compile.NOT_RUN
    assert "enlarge pictures" in capsys.readouterr().err
    empty = tmp_path / "empty"
    empty.mkdir()
    assert compile.main([str(empty), "--json"]) == compile.NOT_RUN
    assert "config.json" in json.loads(capsys.readouterr().out)["message"]
    assert not (tmp_path / "empty.pvrm").exists()


def test_four_bits_with_a_text_that_says_what_matters(tmp_path: Path, capsys: Capture) -> None:
    source = write_gguf(tmp_path / "m.gguf", CASES["llama"])
    plain, fitted = tmp_path / "plain.pvrm", tmp_path / "fitted.pvrm"
    args = [str(source), "-o", str(fitted), "--weights", "q4", "--json"]
    assert compile.main(args) == compile.OK
    facts = json.loads(capsys.readouterr().out)
    assert facts["format"] == "q4"
    cost = facts["perplexity"]
    assert cost["text"] == "calibration.txt"
    assert cost["tokens"] > 100
    assert 0.5 < cost["after"] / cost["before"] < 2
    assert f"{cost['after']:.2f} now" in facts["text"]
    args = [str(source), "-o", str(plain), "--weights", "q4", "--calibrate", "none"]
    assert compile.main(args) == compile.OK
    assert "erplexity" not in capsys.readouterr().out
    exact = logits(source)
    for path in (plain, fitted):
        assert 0 < np.abs(logits(path) - exact).max() < 3
    assert (logits(plain) != logits(fitted)).any()


def test_a_text_that_cannot_be_calibrated_by(tmp_path: Path, capsys: Capture) -> None:
    source = write_gguf(tmp_path / "m.gguf", CASES["llama"])
    short = tmp_path / "short.txt"
    short.write_text("a few words")
    latin = tmp_path / "latin.txt"
    latin.write_bytes(b"\xe4" * 10000)
    for text, said in (
        (short, "are the least"), (tmp_path / "none.txt", "read: No such file or directory."),
        (latin, "is not UTF-8"), (Path("/dev/zero"), "has more than 64 MiB"),
    ):  # fmt: skip
        args = [str(source), "--weights", "q4", "--calibrate", str(text)]
        assert compile.main(args) == compile.NOT_RUN
        assert said in capsys.readouterr().err
    assert not (tmp_path / "m.pvrm").exists()


def test_no_source_is_overwritten(tmp_path: Path, capsys: Capture) -> None:
    source = write_gguf(tmp_path / "m.gguf", CASES["llama"])
    link = tmp_path / "link.gguf"
    link.symlink_to(source)
    folder = write_tokenizer_json(write_folder(tmp_path / "qwen3", CASES["qwen3"]))
    weights = next(folder.glob("*.safetensors"))
    before = source.read_bytes(), weights.read_bytes()
    for given, target in ((source, source), (source, link), (folder, weights)):
        assert compile.main([str(given), "-o", str(target)]) == compile.NOT_RUN
        assert "would take its source's place" in capsys.readouterr().err
    assert (source.read_bytes(), weights.read_bytes()) == before
    assert compile.main([str(folder), "-o", str(folder / "own.pvrm")]) == compile.OK
    assert compile.main([str(folder), "-o", str(folder / "own.pvrm")]) == compile.OK, "once more"
    (tmp_path / "m.bin").write_bytes(b"of another network, under the same name")
    assert compile.main([str(source), "-o", str(tmp_path / "m.bin")]) == compile.NOT_RUN
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    assert compile.main([str(source), "-o", str(fifo)]) == compile.FAILED
    assert "no regular file" in capsys.readouterr().err
    assert stat.S_ISFIFO(fifo.stat().st_mode)


def test_rates_that_are_none(tmp_path: Path, capsys: Capture) -> None:
    for rate in ("nan", "-1", "0", "inf", "many"):
        with pytest.raises(SystemExit):
            compile.main([str(tmp_path), "--profile", "phone", "--rate", rate])
        assert "invalid number of GB/s value" in capsys.readouterr().err
