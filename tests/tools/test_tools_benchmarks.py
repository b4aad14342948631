# SPDX-License-Identifier: Apache-2.0
"""Benchmarks are programs of one form."""

from __future__ import annotations

import importlib

import pytest

from benchmarks import common

# qos_gpu is a part of qos, with a folder.
MEASURE = sorted(
    path.stem
    for path in (common.ROOT / "benchmarks").glob("*.py")
    if "\ndef measure(args: argparse.Namespace) ->" in path.read_text(encoding="utf-8")
)


def test_there_are_benchmarks() -> None:
    assert {"nsr_streams", "text_kernels", "gst_cameras"} <= set(MEASURE)


@pytest.mark.parametrize("name", MEASURE)
def test_what_measures_is_a_program(name: str) -> None:
    module = importlib.import_module(f"benchmarks.{name}")
    assert module.__file__ is not None
    text = (common.ROOT / "benchmarks" / f"{name}.py").read_text(encoding="utf-8")
    main = text.partition('\nif __name__ == "__main__":\n')[2]
    assert "main(" in main
    assert (module.__doc__ or "").strip()
