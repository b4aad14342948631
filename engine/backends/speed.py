# SPDX-License-Identifier: Apache-2.0
"""Which variant of an operation is the fastest on a device, found by running each.

A variant that is good on one device is bad on another, and no query says which. So each is timed at
the first use of an operation, for each class of sizes once: calls that wait for one another, as
those of a token do. The times are kept beside the verdicts of the self-tests.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import kernels
from engine.backends.base import Backend, DeviceInfo
from engine.program import Binding, Buffer, Call, Program
from kernels import kv, weights
from kernels.contract import N_TOKENS, PARAM_WORDS
from kernels.conv2d import op as conv2d
from kernels.maps import Geometry
from kernels.nsr import op as nsr
from kernels.text import FORMAT_NAMES
from kernels.topk.op import RECORD_WORDS, part_nbytes

CALLS, ROUNDS = 32, 3  # in a submission; submissions, of which the quickest counts
TURNS = 2  # of all variants
GAIN = 0.95  # of the baseline's time, at most: less is noise
_MOST_BYTES = 32 << 20  # of a matrix that is made for this
_LARGE = 4 << 20  # bytes that a call takes its time for: fewer are needed
_SLOW_S = 0.02  # a submission that need not be repeated
_POSITIONS = {"attention_decode": 4096, "attention_prefill": 1024}  # of a cache
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


# Seconds of a call of a variant, None when the device cannot have it after all.
Timer = Callable[[str, Trial], float | None]


def trial(op: str, push: Mapping[str, Any], most_bytes: int) -> Trial | None:
    """What stands for a call with these push constants, in bindings of at most `most_bytes`: of one
    token, with a key `tokens` of so many where that matters. None for operations with nothing to
    choose.
    """
    if op in ("matvec", "matmul"):
        fmt, n, k = FORMAT_NAMES[int(push["fmt"])], _class(push["n"]), _class(push["k"])
        k, most = max(k, weights.BLOCK), min(_MOST_BYTES, most_bytes)
        while n > 1 and weights.nbytes(fmt, n, k) > most:
            n //= 2
        given = {"fmt": push["fmt"], "n": n, "k": k, "accumulate": 0, "y0": 0}
        name, tokens = f"{op} {fmt} {n}x{k}", 1
        if op == "matmul":
            tokens = _class(max(1, min(push.get("tokens", 1), most // (4 * max(n, k)))))
            name, given = f"{name}x{tokens}", {**given, "ldy": n}
        sizes = {"w": weights.nbytes(fmt, n, k), "x": 4 * k * tokens, "y": 4 * n * tokens}
        return Trial(name, op, given, sizes, (tokens, 0, tokens - 1))
    if op == "rmsnorm":
        k = _class(push["k"])
        given = {"k": k, "eps": 1e-5, "last": 1, "add": 0}
        return Trial(f"{op} {k}", op, given, {"x": 4 * k, "w": 4 * k, "y": 4 * k}, (1, 0, 0))
    if op == "topk":
        v, stage = _class(push["v"]), push["stage"]
        sizes = {"logits": 4 * v, "part": part_nbytes(v), "out": 4 * RECORD_WORDS}
        return Trial(f"{op} {v} stage {stage}", op, {"v": v, "stage": stage}, sizes, (1, 0, 0))
    if op in ("attention_decode", "attention_prefill"):
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
    sizes = {"qkv": tokens * row, "kc": cache, "vc": cache, "out": 4 * tokens * heads * dim}
    given = {"fmt": push["fmt"], "heads": heads, "kv_heads": kv_heads, "dim": dim, "ctx": ctx}
    given |= {"scale": 1.0, "window": 0, "softcap": 0.0}
    name = f"{op} {fmt} {heads}/{kv_heads}x{dim}x{ctx}"
    if op == "attention_prefill":
        name = f"{name}x{tokens}"
    return Trial(name, op, given, sizes, (tokens, min(ctx // 2, ctx - tokens), tokens - 1))


def _class(size: float) -> int:
    """The power of two below, or the size itself."""
    return 1 << (int(size).bit_length() - 1)


def measure(backend: Backend, variant: str, what: Trial) -> float:
    """Seconds that one call takes among others that wait for one another.

    Raises:
        PvrError: what Backend.executable and Executable.run raise.
    """
    contract = kernels.op(what.op)
    buffers = {"params": Buffer("params", 4 * PARAM_WORDS, "params")}
    for bind in contract.bindings:
        buffers[bind.name] = Buffer(bind.name, what.sizes[bind.name], "scratch")
    most = backend.info.limits.max_workgroup_count
    push = {**what.push, "tokens": what.params[N_TOKENS], "most": most}
    groups = contract.groups(push, contract.variant(variant))
    bindings = tuple(Binding(b.name) for b in contract.bindings)
    call = Call(what.op, variant, bindings, contract.pack(**what.push), groups)
    large = sum(what.sizes.values()) > _LARGE
    calls = 2 if backend.info.software else CALLS // 4 if large else CALLS
    given = backend.weights({})
    exe = backend.executable(Program(buffers, {"once": (call,) * calls}), given)
    try:
        words = np.zeros(PARAM_WORDS, np.uint32)
        words[: len(what.params)] = what.params
        exe.write("params", words)
        slow = exe.run("once").wall_s > _SLOW_S
        return min(exe.run("once").wall_s for _ in range(1 if slow else ROUNDS)) / calls
    finally:
        exe.close()
        given.close()


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

    def fastest(self, time: Timer, shas: Mapping[str, str], what: Trial) -> str:
        """The fastest of these variants (with their hashes; the baseline first); `time` is asked
        when it is not known. The first when none could be timed.
        """
        times = self.get(what.name, shas)
        if not times:
            # In turns: the clock of an idle device rises while the first ones are timed.
            asked = [{v: time(v, what) for v in shas} for _ in range(TURNS)]
            for v in shas:
                known = [t for turn in asked if (t := turn[v]) is not None]
                if len(known) == TURNS:
                    times[v] = min(known)
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
