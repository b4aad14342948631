# SPDX-License-Identifier: Apache-2.0
"""Where the time of a frame through another's network goes (a part of convnet_speed)."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import kernels
from engine.backends.base import NOWHERE, Array, Backend, Executable, Into, RunStats
from engine.errors import PvrError
from engine.program import Call
from engine.video.convnet import ConvModel
from kernels.contract import ceil_div

if TYPE_CHECKING:
    from benchmarks.convnet_speed import Ours

FRAMES = 7
ROUNDS = 3


class Watched:
    """An executable whose parts of a frame are timed."""

    def __init__(self, inner: Executable) -> None:
        self._inner = inner
        self.seconds = dict.fromkeys(("give", "device", "wait", "fetch"), 0.0)
        self.slices = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def _timed(self, what: str, work: Callable[[], Any]) -> Any:
        begin = time.perf_counter()
        result = work()
        self.seconds[what] += time.perf_counter() - begin
        return result

    def write(self, buffer: str, data: Array | bytes, offset: int = 0) -> None:
        self._timed("give", lambda: self._inner.write(buffer, data, offset))

    def look(self, buffer: str, nbytes: int, offset: int = 0) -> Array:
        seen: Array = self._timed("fetch", lambda: self._inner.look(buffer, nbytes, offset))
        return seen

    def run(self, *sequences: str, into: Into = NOWHERE) -> RunStats:
        begin = time.perf_counter()
        stats = self._inner.run(*sequences, into=into)
        taken = time.perf_counter() - begin
        on_device = stats.wall_s if stats.device_s is None else stats.device_s
        self.seconds["device"] += on_device
        self.seconds["wait"] += taken - on_device
        self.slices += 1
        return stats


@dataclass
class Kind:
    """Calls that are alike: their number in a window, and what all of them take and do."""

    calls: int = 0
    seconds: float = 0.0
    operations: float = 0.0
    nbytes: float = 0.0

    def __str__(self) -> str:
        rate = 1e-12 / max(self.seconds, 1e-9)
        parts = [f"{1e3 * self.seconds:.3f} ms in {self.calls} calls"]
        if self.operations:
            parts.append(f"{self.operations * rate:.1f} Tflop/s")
        if self.nbytes:
            parts.append(f"{self.nbytes * rate:.2f} TB/s")
        return ", ".join(parts)


def tell(ours: Ours, backend: Backend, model: ConvModel, say: Callable[[str], None]) -> None:
    """Says what the parts of a frame take, and the calls of its first window by kind."""
    found, slices = watched(ours, FRAMES)
    words = ", ".join(f"{name} {ms:.2f}" for name, ms in found.items())
    say(f"  ours, ms in {slices} slices: {words}")
    # Beside the frame's own buffers there has to be room for others.
    with suppress(PvrError):
        kinds = by_kind(ours, backend, model)
        whole = sum(kind.seconds for kind in kinds.values())
        say(f"  ours, calls of a window one by one: {1e3 * whole:.2f} ms")
        for name, kind in sorted(kinds.items(), key=lambda item: -item[1].seconds):
            say(f"    {name}: {kind}")


def watched(ours: Ours, times: int) -> tuple[dict[str, float], int]:
    """Median milliseconds of a frame and of its parts, and slices of the last one.

    `give`: planes to staging, or nothing of it where the device reads the ring; `device`: its own
    clock around the slices, with the copies there; `wait`: what slices take beyond that; `fetch`:
    planes from the device; `put`: all else, above all rows copied to the ring.
    """
    pipeline, found = ours.pipeline, []
    inner = pipeline._exe
    for _ in range(times):
        watch: Any = Watched(inner)
        pipeline._exe = watch
        begin = time.perf_counter()
        try:
            ours.frame()
        finally:
            pipeline._exe = inner
        total = time.perf_counter() - begin
        parts = watch.seconds
        found.append({"frame": total, **parts, "put": total - sum(parts.values())})
        slices = watch.slices
    return {k: 1e3 * statistics.median(f[k] for f in found) for k in found[0]}, slices


def _work(call: Call) -> tuple[str, float, float]:
    """A call's kind, and for convolutions multiplications and additions, and bytes of maps."""
    name = f"{call.op}.{call.variant}"
    if call.op != "conv2d":
        return name, 0.0, 0.0
    push = {key: int(value) for key, value in kernels.op(call.op).unpack(call.push).items()}
    cin, cout, k, pixels = push["cin"], push["cout"], push["k"], push["w"] * push["h"]
    lanes = sum(ceil_div(n, each) * each for n, each in ((cin, push["xl"]), (cout, push["yl"])))
    name += f" {cin} to {cout}, {k}x{k}"
    return name, 2.0 * cin * cout * k * k * pixels, 4.0 * lanes * pixels


def by_kind(ours: Ours, backend: Backend, model: ConvModel) -> dict[str, Kind]:
    """A window's calls, each submitted alone and in order, so that values are those of the frame;
    the least of some rounds counts.

    Raises:
        PvrError: there is no memory for a second program.
    """
    pipeline: Any = ours.pipeline
    program = pipeline.executable.program
    parts = [f"part{i}" for i in range(int(program.meta["parts"]))]
    calls = [call for name in ("first", *parts, "last") for call in program.sequences[name]]
    alone = {str(i): (call,) for i, call in enumerate(calls)}
    exe = backend.executable(replace(program, sequences=alone), model.weights)
    inner, least = pipeline._exe, [float("inf")] * len(calls)
    try:
        pipeline._exe = exe
        pipeline.begin(ours.source, ours.target)
        pipeline._load(pipeline._source, pipeline.tiling.rows[0], pipeline.tiling.columns[0])
        for _ in range(ROUNDS):
            for i in range(len(calls)):
                stats = exe.run(str(i))
                taken = stats.wall_s if stats.device_s is None else stats.device_s
                least[i] = min(least[i], taken)
    finally:
        pipeline._exe = inner
        pipeline._source = pipeline._sink = None
        exe.close()
    kinds: dict[str, Kind] = {}
    for call, seconds in zip(calls, least, strict=True):
        name, operations, nbytes = _work(call)
        kind = kinds.setdefault(name, Kind())
        kind.calls += 1
        kind.seconds += seconds
        kind.operations += operations
        kind.nbytes += nbytes
    return kinds
