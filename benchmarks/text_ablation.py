# SPDX-License-Identifier: Apache-2.0
"""What each part of the language engine is worth: tokens/s with everything, and without it.

    python -m benchmarks.text_ablation [--quick] [--json] [--device cpu|gpu] [--model FILE]
        [--repeats N]

Rows are named PHASE without PART: `ours` is with everything, the "peer" without the part, the ratio
what it is worth. Parts are the passes that models run without (engine.passes.OPTIONAL), several
tokens in one submission (`ahead`), and on a GPU what of its features kernels may use: subgroups,
products of halves and int8 (`packed`), matrix units (`coopmat`). Then come single kernels, each for
float16 and int8 weights (benchmarks/text_kernels.py). Runs with and without are
interleaved; a token's launches, bindings and bytes stand in what `pvrctl compile --explain` prints.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from benchmarks import common
from benchmarks.text_cpu import smollm2
from engine.backends.base import Backend
from engine.passes import OPTIONAL
from engine.text import compiled
from engine.text.generate import Generation
from engine.text.model import State, TextModel
from engine.text.request import End, Request

DECODE, PREFILL = 64, 512
FEATURES = {
    "subgroups": frozenset({"subgroup_basic", "subgroup_arithmetic", "subgroup_shuffle"}),
    "packed": frozenset({"fp16", "int_dot"}),
    "coopmat": frozenset({"coopmat"}),
}


def speed(state: State, phase: str) -> float:
    """Tokens/s of one run."""
    state.common([])
    count = PREFILL if phase == "prefill" else 1
    settings = {"max_tokens": 1 if phase == "prefill" else DECODE}
    generation = Generation(state, Request("generate", "a " * count, settings=settings))
    end: End | None = None
    while not generation.finished:
        for event in generation.step():
            end = event if isinstance(event, End) else end
    assert end is not None
    return end.stats[f"{phase}_tokens"] / end.stats[f"{phase}_s"]


def _state(
    stack: ExitStack, backend: Backend, source: Path, folder: Path, without: tuple[str, ...]
) -> State:
    file = folder / f"{'-'.join(without) or 'whole'}.pvrm"
    if not file.exists():
        compiled.write(source, file, "", "", without)
    model = TextModel.load(file, "", backend)
    stack.callback(model.close)
    if "ahead" in without:
        model.ahead = 1
    state = model.state(min(4096, int(model.info["context"])))
    stack.callback(state.close)
    return state


def _poorer(backend: Backend, part: str, make: Callable[[], State]) -> State:
    """What `make` makes when the device lacks the features of a part."""
    info = backend.info
    backend.info = replace(info, features=info.features - FEATURES[part])
    try:
        return make()
    finally:
        backend.info = info


def measure(args: argparse.Namespace) -> list[common.Row]:
    backend = common.backend(args)
    source = Path(args.model) if args.model else smollm2()
    repeats = args.repeats or (2 if args.quick else 5)
    parts = ["join"]  # all that a CPU has of them
    if backend.info.kind == "gpu":
        parts = [*OPTIONAL, "ahead"]
        parts += [name for name, features in FEATURES.items() if features & backend.info.features]
    rows = []
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        stack.callback(backend.close)

        def state(*without: str) -> State:
            return _state(stack, backend, source, Path(folder), without)

        whole = state()
        for part in parts:
            less = _poorer(backend, part, state) if part in FEATURES else state(part)
            for phase in ("decode", "prefill"):
                for warm in (whole, less):
                    speed(warm, phase)
                a, b = common.interleaved(
                    lambda p=phase: speed(whole, p),  # type: ignore[misc]
                    lambda s=less, p=phase: speed(s, p),  # type: ignore[misc]
                    repeats,
                )
                name, middle = (
                    f"{phase} without {part}",
                    (statistics.median(a), statistics.median(b)),
                )
                rows.append(common.row(name, "tokens/s", *middle, "without"))
        if backend.info.kind == "gpu":
            from benchmarks import text_kernels

            rows += text_kernels.rows(backend, repeats, args.quick)  # type: ignore[arg-type]
    return rows


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", choices=("cpu", "gpu"), default="cpu")
    parser.add_argument("--model", help="a GGUF file or folder instead of SmolLM2")
    parser.add_argument("--repeats", type=int, default=0)


if __name__ == "__main__":
    sys.exit(common.main((__doc__ or "").splitlines()[0], measure, options))
