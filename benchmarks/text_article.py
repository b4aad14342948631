# SPDX-License-Identifier: Apache-2.0
"""Papers' bench of language models on phones: a prompt of 128 tokens, 32 new ones, batch 1.

    python -m benchmarks.text_article [--quick] [--json] [--threads N] [--shape NAME]
        [--weights TYPE …] [--repeats N] [--software] [--clock cpu] [--likely]
        [--cpu-peers [NAME …]]

The model is of the phi3-mini shape with random weights (tools/random_gguf.py) in 4 and 8 bits; with
--quick of the smollm2-135m shape in 4. Rows are named SHAPE WEIGHTS PHASE DEVICE: ms/token, J/token
over the idle machine (benchmarks/energy.py; no such rows where nothing can be read, which the
record says), `bandwidth`: bytes of the matrices that a decoded token reads, by its time, in percent
of the bytes that the device reads and writes in a second when it copies. Ours is what a session
gets, with the choice of the likeliest token, without guesses (text_guess.py). The peer is llama.cpp
on the same device, at its best flags (benchmarks/llama_peer.py, text_gpu.py), in turn with ours;
its new tokens follow a prompt as long as ours. Its energy is what two more repetitions take. `gpu
against cpu` holds our GPU against our CPU. With `--clock cpu` CPU rows are milliseconds of all
threads on CPUs: what other programs on the machine change less; what the copy rate allows is then
no share of theirs. How many times a peer's time is ours, run by run, is printed: the median, and
its lower bound of 95 %.

Rows `SHAPE WEIGHTS PHASE cpu onnxruntime` hold ours, run once more, against onnxruntime with the
same weights at its best settings (benchmarks/onnx_peer.py), in turn, when llama.cpp has ended: so
that two models are in memory at a time, not three. Its new tokens follow the prompt as well. Where
it cannot run them the record says why. `--cpu-peers` names which of both are there (none: our CPU
alone, for machines that have a GPU to measure), `--likely` is text_gpu's.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from benchmarks import common, energy, onnx_model, onnx_peer, peers, text_cpu, text_gpu
from benchmarks.llama_peer import LlamaPeer
from benchmarks.onnx_peer import OnnxPeer
from benchmarks.peer_process import CLOCKS, Stopwatch, Took
from engine import bench_probe
from engine.backends.base import Backend
from engine.backends.cpu import CpuBackend
from engine.backends.devices import NoDevice
from engine.text.generate import Generation
from engine.text.model import State, TextModel
from engine.text.request import Request
from tools import random_gguf

PROMPT, NEW = 128, 32
CPU_PEERS = ("llama.cpp", "onnxruntime")
PREFILL, DECODE = f"prefill{PROMPT}", "decode"
PeerTimes = Callable[[str, int], list[Took]]  # phase, repeats -> seconds a token of each

_meter: energy.Meter | None = None
_onnx: dict[str, str] = {}  # how onnxruntime ran a model, or why it did not


@dataclass(frozen=True)
class Peer:
    """What ours is held against; rows of one that is `apart` end in that, too."""

    name: str
    times: PeerTimes
    apart: str = ""


@dataclass(frozen=True)
class Cost:
    """What a token takes: time, and joules where they are known."""

    took: Took  # seconds
    joules: float | None


def meter() -> energy.Meter:
    """The machine's meter, whose baseline is measured once, before any work."""
    global _meter
    _meter = _meter or energy.Meter()
    return _meter


def once(state: State) -> dict[str, Cost]:
    """One run: the cost of a token of the prompt, and of a new one."""
    ids = len(state.model.tokenizer.encode("a"))
    request = Request("generate", "a" * (PROMPT - ids + 1), settings={"max_tokens": NEW + 1})
    state.common([])
    generation = Generation(state, request)

    def until(delivered: int) -> None:
        while generation.delivered < delivered and not generation.finished:
            generation.step()

    costs = {}
    for phase, upto, tokens in ((PREFILL, 1, PROMPT), (DECODE, NEW + 1, NEW)):
        with Stopwatch() as watch:
            joules = meter().joules(lambda n=upto: until(n))  # type: ignore[misc]
        each = Took(watch.took.wall / tokens, watch.took.cpu / tokens)
        costs[phase] = Cost(each, None if joules is None else joules / tokens)
    return costs


