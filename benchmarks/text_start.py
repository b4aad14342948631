# SPDX-License-Identifier: Apache-2.0
"""From a model's file to the first token of a one-token prompt, on the CPU, against llama.cpp.

    python -m benchmarks.text_start [--quick] [--json] [--threads N] [--shape NAME]
        [--weights TYPE …] [--repeats N]

Rows are named SHAPE WEIGHTS start; models have random weights (tools/random_gguf.py). Each run is a
process of its own on either side, whose clock starts when its library is ready: with the imports
done and the backend opened here, after llama_backend_init there; a context of 2048 tokens; the
page cache warm by a run before. Ours loads the compiled model that pvrd keeps beside the GGUF from
the first load on; `first start` rows are that first load, which compiles it. The peer is
llama_start.cpp with llama.cpp's library, with and without its repacking of weights; the sooner
counts. llama-bench tells no load time.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from pathlib import Path

from benchmarks import common, peers
from benchmarks.text_cpu import model_file
from tools import random_gguf

CONTEXT = 2048
_CHILD = "--child"


def child(file: str, compiled: str, threads: int) -> tuple[float, int]:
    """What is measured: seconds, and the first token."""
    from engine.backends.cpu import CpuBackend
    from engine.text.model import TextModel

    backend = CpuBackend(threads)
    begin = time.perf_counter()
    model = TextModel.load(file, compiled, backend)
    state = model.state(CONTEXT)
    state.run([1], head=True)
    token = int(state.best()[:4].view("<u4")[0])
    return time.perf_counter() - begin, token


def _seconds(command: list[str]) -> float:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{command[0]}: {done.stderr[-2000:]}")
    return float(done.stdout.split()[0])


def ours(file: Path, compiled: Path, threads: int) -> float:
    """Seconds of one start."""
    module = [sys.executable, "-m", "benchmarks.text_start"]
    return _seconds([*module, _CHILD, str(file), str(compiled), str(threads)])


def peer(program: Path, file: Path, threads: int, repack: bool) -> float:
    """Seconds of one start of the peer."""
    return _seconds([str(program), str(file), str(threads), str(int(repack))])


def measure(args: argparse.Namespace) -> list[common.Row]:
    program = peers.llama_program(Path(__file__).with_name("llama_start.cpp"))
    repeats = args.repeats or (3 if args.quick else 10)
    rows = []
    for weights in args.weights or (["q4_0"] if args.quick else ["q4_0", "q8_0"]):
        file = model_file(args.shape, weights)
        compiled = file.with_suffix(".start.pvrm")
        title = f"{args.shape} {weights}"
        compiled.unlink(missing_ok=True)
        peer(program, file, args.threads, False)
        first = ours(file, compiled, args.threads)
        ways = {repack: peer(program, file, args.threads, repack) for repack in (False, True)}
        best = min(ways, key=lambda repack: ways[repack])
        name = f"llama.cpp, {'repacked' if best else 'not repacked'}"
        rows.append(common.row(f"{title} first start", "s", first, ways[best], name))
        ours(file, compiled, args.threads)
        mine, theirs = common.interleaved(
            lambda f=file, c=compiled: ours(f, c, args.threads),  # type: ignore[misc]
            lambda f=file, b=best: peer(program, f, args.threads, b),  # type: ignore[misc]
            repeats,
        )
        compiled.unlink()
        middle = statistics.median(mine), statistics.median(theirs)
        rows.append(common.row(f"{title} start", "s", *middle, name))
        ratio, bound = common.median_ratio(theirs, mine)
        print(f"{title} start: median ratio {ratio:.2f}, lower bound {bound:.2f}", file=sys.stderr)
    return rows


def facts() -> dict[str, str]:
    """The peer's version and flags."""
    return {"peer": peers.llama_words()}


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shape", choices=random_gguf.SHAPES, default="llama3-1b")
    parser.add_argument("--weights", nargs="+", choices=random_gguf.WEIGHTS)
    parser.add_argument("--repeats", type=int, default=0)


if __name__ == "__main__":
    if sys.argv[1:2] == [_CHILD]:
        print(*child(sys.argv[2], sys.argv[3], int(sys.argv[4])))
        sys.exit(0)
    sys.exit(common.main(__doc__.splitlines()[0], measure, options, facts))
