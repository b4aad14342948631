# SPDX-License-Identifier: Apache-2.0
"""From a model's file to the first token of a one-token prompt, on the CPU, against llama.cpp.

    python -m benchmarks.text_start [--quick] [--json] [--threads N] [--shape NAME]
        [--weights TYPE …] [--repeats N] [--clock cpu]

Rows are named SHAPE WEIGHTS start; models have random weights (tools/random_gguf.py). Each run is a
process of its own on either side, whose clock starts when its library is ready: with the imports
done and the backend opened here, after llama_backend_init there; a context of 2048 tokens; the
page cache warm by a run before. The peer is given its token's id, ours makes it of a text. Ours
loads the compiled model that pvrd keeps beside the GGUF from the first load on; `first start` rows
are that first load, which compiles it. The peer is llama_start.cpp with llama.cpp's library, with
and without its repacking of weights; the sooner counts. llama-bench tells no load time. With
`--clock cpu` rows are seconds of all threads on CPUs (benchmarks/peer_process.py says why); the
medians by the other clock are printed, too.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
from pathlib import Path

from benchmarks import common, peers
from benchmarks.llama_peer import environment
from benchmarks.peer_process import CLOCKS, Stopwatch, Took
from benchmarks.text_cpu import model_file
from tools import random_gguf

CONTEXT = 2048
_CHILD = "--child"


def child(file: str, compiled: str, threads: int) -> tuple[float, float, int]:
    """What is measured: seconds by both clocks, and the first token."""
    import tokenizers  # noqa: F401  a library as any other

    from engine.backends.cpu import CpuBackend
    from engine.text.model import TextModel

    backend = CpuBackend(threads)
    with Stopwatch() as watch:
        model = TextModel.load(file, compiled, backend)
        state = model.state(CONTEXT)
        state.run(model.tokenizer.encode("a")[-1:], head=True)
        token = int(state.best()[:4].view("<u4")[0])
    return watch.took.wall, watch.took.cpu, token


def _run(command: list[str], clock: str) -> Took:
    env = environment(clock)
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
    if done.returncode:
        raise SystemExit(f"{command[0]}: {done.stderr[-2000:]}")
    wall, cpu, _ = done.stdout.split()
    return Took(float(wall), float(cpu))


def measure(args: argparse.Namespace) -> list[common.Row]:
    program = peers.llama_program(Path(__file__).with_name("llama_start.cpp"))
    repeats = args.repeats or (3 if args.quick else 10)
    rows = []
    for weights in args.weights or (["q4_0"] if args.quick else ["q4_0", "q8_0"]):
        file = model_file(args.shape, weights)
        compiled = file.with_suffix(".start.pvrm")
        title = f"{args.shape} {weights}"
        compiled.unlink(missing_ok=True)
        module = [sys.executable, "-m", "benchmarks.text_start", _CHILD]
        mine = [*module, str(file), str(compiled), str(args.threads)]

        def ours(command: list[str] = mine) -> Took:
            return _run(command, args.clock)

        def peer(repack: bool, path: Path = file) -> Took:
            command = [str(program), str(path), str(args.threads), str(int(repack))]
            return _run(command, args.clock)

        peer(False)
        first = ours().by(args.clock)
        ways = {repack: peer(repack).by(args.clock) for repack in (False, True)}
        best = min(ways, key=lambda repack: ways[repack])
        name = f"llama.cpp, {'repacked' if best else 'not repacked'}"
        unit = "s" if args.clock == "wall" else "s of CPU"
        rows.append(common.row(f"{title} first start", unit, first, ways[best], name))
        ours()
        a: list[Took] = []
        b: list[Took] = []
        for _ in range(repeats):
            a.append(ours())
            b.append(peer(best))
        compiled.unlink()
        told = []
        for clock in sorted(CLOCKS, key=lambda c: c == args.clock):
            x, y = [took.by(clock) for took in a], [took.by(clock) for took in b]
            middle = statistics.median(x), statistics.median(y)
            ratio, bound = common.median_ratio(y, x)
            told.append(
                f"{clock} {middle[0]:.3f} / {middle[1]:.3f},"
                f" median ratio {ratio:.2f}, lower bound {bound:.2f}"
            )
        load = os.getloadavg()[0]
        print(f"{title} start: {'; '.join(told)}; load {load:.1f}", file=sys.stderr, flush=True)
        rows.append(common.row(f"{title} start", unit, *middle, name))
    return rows


def facts() -> dict[str, str]:
    """The peer's version and flags."""
    return {"peer": peers.llama_words()}


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shape", choices=random_gguf.SHAPES, default="llama3-1b")
    parser.add_argument("--weights", nargs="+", choices=random_gguf.WEIGHTS)
    parser.add_argument("--repeats", type=int, default=0)
    parser.add_argument("--clock", choices=CLOCKS, default="wall")


if __name__ == "__main__":
    if sys.argv[1:2] == [_CHILD]:
        print(*child(sys.argv[2], sys.argv[3], int(sys.argv[4])))
        sys.exit(0)
    sys.exit(common.main(__doc__.splitlines()[0], measure, options, facts))
