# SPDX-License-Identifier: Apache-2.0
"""Tokens/s of the language engine on a GPU by Vulkan against llama.cpp's Vulkan backend, same file.

    python -m benchmarks.text_gpu [--quick] [--json] [--shape NAME …] [--weights TYPE …]
        [--repeats N] [--pairs N] [--likely] [--software]

Models have random weights (tools/random_gguf.py). Rows are named SHAPE WEIGHTS PHASE: decode is 128
tokens after one, decode4096 as many behind 4096, prefill128 and prefill512 prompts of that length.
`share` rows are decode as a share of the rate at which the device copies: bytes of the matrices a
token reads, by its time, by the bytes that the copy reads and writes in a second. Ours is what a
session gets: the likeliest token is chosen and read back. The peer is llama-bench, with both of its
cooperative-matrix modes, without the second and without either, each with flash attention on and
off; the best counts, and all of them are printed. With --likely only the ways are tried that were
the best on large GPUs so far (LIKELY): less time, and perhaps not the peer's best. With --pairs,
rounds of ours and the peer's best are interleaved and the lower 95% bound of the median ratio is
printed. Without a peer (benchmarks/peers.py says how it is found) ours stands alone.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks import common, peers
from benchmarks.text_cpu import model_file
from engine import bench_probe
from engine.backends.vulkan import VulkanBackend
from engine.text.generate import Generation
from engine.text.model import State, TextModel
from engine.text.request import Request
from tools import random_gguf

DECODE = 128
DEPTH = 4096
PHASES = ("decode", f"decode{DEPTH}", "prefill128", "prefill512")
MODES = {
    "coopmat2": {},
    "coopmat": {"GGML_VK_DISABLE_COOPMAT2": "1"},
    "no coopmat": {"GGML_VK_DISABLE_COOPMAT2": "1", "GGML_VK_DISABLE_COOPMAT": "1"},
}
WAYS = dict.fromkeys(MODES, "0,1")  # flash attention by mode
LIKELY = {"coopmat2": "1", "coopmat": "1"}


def phase_shape(phase: str, decode: int = DECODE) -> tuple[int, int, int]:
    """Tokens of the prompt that is timed, tokens that are decoded, and tokens before either."""
    if phase.startswith("prefill"):
        return int(phase.removeprefix("prefill")), 0, 0
    return 0, decode, int(phase.removeprefix("decode") or 0)


# --- ours


def _prompt(state: State, tokens: int) -> str:
    """A text of so many tokens: each `a` is a byte of the made-up vocabulary."""
    empty = len(state.model.tokenizer.encode("a"))
    return "a" * max(1, tokens - empty + 1)


def _prefill(state: State, tokens: int) -> float:
    ids = [(7 * i) % state.model.vocab for i in range(tokens)]
    state.common([])
    begin = time.perf_counter()
    for at in range(0, tokens, state.chunk):
        state.run(ids[at : at + state.chunk], head=at + state.chunk >= tokens)
    state.best()
    return tokens / (time.perf_counter() - begin)


def _decode(state: State, depth: int) -> float:
    request = Request("generate", _prompt(state, depth), settings={"max_tokens": DECODE + 1})
    generation = Generation(state, request)
    events = []
    while not generation.finished:
        events = generation.step()
    stats = events[-1].stats  # type: ignore[union-attr]
    return stats["decode_tokens"] / stats["decode_s"]


def ours(state: State, phase: str) -> float:
    """Tokens/s of one run of a phase; what stood before it in the cache is not counted."""
    prompt, _, depth = phase_shape(phase)
    return _prefill(state, prompt) if prompt else _decode(state, depth)


# --- the peer


@dataclass(frozen=True)
class Way:
    """How llama-bench is run: a key of MODES, and flash attention off (0) or on (1)."""

    mode: str
    attention: str

    def __str__(self) -> str:
        return f"{self.mode}, -fa {self.attention}"


@dataclass(frozen=True)
class Peer:
    """llama-bench with one file; `decode` tokens are decoded, and `ways` are tried."""

    bench: Path
    file: Path
    software: bool
    decode: int = DECODE
    ways: Mapping[str, str] = field(default_factory=lambda: WAYS)

    def samples(
        self, phases: Sequence[str], way: Way, repeats: int
    ) -> dict[tuple[str, Way], list[float]]:
        """Tokens/s of each repetition by phase, all of the same depth, and way: `attention` may be
        `0,1`.

        Raises:
            subprocess.CalledProcessError: it cannot run so.
        """
        shapes = {phase_shape(phase, self.decode): phase for phase in phases}
        prompts, tokens, depths = zip(*shapes, strict=True)
        command = [str(self.bench), "-m", str(self.file), "-ngl", "99", "-fa", way.attention]
        for option, numbers in (("-p", prompts), ("-n", tokens), ("-d", depths)):
            command += [option, ",".join(str(n) for n in sorted(set(numbers)) if n) or "0"]
        env = {k: v for k, v in os.environ.items() if not k.startswith("GGML_VK_")}
        env |= MODES[way.mode]
        if self.software:
            env["GGML_VK_VISIBLE_DEVICES"] = "0"  # it leaves CPUs out unless they are named
        command += ["-r", str(repeats), "-o", "json"]
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
        return {
            (
                shapes[run["n_prompt"], run["n_gen"], run["n_depth"]],
                Way(way.mode, str(int(run["flash_attn"]))),
            ): run["samples_ts"]
            for run in json.loads(done.stdout)
        }

    def best(self, phases: Sequence[str], repeats: int) -> dict[str, tuple[float, Way]]:
        """For each phase the median of its best way, and which that is. The file is loaded once for
        each mode and depth.
        """
        found: dict[str, list[tuple[float, Way]]] = {phase: [] for phase in phases}
        for depth in sorted({phase_shape(phase)[2] for phase in phases}):
            alike = [phase for phase in phases if phase_shape(phase)[2] == depth]
            for mode, attention in self.ways.items():
                try:
                    runs = self.samples(alike, Way(mode, attention), repeats)
                except subprocess.CalledProcessError as error:
                    print(f"llama.cpp, {mode}: {error.stderr[-300:]}", file=sys.stderr)
                    continue
                for (phase, way), rates in runs.items():
                    rate = statistics.median(rates)
                    print(f"  llama.cpp {phase}, {way}: {rate:.1f}", file=sys.stderr)
                    found[phase].append((rate, way))
        if not all(found.values()):
            raise SystemExit("llama-bench does not run in any of its ways.")
        return {phase: max(ways, key=lambda found: found[0]) for phase, ways in found.items()}


def _interleaved(
    state: State, peer: Peer, title: str, phase: str, way: Way, pairs: int
) -> tuple[float, float]:
    """Medians of ours and the peer's, run in turn; the bound of their ratio is printed."""
    mine, theirs = common.interleaved(
        lambda: ours(state, phase), lambda: peer.samples([phase], way, 1)[phase, way][0], pairs
    )
    ratio, bound = common.median_ratio(mine, theirs)
    print(f"{title}: median ratio {ratio:.2f}, lower bound {bound:.2f}", file=sys.stderr)
    return statistics.median(mine), statistics.median(theirs)


