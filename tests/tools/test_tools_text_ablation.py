# SPDX-License-Identifier: Apache-2.0
"""The ablation of the text engine measures what it says, on a tiny model."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from benchmarks import text_ablation
from engine.backends.cpu import CpuBackend
from engine.text.model import TextModel
from tests.engine.conftest import Shape, write_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    shape = Shape(layers=1, context=2048)  # a letter and a space are two tokens
    return write_model(tmp_path_factory.mktemp("ablation") / "m.gguf", "Q8_0", shape)


@pytest.mark.parametrize("clock", ["cpu", "wall"])
def test_rows(model: Path, clock: str) -> None:
    args = Namespace(device="cpu", threads=1, model=str(model), repeats=1, quick=True, clock=clock)
    rows = text_ablation.measure(args)
    assert [row.name for row in rows] == [
        "decode without join",
        "prefill without join",
        "prefill without tail",
    ]
    assert all(row.ours > 0 and row.ratio for row in rows)


def test_a_part_that_is_left_out_comes_back(model: Path) -> None:
    backend = CpuBackend(1)
    loaded = TextModel.load(model, "", backend)
    less = text_ablation._without_tail(backend, loaded.state)
    whole = loaded.state()
    programs: list[Any] = [state.executable for state in (less, whole)]
    assert ["tail" in p.program.sequences for p in programs] == [False, True]
    for state in (less, whole):
        state.close()
    loaded.close()
    backend.close()