def _peer_joules(run: Callable[[int], object], tokens: int) -> float | None:
    """Joules a token: what three repetitions take more than one."""
    one, three = meter().joules(lambda: run(1)), meter().joules(lambda: run(3))
    return None if one is None or three is None else (three - one) / (2 * tokens)


def _device_rows(
    backend: Backend,
    title: str,
    device: str,
    file: Path,
    peer: Peer | None,
    repeats: int,
    clock: str,
) -> Iterator[common.Row]:
    """The rows of one model on one device."""
    model = TextModel.load(file, str(file.with_suffix(".pvrm")), backend)
    model.guesses = False  # noise repeats itself more than texts do
    state = model.state(PROMPT + NEW + 32)
    once(state)  # warm
    runs: list[dict[str, Cost]] = []
    others: dict[str, list[Took]] = {PREFILL: [], DECODE: []}
    for _ in range(repeats):
        runs.append(once(state))
        for phase in others if peer else ():
            others[phase] += peer.times(phase, 1)
    state.close()
    model.close()
    shape, weights = title.split()
    peer_name, apart = (peer.name, peer.apart) if peer else ("no peer", "")
    for phase, tokens in ((PREFILL, PROMPT), (DECODE, NEW)):
        own = [run[phase].took.by(clock) for run in runs]
        times = [took.by(clock) for took in others[phase]]
        mine = 1e3 * statistics.median(own)
        theirs = 1e3 * statistics.median(times) if times else None
        name = f"{title} {phase} {device}{apart}"
        if times:
            middle, bound = common.median_ratio(times, own)
            told = f"{name}: median ratio {middle:.2f}, lower bound {bound:.2f}"
            print(f"{told}; load {os.getloadavg()[0]:.1f}", file=sys.stderr, flush=True)
        unit = "ms / token" if clock == "wall" else "ms / token of CPU"
        yield common.row(name, unit, mine, theirs, peer_name)
        spent = [run[phase].joules for run in runs]
        if known := [j for j in spent if j is not None]:
            other = None
            if peer:
                other = _peer_joules(lambda n, p=phase: peer.times(p, n), tokens)  # type: ignore[misc]
            ratio = other / statistics.median(known) if other else None
            yield common.Row(
                f"{name} energy", "J / token", statistics.median(known), other, peer_name, ratio
            )
        if phase == DECODE and clock == "wall" and not apart:
            nbytes = random_gguf.token_bytes(random_gguf.SHAPES[shape], weights)
            part = 1e5 * nbytes / bench_probe.measure(backend, quick=True).copy
            share = None if theirs is None else part / theirs
            yield common.row(f"{name} bandwidth", "% of copy rate", part / mine, share, peer_name)


def _cpu_peer(peer: LlamaPeer | OnnxPeer) -> PeerTimes:
    names = {PREFILL: PREFILL, DECODE: f"{DECODE}{NEW}"}
    peer.choose(list(names.values()))

    def times(phase: str, repeats: int) -> list[Took]:
        tokens = PROMPT if phase == PREFILL else NEW
        runs = [peer.run(names[phase]) for _ in range(repeats)]
        return [Took(run.wall / tokens, run.cpu / tokens) for run in runs]

    return times


def _onnx_rows(cpu: Backend, title: str, file: Path, args: argparse.Namespace) -> list[common.Row]:
    """The rows beside onnxruntime; none where it cannot run the model, and why is noted."""
    shape, weights = title.split()
    try:
        version = onnx_peer.version()
        models = onnx_model.write(file, random_gguf.SHAPES[shape], weights, peers.cache())
        with OnnxPeer(models, args.threads, args.clock) as onnx:
            peer = Peer(f"onnxruntime {version}", _cpu_peer(onnx), " onnxruntime")
            rows = list(_device_rows(cpu, title, "cpu", file, peer, args.repeats, args.clock))
            ways = "; ".join(f"{phase}: {way}" for phase, way in onnx.best.items())
            _onnx[title] = f"{version}, {ways}"
            return rows
    except onnx_model.Missing as error:
        _onnx[title] = f"not measured: {error}"
        return []


