# SPDX-License-Identifier: Apache-2.0
"""Where time goes: each token's and frame's in parts, and each slice's beside what it takes alone.

`Metered` stands before a backend and measures what is written, run and read. The loop takes the
differences around a slice, so a task need not know of it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any

from engine.backends.base import (
    NOTHING,
    Array,
    Backend,
    Executable,
    Into,
    Lent,
    RunStats,
    WeightSet,
)
from engine.meanwhile import MEANWHILE
from engine.pace import ASIDE
from engine.program import Program
from pvrd.workers.canary import Canary
from pvrd.workers.paced import APART_S, Cut, Gate
from pvrd.workers.rhythm import Rhythm

PARTS = ("input", "queue", "upload", "compute", "download", "host")
NAMED_MS = 5.0  # from here on a wait is named
WAITS = ("input", "queue", "upload", "download")

KERNELS_EVERY = 32  # of an executable's slices one is traced kernel by kernel, where that costs

Slice = tuple[float, float, str, int, float]  # began, wall s, sequences, size, device s or 0


class Meter:
    """Seconds that the backend spent for whoever asked, and the canary over its slices."""

    def __init__(self) -> None:
        self.upload = self.compute = self.download = 0.0
        self.canary = Canary()
        self.gate = Gate(Rhythm(), self.canary)
        self.urgent: Callable[[], bool] = lambda: False  # does something wait that cannot?
        self.pieces = 1  # of the present slice, after each of which it asked
        self.totals = dict.fromkeys(PARTS, 0.0)  # seconds of all tokens and frames
        self.slices: deque[Slice] | None = None  # of the present trace
        self.kernel: Callable[[str, float, float], None] | None = None  # who is told of each then

    def mark(self) -> tuple[float, float, float, float]:
        """What it counts now, for the difference."""
        return self.upload, self.compute, self.download, self.gate.waited


class Spans:
    """The time of one task, without gaps: each moment is one of PARTS."""

    def __init__(self, meter: Meter | None = None, clock: Callable[[], float] = time.monotonic):
        self._meter = meter or Meter()
        self._clock = clock
        self._mark = self._meter.mark()
        self._since = clock()
        self._what = "input"  # or queue; "" while its slice runs
        self._parts = dict.fromkeys(PARTS, 0.0)
        self._whole = dict.fromkeys(PARTS, 0.0)
        self._longest: dict[str, tuple[float, int]] = {}  # seconds, at which unit
        self._at: dict[str, float] = {}  # of the waits under way
        self.units = 0  # tokens or frames that were taken

    def waits(self, what: str, now: float) -> None:
        """From `now` on it waits for this (input or queue); a slice of it is over."""
        if self._what != what:
            self._settle(now)
            self._what = what

    def begins(self, now: float) -> None:
        """Its slice begins."""
        self._settle(now)
        self._what = ""

    def _settle(self, now: float) -> None:
        past = max(0.0, now - self._since)
        self._since = now
        if self._what:
            self._wait(self._what, past)
            self._mark = self._meter.mark()
            return
        mark = self._meter.mark()
        upload, compute, download, waited = (b - a for a, b in zip(self._mark, mark, strict=True))
        self._mark = mark
        self._parts["compute"] += compute
        self._parts["host"] += max(0.0, past - upload - compute - download - waited)
        self._wait("queue", waited)
        self._wait("upload", upload)
        self._wait("download", download)

    def _wait(self, what: str, seconds: float) -> None:
        self._parts[what] += seconds
        if 1000 * seconds > NAMED_MS and seconds > self._longest.get(what, (0.0, 0))[0]:
            self._longest[what] = seconds, self.units

    def take(self, behind_s: float = 0.0) -> dict[str, float]:
        """Milliseconds of each part since the last time: those of one token or frame. `behind_s`:
        how long it stood behind the one before, which counts as queue.
        """
        self._settle(self._clock())
        if behind_s > 0:
            self._wait("queue", behind_s)
        taken = {part: round(1000 * s, 3) for part, s in self._parts.items()}
        for part, seconds in self._parts.items():
            self._whole[part] += seconds
            self._meter.totals[part] += seconds
        self._parts = dict.fromkeys(PARTS, 0.0)
        self.units += 1
        return taken

    def sums(self) -> dict[str, float]:
        """Milliseconds of each part of all that was taken, as NAME_ms; of each wait above NAMED_MS
        the longest, as NAME_wait_ms, and the number of the token or frame, as NAME_wait_at.
        """
        out = {f"{part}_ms": round(1000 * s, 3) for part, s in self._whole.items()}
        for what in WAITS:
            if what in self._longest:
                seconds, unit = self._longest[what]
                out[f"{what}_wait_ms"] = round(1000 * seconds, 3)
                out[f"{what}_wait_at"] = unit
        return out


class Metered:
    """A backend with the same interface that measures."""

    def __init__(self, inner: Backend, meter: Meter) -> None:
        self._inner = inner
        self.meter = meter
        self.info = inner.info

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def executable(self, program: Program, weights: WeightSet, lent: Lent = NOTHING) -> Executable:
        MEANWHILE.run()  # recording takes long
        inner = {name: (e._inner, buffer) for name, (e, buffer) in lent.items()}
        made = self._inner.executable(program, weights, inner)
        return MeteredExecutable(made, self.meter, program, id(weights))


class MeteredExecutable:
    """An executable whose writes, runs and reads are measured. A kind of slice, for the canary, is
    (weights, sequences, tokens or tiles, power of two of the position).
    """

    def __init__(self, inner: Executable, meter: Meter, program: Program, weights: int) -> None:
        self._inner = inner
        self._meter = meter
        self._program = program
        self._runs = 0
        self._weights = weights
        self._size = (0, 0)
        self._cut = Cut(meter.gate, inner)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    @property
    def apart_s(self) -> float:
        """How long a slice of several tokens may take, without its waits, since others come
        between; 0: they don't.
        """
        return APART_S if self._cut.on else 0.0

    def write(self, buffer: str, data: Array | bytes, offset: int = 0) -> None:
        began = time.perf_counter()
        self._inner.write(buffer, data, offset)
        if buffer == "params" and not offset and not isinstance(data, bytes) and data.nbytes >= 8:
            words = data.reshape(-1).view("<u4")
            self._size = int(words[0]), int(words[1]).bit_length()
        self._meter.upload += time.perf_counter() - began

    def read(self, buffer: str, nbytes: int, offset: int = 0) -> Array:
        began = time.perf_counter()
        found = self._inner.read(buffer, nbytes, offset)
        self._meter.download += time.perf_counter() - began
        return found

    def look(self, buffer: str, nbytes: int, offset: int = 0) -> Array:
        began = time.perf_counter()
        found = self._inner.look(buffer, nbytes, offset)
        self._meter.download += time.perf_counter() - began
        return found

    def fetch(self, into: Into) -> None:
        began = time.perf_counter()
        self._inner.fetch(into)
        self._meter.download += time.perf_counter() - began

    def run(self, *sequences: str, **more: Any) -> RunStats:
        meter = self._meter
        self._runs += 1
        apart = None if self._runs % KERNELS_EVERY else meter.kernel
        if apart is not None:  # it takes longer, for no fault of the device's
            began = time.perf_counter()
            stats = self._apart(apart, sequences, **more)
            took = time.perf_counter() - began
        elif not more and self._cut.wanted(sequences):
            stats = self._cut.run((self._weights, *self._size), sequences, meter.urgent)
            meter.pieces = max(1, self._cut.pieces)
            took = stats.wall_s
        else:
            # What is brought with it makes it another kind.
            kind = (self._weights, sequences, *self._size, len(more.get("into", ())))
            aside = ASIDE.seconds
            stats, took = meter.gate.run(kind, lambda: self._inner.run(*sequences, **more))
            if ASIDE.seconds > aside:  # a part of it was computed again: that is the host's time
                took = stats.wall_s
        meter.compute += took
        if meter.slices is not None:
            device = stats.device_s or 0.0
            names = "+".join(dict.fromkeys(sequences))
            meter.slices.append((time.monotonic() - took, took, names, self._size[0], device))
        return stats

    def _apart(
        self, log: Callable[[str, float, float], None], sequences: tuple[str, ...], **more: Any
    ) -> RunStats:
        """A slice kernel by kernel, each with a submission of its own, where the device can."""
        run_apart = getattr(self._inner, "run_apart", None)
        if run_apart is None:
            return self._inner.run(*sequences, **more)
        names = [call.op for s in sequences for call in self._program.sequences[s]]
        began = 0.0

        def before(at: int) -> None:
            nonlocal began
            began = time.monotonic()

        def after(at: int) -> None:
            log(names[at], began, time.monotonic() - began)

        stats: RunStats = run_apart(sequences, range(len(names)), before, after)
        if into := more.get("into"):
            self._inner.fetch(into)
        return stats

    def close(self) -> None:
        self._inner.close()