def _model_rows(
    model: TextModel, peer: Peer | None, name: str, phases: Sequence[str], repeats: int, pairs: int
) -> Iterator[common.Row]:
    """A row for each phase."""
    best = peer.best(phases, repeats) if peer else {}
    for phase in phases:
        title = f"{name} {phase}"
        state = model.state(sum(phase_shape(phase)) + 64)
        ours(state, phase)  # warm, as llama-bench is
        mine = statistics.median(ours(state, phase) for _ in range(repeats))
        if peer is None:
            yield common.row(title, "tokens/s", mine, None, "no peer")
        else:
            theirs, way = best[phase]
            if pairs:
                mine, theirs = _interleaved(state, peer, title, phase, way, pairs)
            yield common.row(title, "tokens/s", mine, theirs, f"llama.cpp, {way}")
        state.close()


def share(row: common.Row, nbytes: int, copy: float) -> common.Row:
    """A decode row in percent of the copy rate (bytes/s)."""
    part = 100 * nbytes / copy
    peer = None if row.peer is None else row.peer * part
    return common.row(f"{row.name} share", "% of copy rate", row.ours * part, peer, row.peer_name)


def ways(likely: bool) -> Mapping[str, str]:
    """What of the peer is tried."""
    return LIKELY if likely else WAYS


def measure(args: argparse.Namespace) -> list[common.Row]:
    folder = peers.llama_vulkan()
    if folder is None:
        print("No llama.cpp for Vulkan: ours stands alone.", file=sys.stderr)
    backend = VulkanBackend(allow_software=args.software)
    software = backend.info.software
    copy = 0.0
    shapes = args.shape or (["smollm2-135m"] if args.quick else ["smollm2-135m", "llama3-8b"])
    kinds = args.weights or (["q4_0"] if args.quick else ["q4_0", "q8_0"])
    phases: Sequence[str] = ("decode", "prefill128") if args.quick else PHASES
    repeats = args.repeats or (2 if args.quick else 5)
    rows = []
    for shape in shapes:
        for weights in kinds:
            file = model_file(shape, weights)
            bench = folder / "llama-bench" if folder else None
            peer = Peer(bench, file, software, DECODE, ways(args.likely)) if bench else None
            model = TextModel.load(file, str(file.with_suffix(".pvrm")), backend)
            nbytes = random_gguf.token_bytes(random_gguf.SHAPES[shape], weights)
            name = f"{shape} {weights}"
            for row in _model_rows(model, peer, name, phases, repeats, args.pairs):
                rows.append(row)
                if row.name == f"{name} decode":
                    # Now that the device is warm: its memory's clock rises with work, too.
                    copy = max(copy, bench_probe.measure(backend, quick=True).copy)
                    print(f"{backend.info.name}: copies {copy / 1e9:.0f} GB/s", file=sys.stderr)
                    rows.append(share(row, nbytes, copy))
            model.close()
    backend.close()
    return rows


def facts() -> dict[str, str]:
    """The peer's version."""
    return {"peer": f"llama.cpp of llama-cpp-python {peers.LLAMA_VERSION}, Vulkan"}


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shape", nargs="+", choices=random_gguf.SHAPES)
    parser.add_argument("--weights", nargs="+", choices=random_gguf.WEIGHTS)
    parser.add_argument("--repeats", type=int, default=0)
    parser.add_argument("--pairs", type=int, default=0, help="interleaved rounds of both")
    parser.add_argument("--likely", action="store_true", help="fewer ways of llama.cpp")
    parser.add_argument("--software", action="store_true", help="a CPU as a Vulkan device, too")


if __name__ == "__main__":
    sys.exit(common.main(__doc__.splitlines()[0], measure, options, facts))