def _cpu_rows(cpu: Backend, title: str, file: Path, args: argparse.Namespace) -> list[common.Row]:
    """The rows of our CPU, beside llama.cpp if that is wanted."""
    with ExitStack() as stack:
        side = None
        if "llama.cpp" in args.cpu_peers:
            llama = stack.enter_context(LlamaPeer(file, args.threads, args.clock, PROMPT))
            side = Peer("llama.cpp", _cpu_peer(llama))
        return list(_device_rows(cpu, title, "cpu", file, side, args.repeats, args.clock))


def _gpu_peer(file: Path, software: bool, repeats: int, likely: bool) -> Peer | None:
    folder = peers.llama_vulkan()
    if folder is None:
        return None
    ways = text_gpu.ways(likely)
    peer = text_gpu.Peer(folder / "llama-bench", file, software, NEW, ways)
    names = {PREFILL: PREFILL, DECODE: f"{DECODE}{PROMPT}"}  # as many tokens lie before those
    best = peer.best(list(names.values()), repeats)

    def times(phase: str, repeats: int) -> list[Took]:
        name = names[phase]
        way = best[name][1]
        return [Took(1 / rate, 0.0) for rate in peer.samples([name], way, repeats)[name, way]]

    return Peer("llama.cpp", times)


def _gpu(software: bool) -> Backend | None:
    from engine.backends.vulkan import VulkanBackend

    try:
        return VulkanBackend(allow_software=software)
    except NoDevice as error:
        print(f"No GPU: {error}", file=sys.stderr)
        return None


def measure(args: argparse.Namespace) -> list[common.Row]:
    meter()
    shape = args.shape or ("smollm2-135m" if args.quick else "phi3-mini")
    kinds = args.weights or (["q4_0"] if args.quick else ["q4_0", "q8_0"])
    repeats = args.repeats = args.repeats or (1 if args.quick else 5)
    cpu, gpu = CpuBackend(args.threads), _gpu(args.software)
    rows: list[common.Row] = []
    for weights in kinds:
        title, file = f"{shape} {weights}", text_cpu.model_file(shape, weights)
        mine = _cpu_rows(cpu, title, file, args)
        rows += mine
        if "onnxruntime" in args.cpu_peers:
            rows += _onnx_rows(cpu, title, file, args)
        if gpu is None:
            continue
        peer = _gpu_peer(file, gpu.info.software, repeats, args.likely)
        fast = list(_device_rows(gpu, title, "gpu", file, peer, repeats, "wall"))
        rows += fast
        slow = {row.name.removesuffix(" cpu"): row.ours for row in mine if row.unit == "ms / token"}
        for row in fast:
            if (base := slow.get(row.name.removesuffix(" gpu"))) is not None:
                against = f"{row.name} against cpu"
                rows.append(common.row(against, row.unit, row.ours, base, "our CPU"))
    for backend in (cpu, gpu):
        if backend is not None:
            backend.close()
    return rows


def facts() -> dict[str, str]:
    """How energy is known, and the peers' versions and settings."""
    onnx = {f"onnxruntime, {title}": words for title, words in _onnx.items()}
    settings = {"onnxruntime": onnx_peer.SETTINGS}
    return {"energy": str(meter()), "peer": peers.llama_words()} | settings | onnx


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shape", choices=random_gguf.SHAPES)
    parser.add_argument("--weights", nargs="+", choices=random_gguf.WEIGHTS)
    parser.add_argument("--repeats", type=int, default=0)
    parser.add_argument("--clock", choices=CLOCKS, default="wall")
    parser.add_argument("--likely", action="store_true", help="fewer ways of llama.cpp on the GPU")
    parser.add_argument("--cpu-peers", nargs="*", choices=CPU_PEERS, default=CPU_PEERS)
    parser.add_argument("--software", action="store_true", help="a CPU as a Vulkan device, too")


if __name__ == "__main__":
    sys.exit(common.main(__doc__.splitlines()[0], measure, options, facts))
