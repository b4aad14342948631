# SPDX-License-Identifier: Apache-2.0
"""Which variant of an operation is the fastest on a device, found by running each.

A variant that is good on one device is bad on another, and no query says which. So all are timed at
the first use of an operation, for each class of sizes once: calls that wait for one another, as
those of a token do, each with other weights, since those of a token are in no cache. The times are
kept beside the verdicts of the self-tests.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import kernels
from engine.backends.base import NOTHING, Backend, DeviceInfo, Executable, Lent
from engine.errors import InvalidArgument, OutOfMemory
from engine.program import Binding, Buffer, Call, Program
from kernels import kv, weights
from kernels.best.op import part_nbytes as best_part_nbytes
from kernels.contract import N_TOKENS, PARAM_WORDS, ceil_div
from kernels.conv2d import op as conv2d
from kernels.maps import Geometry
from kernels.nsr import op as nsr
from kernels.text import FORMAT_NAMES
from kernels.topk.op import RECORD_WORDS, part_nbytes

TURNS = 5  # of all variants, of which the least time counts
GAIN = 0.95  # of the baseline's time, at most: less is noise
_FEW, _MOST_CALLS = 4, 256  # calls of a chain
_CHAIN_S = 1e-3  # that a chain takes: a submission's own time is a few microseconds
_STEADY_S, _WARM_S = 0.25, 1.0  # without a gain, until a device counts as warm, and at most
_SLOW = 2.0  # times the best: what is worse need not be timed again
_MOST_BYTES = 64 << 20  # of a matrix that is made for this
_SPREAD = 128 << 20  # bytes of matrices that calls take in turn: more than caches hold
_MATRICES = ("matvec", "matvec_norm", "matvec_glu", "matvec_norm_glu", "matmul")
# Of a cache.
_POSITIONS = {"attention_decode": 4096, "attention_step": 4096, "attention_prefill": 1024}
_ROWS = 64  # of a prompt
_PICTURE = (480, 256)

Times = dict[str, float]  # seconds a call by variant


@dataclass(frozen=True)
class Trial:
    """A call that stands for a class of sizes: `name` says which, `sizes` are bytes by binding."""

    name: str
    op: str
    push: Mapping[str, float | int]
    sizes: Mapping[str, int]
    params: tuple[int, ...]


# Seconds of a call of each of these variants, but for those that the device cannot have after all.
Racer = Callable[[Sequence[str], Trial], Times]


def trial(op: str, push: Mapping[str, Any], most_bytes: int) -> Trial | None:
    """What stands for a call with these push constants, in bindings of at most `most_bytes`: of one
    token, with a key `tokens` of so many where that matters. None for operations with nothing to
    choose.
    """
    if op in _MATRICES:
        fmt, n, k = FORMAT_NAMES[int(push["fmt"])], _fine(push["n"]), _fine(push["k"])
        k, most = max(k, weights.BLOCK), min(_MOST_BYTES, most_bytes)
        each = 2 if op == "matvec_norm_glu" else 1  # matrices of n rows
        while n > 1 and weights.nbytes(fmt, n * each, k) > most:
            n //= 2
        given = {"fmt": push["fmt"], "n": n, "k": k, "accumulate": 0, "y0": 0}
        name, tokens = f"{op} {fmt} {n}x{k}", 1
        if op == "matmul":
            tokens = _class(max(1, min(push.get("tokens", 1), most // (4 * max(n, k)))))
            name, given = f"{name}x{tokens}", {**given, "ldy": n}
        sizes = {"w": weights.nbytes(fmt, n, k), "x": 4 * k * tokens, "y": 4 * n * tokens}
        if op in ("matvec_norm", "matvec_norm_glu"):
            given, sizes["norm"] = {**given, "eps": 1e-5}, 4 * k
        if op == "matvec_norm_glu":
            up = -(-n // weights.ROWS) * weights.ROWS
            given = {**given, "act": 0, "up": up}
            sizes["w"] = weights.nbytes(fmt, up + n, k)
        elif op == "matvec_glu":
            given, sizes["gu"] = {**given, "act": 0}, 2 * sizes.pop("x")
        return Trial(name, op, given, sizes, (tokens, 0, tokens - 1))
    if op == "rmsnorm":
        k = _class(push["k"])
        given = {"k": k, "eps": 1e-5, "last": 1, "add": 0}
        return Trial(f"{op} {k}", op, given, {"x": 4 * k, "w": 4 * k, "y": 4 * k}, (1, 0, 0))
    if op in ("topk", "best"):
        v, stage = _class(push["v"]), push["stage"]
        part = (part_nbytes if op == "topk" else best_part_nbytes)(v)
        sizes = {"logits": 4 * v, "part": part, "out": 4 * RECORD_WORDS}
        return Trial(f"{op} {v} stage {stage}", op, {"v": v, "stage": stage}, sizes, (1, 0, 0))
    if op in ("attention_decode", "attention_step", "attention_prefill"):
        return _attention(op, push, most_bytes)
    if op == "nsr":
        return _frame(op, push, most_bytes)
    if op == "conv2d":
        return _maps(op, push, most_bytes)
    return None


def _frame(op: str, push: Mapping[str, Any], most_bytes: int) -> Trial:
    """A picture that takes a device some milliseconds, at x2."""
    channels, layers = int(push["channels"]), int(push["layers"])
    width, height = _PICTURE
    while 4 * width * height > most_bytes:
        height //= 2
    given = {**push, "bits": 8, "stride": width // 4, "out_stride": width // 2, "tw": width}
    given |= {"th": height, "scale": 2}
    sizes = {"src": width * height, "w": 4 * nsr.words(channels, layers)}
    sizes["dst"] = 4 * width * height
    return Trial(f"{op} {channels}x{layers}", op, given, sizes, (1, 0, 0, 0, width, height))


def _maps(op: str, push: Mapping[str, Any], most_bytes: int) -> Trial:
    """A convolution of these channels on a picture."""
    fmt, cin, cout, k = FORMAT_NAMES[int(push["fmt"])], push["cin"], push["cout"], push["k"]
    xl, yl = int(push["xl"]), int(push["yl"])
    width, height = _PICTURE
    while True:
        g = Geometry(width, height, max(1, k // 2))
        x, y = g.nbytes(-(-cin // xl), xl), g.nbytes(-(-cout // yl), yl)
        if max(x, y) <= most_bytes or height <= 8:
            break
        height //= 2
    given = {**push, "residual": 0, **g.push()}
    sizes = {"x": x, "w": conv2d.nbytes(fmt, cin, cout, k), "r": y, "y": y}
    return Trial(f"{op} {fmt} {k}x{k} {cin}->{cout}", op, given, sizes, (1, 0, 0))


def _attention(op: str, push: Mapping[str, Any], most_bytes: int) -> Trial:
    """In the middle of a session: half of the cache is full."""
    fmt = FORMAT_NAMES[int(push["fmt"])]
    heads, kv_heads, dim = (int(push[name]) for name in ("heads", "kv_heads", "dim"))
    row = 4 * (heads + 2 * kv_heads) * dim
    tokens = 1
    if op == "attention_prefill":
        tokens = _class(max(1, min(push.get("tokens", 1), _ROWS, most_bytes // row)))
    ctx = min(_class(push["ctx"]), _POSITIONS[op])
    while ctx > 1 and kv.nbytes(fmt, kv_heads, ctx, dim) > most_bytes:
        ctx //= 2
    tokens = min(tokens, ctx)
    cache = kv.nbytes(fmt, kv_heads, ctx, dim)
    sizes = {"qkv": tokens * row, "kc": cache, "vc": cache}
    given = {"fmt": push["fmt"], "heads": heads, "kv_heads": kv_heads, "dim": dim, "ctx": ctx}
    given |= {"scale": 1.0, "window": 0, "softcap": 0.0}
    if op == "attention_step":
        sizes["table"] = 4 * ctx * dim
        given |= {"rope_dims": dim, "neox": 0}
    else:
        sizes["out"] = 4 * tokens * heads * dim
    name = f"{op} {fmt} {heads}/{kv_heads}x{dim}x{ctx}"
    if op == "attention_prefill":
        name = f"{name}x{tokens}"
    return Trial(name, op, given, sizes, (tokens, min(ctx // 2, ctx - tokens), tokens - 1))


def _class(size: float) -> int:
    """The power of two below, or the size itself."""
    return 1 << (int(size).bit_length() - 1)


def _fine(size: float) -> int:
    """The size with three significant bits: those of models mostly have no more."""
    step = 1 << max(int(size).bit_length() - 3, 0)
    return int(size) // step * step


class _Field:
    """Buffers for calls of one kind, which the chains of all variants share."""

    def __init__(self, backend: Backend, what: Trial, copies: int, stack: ExitStack) -> None:
        self._backend, self._what, self._copies, self._stack = backend, what, copies, stack
        self._contract = kernels.op(what.op)
        self._weights = backend.weights({})
        stack.callback(self._weights.close)
        sizes = {**what.sizes, "w": copies * _apart(what)} if copies > 1 else what.sizes
        self._buffers = {"params": Buffer("params", 4 * PARAM_WORDS, "params")}
        for bind in self._contract.bindings:
            self._buffers[bind.name] = Buffer(bind.name, sizes[bind.name], "scratch")
        self._owner = self._executable((), NOTHING)
        words = np.zeros(PARAM_WORDS, np.uint32)
        words[: len(what.params)] = what.params
        self._owner.write("params", words)

    def _executable(self, calls: tuple[Call, ...], lent: Lent) -> Executable:
        program = Program(self._buffers, {"chain": calls})
        exe = self._backend.executable(program, self._weights, lent)
        self._stack.callback(exe.close)
        return exe

    def chain(self, variant: str, count: int) -> Callable[[], float]:
        """So many calls that wait for one another; what it gives runs them and tells seconds a
        call.

        Raises:
            PvrError: what Backend.executable raises, and Executable.run.
        """
        what, contract = self._what, self._contract
        most = self._backend.info.limits.max_workgroup_count
        push = {**what.push, "tokens": what.params[N_TOKENS], "most": most}
        groups = contract.groups(push, contract.variant(variant))
        calls = tuple(
            Call(what.op, variant, self._bindings(i), contract.pack(**what.push), groups)
            for i in range(count)
        )
        exe = self._executable(calls, {name: (self._owner, name) for name in self._buffers})

        def run() -> float:
            stats = exe.run("chain")
            return (stats.device_s or stats.wall_s) / count

        return run

    def _bindings(self, number: int) -> tuple[Binding, ...]:
        """Those of a call: of matrices the next one."""
        offsets = {"w": number % self._copies * _apart(self._what)} if self._copies > 1 else {}
        return tuple(
            Binding(b.name, offsets.get(b.name, 0), self._what.sizes[b.name])
            for b in self._contract.bindings
        )


def _apart(what: Trial) -> int:
    """Bytes from one matrix to the next."""
    return ceil_div(what.sizes["w"], 256) * 256


def _field(backend: Backend, what: Trial, stack: ExitStack) -> _Field:
    """With matrices for every call to have another, as far as there is memory for them."""
    if what.op in _MATRICES and not backend.info.software:
        most = min(_SPREAD, backend.info.limits.max_storage_range)
        with contextlib.suppress(OutOfMemory):
            return _Field(backend, what, max(1, most // _apart(what)), stack)
    return _Field(backend, what, 1, stack)


def race(backend: Backend, variants: Sequence[str], what: Trial) -> Times:
    """Seconds that a call of each variant takes among others that wait for one another. Variants
    that the device cannot have after all are left out.

    Raises:
        DeviceLost, OutOfMemory
    """
    software = backend.info.software
    few, most, turns = (1, 1, 1) if software else (_FEW, _MOST_CALLS, TURNS)
    times: Times = {}
    with ExitStack() as stack:
        field = _field(backend, what, stack)
        chains: dict[str, Callable[[], float]] = {}
        for v in variants:
            with contextlib.suppress(InvalidArgument, OutOfMemory):
                chains[v] = field.chain(v, few)
        if chains and not software:
            _warm(next(iter(chains.values())))
        for v, run in chains.items():
            times[v] = run()
            count = min(most, int(_CHAIN_S / max(times[v], 1e-9)))
            if count > few:
                chains[v] = field.chain(v, count)
        # In turns: what slows a device down for a while is to slow all of them down.
        for _ in range(turns):
            for v, run in chains.items():
                if times[v] <= _SLOW * min(times.values()):
                    times[v] = min(times[v], run())
    return times


def _warm(run: Callable[[], float]) -> None:
    """Runs it until it gets no faster: the clock of an idle device rises with its work."""
    best, started = math.inf, time.perf_counter()
    gained = now = started
    while now - gained < _STEADY_S and now - started < _WARM_S:
        took, now = run(), time.perf_counter()
        if took < GAIN * best:
            best, gained = took, now


def best(times: Times, baseline: str) -> str:
    """The fastest variant; the baseline one unless another gains something."""
    quick = min(times, key=lambda v: times[v], default=baseline)
    if baseline in times and times[quick] > GAIN * times[baseline]:
        return baseline
    return quick


class Speeds:
    """Times of one device and driver version; kept in `folder` if there is one. Each holds for the
    compiled variant (the hash of its SPIR-V) that it was taken with. An unreadable file is as good
    as none.
    """

    def __init__(self, info: DeviceInfo, folder: Path | None) -> None:
        p = info.properties
        name = f"{p.get('uuid', 'unknown')}-{p.get('driver_id', 0)}-{p.get('driver_version', 0)}"
        self._path = folder / f"{name}.times" if folder else None
        self._entries = self._read()

    def _read(self) -> dict[str, dict[str, tuple[str, float]]]:
        with contextlib.suppress(OSError, ValueError, TypeError, AttributeError, KeyError):
            if self._path is not None:
                found = json.loads(self._path.read_text("utf-8"))
                return {
                    str(name): {
                        str(v): (str(sha), float(seconds)) for v, (sha, seconds) in entry.items()
                    }
                    for name, entry in found.items()
                }
        return {}

    def get(self, name: str, shas: Mapping[str, str]) -> Times:
        """The times of these variants for a class of sizes; empty unless all are known."""
        known = self._entries.get(name, {})
        if any(known.get(v, ("", 0.0))[0] != sha for v, sha in shas.items()):
            return {}
        return {v: known[v][1] for v in shas}

    def put(self, name: str, shas: Mapping[str, str], times: Times) -> None:
        """Keeps times. A file that cannot be written means that they are taken again."""
        new = {v: (shas[v], seconds) for v, seconds in times.items()}
        self._entries[name] = {**self._entries.get(name, {}), **new}
        if self._path is None:
            return
        self._entries = {**self._read(), **self._entries}
        part = self._path.with_suffix(f".times.{os.getpid()}")
        with contextlib.suppress(OSError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            part.write_text(json.dumps(self._entries, indent=1), encoding="utf-8")
            part.replace(self._path)

    def fastest(self, race: Racer, shas: Mapping[str, str], what: Trial) -> str:
        """The fastest of these variants (with their hashes; the baseline first); `race` is asked
        when it is not known. The first when none could be timed.
        """
        times = self.get(what.name, shas)
        if not times:
            times = race(list(shas), what)
            self.put(what.name, shas, times)
        return best(times, next(iter(shas)))

    def told(self) -> str:
        """For people: for each class of sizes microseconds a call, the fastest variant first."""
        out = []
        for name, times in sorted(self._entries.items()):
            order = sorted(times.items(), key=lambda item: item[1][1])
            if order:
                out.append(f"{name}: {', '.join(f'{v} {s * 1e6:.1f} us' for v, (_, s) in order)}")
        return "; ".join(out)
