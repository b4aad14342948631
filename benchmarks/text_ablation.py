# SPDX-License-Identifier: Apache-2.0
"""What each part of the language engine is worth: tokens/s with everything, and without it.

    python -m benchmarks.text_ablation [--quick] [--json] [--device cpu|gpu] [--model FILE]
        [--repeats N] [--clock cpu]

Rows are named PHASE without PART: `ours` is with everything, the "peer" without the part, the ratio
what it is worth. Parts are the passes that models run without (engine.passes.OPTIONAL), a prompt's
last layer for its last token alone (`tail`, of prefill), several tokens in one submission
(`ahead`), and on a GPU what of its features kernels may use: subgroups, products of halves and int8
(`packed`), matrix units (`coopmat`). Then come single kernels, each for float16 and int8 weights
(benchmarks/text_kernels.py). Runs with and without are interleaved; a token's launches, bindings
and bytes stand in what `pvrctl compile --explain` prints. With `--clock cpu` tokens are divided by
the seconds of all threads of the process, which other programs on the machine change less.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks import common
from benchmarks.peer_process import CLOCKS
from benchmarks.text_cpu import smollm2
from engine.backends.base import Backend
from engine.passes import OPTIONAL
from engine.text import compiled
from engine.text.generate import Generation
from engine.text.model import State, TextModel
from engine.text.request import End, Request

DECODE, PREFILL = 64, 512
SOFTWARE = 8, 32  # on a GPU in software, which is slow
FEATURES = {
    "subgroups": frozenset({"subgroup_basic", "subgroup_arithmetic", "subgroup_shuffle"}),
    "packed": frozenset({"fp16", "int_dot"}),
    "coopmat": frozenset({"coopmat"}),
}


def speed(state: State, phase: str, clock: str) -> float:
    """Tokens/s of one run."""
    state.common([])
    info = state.model.backend.info
    decode, prefill = SOFTWARE if info.kind == "gpu" and info.software else (DECODE, PREFILL)
    count = prefill if phase == "prefill" else 1
    settings = {"max_tokens": 1 if phase == "prefill" else decode}
    generation = Generation(state, Request("generate", "a " * count, settings=settings))
    end: End | None = None
    spent = 0.0
    while not generation.finished:
        began, before = time.process_time(), generation.delivered
        for event in generation.step():
            end = event if isinstance(event, End) else end
        if phase == "prefill" or before:  # the first token is a prompt's
            spent += time.process_time() - began
    assert end is not None
    return end.stats[f"{phase}_tokens"] / (spent if clock == "cpu" else end.stats[f"{phase}_s"])


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


def _without_tail(backend: Any, make: Callable[[], State]) -> State:
    """What `make` makes without the kernel that brings the last row of a prompt to the first."""
    misfit = backend.misfit
    backend.misfit = lambda op, variant: (
        "left out" if op == "last_to_first" else misfit(op, variant)
    )
    try:
        return make()
    finally:
        backend.misfit = misfit


def measure(args: argparse.Namespace) -> list[common.Row]:
    backend = common.backend(args)
    source = Path(args.model) if args.model else smollm2()
    repeats = args.repeats or (2 if args.quick else 5)
    parts = ["join", "tail"]  # all that a CPU has of them, and a GPU in software
    if backend.info.kind == "gpu":
        parts = parts if backend.info.software else [*OPTIONAL, "tail", "ahead"]
        parts += [name for name, features in FEATURES.items() if features & backend.info.features]
    rows = []
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        stack.callback(backend.close)

        def state(*without: str) -> State:
            return _state(stack, backend, source, Path(folder), without)

        whole = state()
        for part in parts:
            if part == "tail":
                less = _without_tail(backend, state)
            else:
                less = _poorer(backend, part, state) if part in FEATURES else state(part)
            for phase in ("prefill",) if part == "tail" else ("decode", "prefill"):
                for warm in (whole, less):
                    speed(warm, phase, args.clock)
                a, b = common.interleaved(
                    lambda p=phase: speed(whole, p, args.clock),  # type: ignore[misc]
                    lambda s=less, p=phase: speed(s, p, args.clock),  # type: ignore[misc]
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
    parser.add_argument("--clock", choices=CLOCKS, default="wall")


if __name__ == "__main__":
    sys.exit(common.main((__doc__ or "").splitlines()[0], measure, options))
