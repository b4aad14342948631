# SPDX-License-Identifier: Apache-2.0
"""What it costs to compute a call of running work again (engine/backends/crosscheck.py), kernel by
kernel: the processor's time of a check, copying and the numpy reference together.

Shapes: a decode step and a chunk of a prefill of Llama 3 8B in q4 (hidden 4096, 14336 in between,
128256 tokens) at position POSITION, and a 4K frame by the fused and the layered networks; maps of
convolutional networks in a window as wide as a frame. `null`: memory that the host reads as it
lies, the kernels themselves do not run; `gpu`: the Vulkan device, which runs them.

The peer is another tree of the project, such as one before a change: --peer FOLDER runs the same
there, in turn with ours.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

import kernels
from benchmarks import common
from engine.backends import crosscheck
from engine.backends.base import NOTHING, Array, RunStats
from engine.backends.null import NullBackend, NullExecutable
from engine.pace import LIMIT
from engine.program import Binding, Buffer, Call, Program
from kernels import kv, maps, video, weights
from kernels.contract import FORMATS, PARAM_WORDS, ceil_div
from kernels.conv2d import op as conv2d
from kernels.nsr import op as nsr

HIDDEN, FFN, HEADS, KV_HEADS, DIM, VOCAB = 4096, 14336, 32, 8, 128, 128256
CONTEXT, POSITION, TOKENS = 4096, 1023, 256
WIDTH, HEIGHT = 1920, 1080
CHECKS = 24  # of each kernel, the first third of which only teaches what they cost
_FLOATS = np.random.default_rng(20261130).standard_normal(1 << 16).astype(np.float32)


@dataclass(frozen=True)
class Case:
    """A call; `data` is what a binding is filled with, again and again."""

    name: str
    op: str
    variant: str
    push: dict[str, Any]
    params: dict[int, int]
    sizes: dict[str, int]
    data: dict[str, Array] = field(default_factory=dict)


def text() -> Iterator[Case]:
    """Llama 3 8B."""
    fmt, qkv = FORMATS["q4"], HEADS + 2 * KV_HEADS
    one = {0: 1, 1: POSITION, 2: 0}
    many = {0: TOKENS, 1: POSITION + 1 - TOKENS, 2: TOKENS - 1}
    product = {"fmt": fmt, "accumulate": 0, "y0": 0}

    def packed(n: int, k: int) -> tuple[int, Array]:
        return weights.nbytes("q4", n, k), weights.pack("q4", _FLOATS[: 16 * 4096].reshape(16, -1))

    for n, k in ((qkv * DIM, HIDDEN), (2 * FFN, HIDDEN)):
        size, data = packed(n, k)
        sizes = {"w": size, "x": 4 * k, "norm": 4 * k, "y": 4 * n}
        push = {**product, "n": n, "k": k, "eps": 1e-5}
        if n == 2 * FFN:
            push |= {"n": FFN, "act": 0, "up": FFN}
        op = "matvec_norm_glu" if n == 2 * FFN else "matvec_norm"
        yield Case(f"{op} {n}x{k}", op, "q4", push, one, sizes, {"w": data, "x": _FLOATS})
    for n, k in ((HIDDEN, HIDDEN), (HIDDEN, FFN), (VOCAB // 4, HIDDEN)):
        size, data = packed(n, k)
        push, sizes = {**product, "n": n, "k": k}, {"w": size, "x": 4 * k, "y": 4 * n}
        given = {"w": data, "x": _FLOATS}
        yield Case(f"matvec {n}x{k}", "matvec", "q4", push, one, sizes, given)
    for n, k in ((2 * FFN, HIDDEN), (HIDDEN, FFN)):
        size, data = packed(n, k)
        sizes = {"w": size, "x": 4 * TOKENS * k, "y": 4 * TOKENS * n}
        given = {"w": data, "x": _FLOATS}
        push = {**product, "n": n, "k": k, "ldy": n}
        yield Case(f"matmul {n}x{k} T{TOKENS}", "matmul", "q4", push, many, sizes, given)
    cache = dict.fromkeys(("kc", "vc"), kv.nbytes("f16", KV_HEADS, CONTEXT, DIM))
    half = dict.fromkeys(cache, (_FLOATS / 4).astype(np.float16))
    shape = {"fmt": FORMATS["f16"], "heads": HEADS, "kv_heads": KV_HEADS, "dim": DIM}
    shape["ctx"] = CONTEXT
    rope = {"rope_dims": DIM, "neox": 0}
    soft = {"scale": DIM**-0.5, "window": 0, "softcap": 0.0}
    table = {"table": 4 * CONTEXT * DIM}
    given = {"qkv": _FLOATS, **half}
    for words, tokens in ((one, 1), (many, TOKENS)):
        rows, out = {"qkv": 4 * tokens * qkv * DIM}, {"out": 4 * tokens * HEADS * DIM}
        name = f"T{tokens} at {POSITION}"
        if tokens == 1:
            sizes = {**rows, **table, **cache}
            push = {**shape, **soft, **rope}
            yield Case(f"attention_step {name}", "attention_step", "f16", push, one, sizes, given)
        sizes = {**rows, **table, **cache}
        yield Case(f"rope_kv {name}", "rope_kv", "f16", {**shape, **rope}, words, sizes, given)
        op = "attention_decode" if tokens == 1 else "attention_prefill"
        sizes = {**rows, **cache, **out}
        yield Case(f"{op} {name}", op, "f16", {**shape, **soft}, words, sizes, given)
    size, data = packed(VOCAB, HIDDEN)
    push = {"fmt": fmt, "k": HIDDEN, "row0": 0, "rows": VOCAB, "scale": 1.0}
    sizes = {"ids": 4 * TOKENS, "table": size, "out": 4 * TOKENS * HIDDEN}
    yield Case(f"embed T{TOKENS}", "embed", "q4", push, many, sizes, {"table": data})
    blocks = ceil_div(VOCAB, 1024)
    for op, words_each in (("topk", 130), ("best", 4)):
        sizes = {"logits": 4 * VOCAB, "part": 4 * words_each * blocks, "out": 4 * 130}
        parts = np.arange(words_each, dtype=np.float32)
        given = {"logits": _FLOATS, "part": parts}
        for stage in (0, 1):
            push = {"v": VOCAB, "stage": stage}
            yield Case(f"{op} {VOCAB} stage {stage}", op, "base", push, one, sizes, given)
    sizes = {"x": 4 * TOKENS * HIDDEN, "w": 4 * HIDDEN, "y": 4 * TOKENS * HIDDEN}
    push = {"k": HIDDEN, "eps": 1e-5, "last": 0, "add": 0}
    given = {"x": _FLOATS, "w": _FLOATS}
    yield Case(f"rmsnorm T{TOKENS}", "rmsnorm", "base", push, many, sizes, given)


def frames() -> Iterator[Case]:
    """To 4K by nsr-fast and nsr-balanced, and what chroma and plain interpolation need."""
    for name, channels, layers in (("fast", 8, 6), ("balanced", 16, 7)):
        push = {"bits": 8, "stride": WIDTH // 4, "out_stride": WIDTH // 2, "tw": WIDTH}
        push |= {"th": HEIGHT, "channels": channels, "layers": layers, "scale": 2}
        sizes = {"src": WIDTH * HEIGHT, "w": 4 * nsr.words(channels, layers)}
        sizes["dst"] = 4 * WIDTH * HEIGHT
        words = {video.N_TILES: 1, video.WIDTH: WIDTH, video.HEIGHT: HEIGHT}
        given: dict[str, Array] = {"w": _FLOATS / 64}
        yield Case(f"nsr {name}", "nsr", f"c{channels}", push, words, sizes, given)
        tile, xs = 256, 256 + 16
        for cin, cout in ((channels, channels), (channels, 4)):
            rows = tile + 2 * layers - 2
            area = (rows + 2) * xs
            push = {"cin": cin, "cout": cout, "rows": rows, "xs": xs}
            push |= {"x_tile": area * cin, "y_tile": area * cin}
            whole = 4 * area * cin * 8 + 256
            sizes = {"x": whole, "w": 4 * (9 * cin * cout + 2 * cout), "y": whole}
            given = {"x": _FLOATS, "w": _FLOATS / 64}
            variant, words = "oc4" if cout == 4 else "oc8", {video.N_TILES: 8}
            title = f"conv3x3 {name} {cin}->{cout}"
            yield Case(title, "conv3x3", variant, push, words, sizes, given)
    tile, halo, xs, tiles = 256, 7, 256 + 16, 8
    across = {"bits": 8, "tw": tile, "th": tile, "halo": halo, "xs": xs}
    words = {video.N_TILES: tiles, video.WIDTH: WIDTH, video.HEIGHT: HEIGHT}
    window, band = (tile + 2 * halo) * xs, WIDTH * (tile + 2 * halo)
    push = {**across, "stride": WIDTH // 4, "y_tile": window, "scale": 1 / 255}
    sizes = {"src": band, "y": 4 * tiles * window + 256}
    yield Case("luma_in", "luma_in", "base", push, words, sizes)
    push = {**across, "scale": 2, "step": 1, "component": 0, "plane": video.WIDTH}
    push |= {"stride": WIDTH // 2, "x_row": xs, "f_tile": 4 * tile * xs, "x_tile": window}
    sizes = {"f": 16 * tiles * tile * xs + 256, "x": 4 * tiles * window + 256, "base": 1600}
    sizes["dst"] = 4 * WIDTH * tile
    given = {"f": _FLOATS / 64, "x": np.abs(_FLOATS) / 8, "base": _FLOATS[:400] / 25}
    yield Case("shuffle_out", "shuffle_out", "x2", push, words, sizes, given)
    cw, rows = WIDTH // 2, tile // 2
    chroma = {video.C_WIDTH: cw, video.C_HEIGHT: HEIGHT // 2, video.C_ROWS: rows}
    push = {"bits": 8, "step": 2, "component": 0, "stride": WIDTH // 4, "luma_stride": WIDTH // 4}
    push |= {"tw": rows, "th": rows, "halo": halo, "xs": rows + 16}
    push |= {"y_tile": 5 * (rows + 2 * halo) * (rows + 16), "scale": 1 / 255}
    sizes = {"src": band // 2, "luma": band, "y": 4 * tiles * int(push["y_tile"])}
    yield Case("chroma_in", "chroma_in", "base", push, {**words, **chroma}, sizes)
    push = {"bits": 8, "step": 2, "scale": 2, "stride": WIDTH // 4, "out_stride": WIDTH // 2}
    push |= {"rows": rows, "words": WIDTH // 2}
    sizes = {"src": WIDTH * (rows + 4), "filters": 400, "dst": 4 * WIDTH * rows}
    given = {"filters": _FLOATS[:100] / 25}
    yield Case("filter_out", "filter_out", "base", push, {**words, **chroma}, sizes, given)


def feature_maps() -> Iterator[Case]:
    """Of a convolutional network with 64 channels."""
    side, wide = 256, 960
    g, twice = maps.Geometry(wide, side, 1), maps.Geometry(2 * wide, 2 * side, 1)
    whole, large = g.nbytes(4, maps.WIDE), twice.nbytes(1, maps.THIN)
    w = _FLOATS[: 64 * 64 * 9].reshape(64, 64, 3, 3) / 64
    packed = conv2d.pack("f16", w, _FLOATS[:64], _FLOATS[:64])
    push: dict[str, Any] = {"fmt": FORMATS["f16"], "cin": 64, "cout": 64, "k": 3, "residual": 0}
    push |= {"act": maps.SLOPE, "xl": maps.WIDE, "yl": maps.WIDE, **g.push()}
    sizes = {"x": whole, "w": packed.nbytes, "r": 256, "y": whole}
    given: dict[str, Array] = {"x": _FLOATS, "w": packed}
    yield Case("conv2d 64->64", "conv2d", "f16", push, {}, sizes, given)
    push = {"blocks": 4, "lanes": maps.WIDE, "mode": 1, "act": maps.SLOPE, **g.push()}
    sizes = {"a": whole, "b": whole, "w": 16 * 64, "y": whole}
    given = {"a": _FLOATS, "b": _FLOATS, "w": _FLOATS}
    yield Case("pointwise 64", "pointwise", "base", push, {}, sizes, given)
    push = {"blocks": 1, "lanes": maps.THIN, "num": 2, "den": 1, "taps": 2, "residual": 0}
    push |= {**g.push("x_"), **twice.push()}
    taps = np.array([0.25, 0.75, 0.75, 0.25, -1, 0], np.float32)
    sizes = {"x": g.nbytes(1, maps.THIN), "filters": 24, "r": 256, "y": large}
    yield Case("resize", "resize", "base", push, {}, sizes, {"x": _FLOATS, "filters": taps})
    push = {"blocks": 1, "lanes": maps.THIN, "xl": maps.WIDE, "channels": 3, "s": 2, "down": 0}
    push |= {"cs": 4, "as": 2, "bs": 1, **g.push("x_"), **twice.push()}
    sizes = {"x": g.nbytes(1, maps.WIDE), "y": large}
    yield Case("pixel_shuffle", "pixel_shuffle", "base", push, {}, sizes, {"x": _FLOATS})
    words = {maps.CORE_X1: wide, maps.CORE_Y1: side}
    push = {"bits": 8, "stride": WIDTH // 4, "step": 1, "phase": 0, "half": 0, "centred": 0}
    push |= {"plane_w": WIDTH, "plane_h": HEIGHT, "add": 0, "lanes": maps.THIN, **g.push()}
    push |= dict.fromkeys(("c0", "c1", "c2"), 1 / 255) | dict.fromkeys(("o0", "o1", "o2"), 0.0)
    sizes = {"src": WIDTH * side, "y": g.nbytes(1, maps.THIN)}
    yield Case("maps_in", "maps_in", "base", push, words, sizes)
    push = {"bits": 8, "stride": WIDTH // 2, "step": 1, "half": 0, "centred": 0, "s": 2}
    push |= {"frame_w": 2 * WIDTH, "frame_h": 2 * HEIGHT, "lanes": maps.THIN, **twice.push()}
    push |= dict.fromkeys(("c0", "c1", "c2", "d0", "d1", "d2"), 85.0) | {"o": 0.0}
    sizes = {"x": large, "dst": 4 * WIDTH * side}
    yield Case("maps_out", "maps_out", "base", push, words, sizes, {"x": _FLOATS})
    filters = np.concatenate([_FLOATS[:16] / 4, [-1, -1, -2, -1]]).astype(np.float32)
    push = {"bits": 8, "stride": WIDTH // 4, "out_stride": WIDTH // 2, "step": 1, "half": 0}
    push |= {"s": 2, "plane_w": WIDTH, "plane_h": HEIGHT, "rows": 2 * side}
    sizes = {"src": WIDTH * (side + 4), "filters": 80, "dst": 4 * WIDTH * side}
    given = {"filters": filters}
    yield Case("plane_scale", "plane_scale", "base", push, words, sizes, given)


def cases() -> Iterator[Case]:
    """All."""
    yield from text()
    yield from frames()
    yield from feature_maps()


class _Apart(NullExecutable):
    """Memory alone."""

    def run_apart(self, sequences: Any, apart: Any, before: Any, after: Any) -> RunStats:
        for i in apart:
            before(i)
            after(i)
        return RunStats(0.0)


class _Idle(NullBackend):
    """Computes nothing, and nobody minds what is wrong."""

    def executable(self, program: Any, weights: Any, lent: Any = NOTHING) -> _Apart:
        return _Apart(self._counters, program, weights, False, lambda: False, lent)

    def quarantine(self, op: str, variant: str, wrong: str) -> None:
        """Nothing."""


class _Clock:
    """The processor's time within checks."""

    def __init__(self) -> None:
        self.seconds = 0.0
        for name in ("before", "after", "wrong"):
            self._watch(name)

    def _watch(self, name: str) -> None:
        inner = getattr(crosscheck._Check, name)

        def watched(check: Any) -> Any:
            began = time.thread_time()
            try:
                return inner(check)
            finally:
                self.seconds += time.thread_time() - began

        setattr(crosscheck._Check, name, watched)


