# SPDX-License-Identifier: Apache-2.0
"""The narrow form of a text model: 4-bit matrices whatever the source has, beside the full one."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine import pvrm
from engine.backends.cpu import CpuBackend
from engine.graph import Graph
from engine.text.compiled import described, inspect
from engine.text.model import TextModel
from tests.engine.conftest import write_model

IDS = [1, 40, 41, 300, 77, 120, 5]


def logits(model: TextModel) -> Any:
    state = model.state(64)
    try:
        state.run(IDS, True)
        return state.logits()
    finally:
        state.close()


def formats(path: Path) -> set[tuple[str, bool]]:
    """(format, at the ends) of all matrices of a compiled model."""
    graph: Graph = described(pvrm.Pvrm.open(path))[1]
    vocab = graph.attrs["vocab"]
    return {(w.format, w.shape[0] == vocab) for w in graph.weights.values() if w.layout != "rows"}


@pytest.mark.parametrize("kind", ["F16", "Q8_0", "Q5_1"])
def test_a_narrow_model_is_the_same_model_in_fewer_bits(tmp_path: Path, kind: str) -> None:
    source = write_model(tmp_path / "m.gguf", kind)
    full, narrow = tmp_path / "k.pvrm", tmp_path / "k-q4.pvrm"
    backend = CpuBackend(1)
    wide = TextModel.load(source, str(full), backend)
    low = TextModel.load(source, str(narrow), backend, narrow=True)
    try:
        assert low.info["format"] == "q4"
        assert formats(narrow) == {("q4", False), ("q8", True)}
        assert low.info["parameters"] == wide.info["parameters"]
        assert low.info["nbytes"] < 0.75 * wide.info["nbytes"]
        assert wide.info["narrows"]
        assert not low.info["narrows"]
        ours, theirs = logits(low), logits(wide)
        assert np.corrcoef(ours, theirs)[0, 1] > 0.97
        assert not np.array_equal(ours, theirs)
    finally:
        wide.close()
        low.close()
    stamp = narrow.stat().st_mtime_ns, full.stat().st_mtime_ns
    TextModel.load(source, str(narrow), backend, narrow=True).close()
    TextModel.load(source, str(full), backend).close()
    assert stamp == (narrow.stat().st_mtime_ns, full.stat().st_mtime_ns), "compiled once"
    # Of the wrong form a file in the cache is none.
    os.replace(full, narrow)
    again = TextModel.load(source, str(narrow), backend, narrow=True)
    assert again.info["format"] == "q4"
    again.close()


def test_what_has_four_bits_already_has_no_narrower_form(tmp_path: Path) -> None:
    for kind, able in (("Q4_0", False), ("Q4_1", False), ("F16", True), ("Q8_0", True)):
        fd = os.open(write_model(tmp_path / f"{kind}.gguf", kind), os.O_RDONLY)
        try:
            assert inspect(fd)["narrows"] is able, kind
        finally:
            os.close(fd)