def measure(inner: Any, case: Case, clock: _Clock, checks: int) -> list[float]:
    """Milliseconds of checks of a call, sampled as running work is."""
    contract = kernels.op(case.op)
    kinds = dict.fromkeys(case.sizes, "state")
    weight = {"w", "table"} & set(case.sizes)
    kinds |= dict.fromkeys(weight, "weight")
    filled = {name: _filled(case.data.get(name), n) for name, n in case.sizes.items()}
    buffers = {n: Buffer(n, filled[n].nbytes, kinds[n]) for n in case.sizes}  # type: ignore[arg-type]
    buffers["params"] = Buffer("params", 4 * PARAM_WORDS, "params")
    variant = contract.variant(case.variant)
    groups = contract.groups({**case.push, "tokens": max(1, case.params.get(0, 1))}, variant)
    bindings = tuple(Binding(b.name) for b in contract.bindings)
    call = Call(case.op, case.variant, bindings, contract.pack(**case.push), groups)
    backend = crosscheck.CheckedBackend(inner, 1.0, np.random.default_rng(1))
    placed: Any = backend.weights({name: filled[name] for name in weight})
    exe: Any = backend.executable(Program(buffers, {"one": (call,)}), placed)
    words = np.zeros(PARAM_WORDS, np.uint32)
    for at, value in case.params.items():
        words[at] = value
    exe.write("params", words)
    for name in set(case.sizes) - weight:
        exe.write(name, filled[name])
    found = []
    with contextlib.ExitStack() as stack:
        stack.callback(placed.close)
        stack.callback(exe.close)
        for _ in range(checks):
            clock.seconds = 0.0
            with contextlib.suppress(crosscheck.Suspect):
                exe.run("one")
            found.append(1000 * clock.seconds)
    return found[checks // 3 :]


def _filled(data: Array | None, nbytes: int) -> Array:
    if data is None:
        return np.zeros(nbytes, np.uint8)
    return np.resize(data.reshape(-1).view(np.uint8), nbytes)


def ours(device: str, slice_ms: float, only: str, checks: int) -> dict[str, list[float]]:
    """Milliseconds of each case's checks in this tree."""
    inner: Any = _Idle()
    if device == "gpu":
        from engine.backends.vulkan import VulkanBackend

        inner = VulkanBackend(allow_software=True)
        inner.quarantine = lambda *_: None
    LIMIT.slice_s = slice_ms / 1000
    clock = _Clock()
    found = {c.name: measure(inner, c, clock, checks) for c in cases() if only in c.name}
    inner.close()
    return found


def _elsewhere(folder: str, argv: list[str]) -> dict[str, list[float]]:
    """The same in another tree, with this file."""
    env = {**os.environ, "PYTHONPATH": folder}
    code = f"import runpy, sys; sys.argv[1:] = {argv!r}; "
    command = [sys.executable, "-c", f"{code}runpy.run_path({__file__!r}, None, '__main__')"]
    done = subprocess.run(command, env=env, cwd=folder, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"the peer failed: {done.stderr.strip().splitlines()[-1:]}")
    found: dict[str, list[float]] = json.loads(done.stdout)
    return found


def main(argv: list[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--device", choices=("null", "gpu"), default="null")
    parser.add_argument("--slice-ms", type=float, default=2.0, help="what a slice may take")
    parser.add_argument("--only", default="", help="cases whose name has this")
    parser.add_argument("--checks", type=int, default=CHECKS, help="of each kernel")
    parser.add_argument("--peer", metavar="FOLDER", help="another tree of the project")
    parser.add_argument("--list", action="store_true", help="print the times as JSON alone")
    args = parser.parse_args(argv)
    own = ["--device", args.device, "--slice-ms", str(args.slice_ms), "--only", args.only, "--list"]
    own += ["--checks", str(args.checks)]
    found = ours(args.device, args.slice_ms, args.only, args.checks)
    if args.list:
        print(json.dumps(found))
        return
    peer = _elsewhere(str(Path(args.peer).resolve()), own) if args.peer else {}
    print(f"{common.cpu_name()}; a slice may take {args.slice_ms:g} ms; ms of processor time")
    print(f"{'kernel':34}{'median':>9}{'most':>9}{'peer':>9}{'most':>9}")
    for name, times in found.items():
        row = [statistics.median(times), max(times)]
        if name in peer:
            row += [statistics.median(peer[name]), max(peer[name])]
        print(f"{name:34}" + "".join(f"{ms:9.2f}" for ms in row))


if __name__ == "__main__":
    main()
