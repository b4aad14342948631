# SPDX-License-Identifier: Apache-2.0
"""Faults on purpose, for tests: a backend that loses its device, hangs, lies or is slow.

A fault is written KIND:FAULT[:N], e.g. "gpu:device_lost:17": in the worker of that kind, from the
N-th submission of the process on (from 1, the default). Only the first worker of a kind (generation
1) takes such faults, so its successor is sound.

- `device_lost`  the submission raises DeviceLost
- `hang`         the submission never returns, as with a driver that is stuck
- `exit`         the process ends in the middle of the submission
- `nan`          what is read back after the submission is NaN
- `slow`         each submission takes N milliseconds more
- `no_device`    there is no device at all

A driver's compiler is not mended by a new process, so these are for every generation; their third
part is the kernel's name ("gpu:compile_hang:swiglu.base"):

- `compile_hang`   the compiler never returns
- `compile_abort`  the compiler aborts the process
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from engine.backends.base import (
    NOTHING,
    NOWHERE,
    Adopted,
    Array,
    Backend,
    Executable,
    Into,
    Lent,
    RunStats,
    WeightSet,
)
from engine.errors import DeviceLost
from engine.program import Program
from pvrd import fault_words


@dataclass
class Faults:
    """The faults of this worker and how many submissions it has made."""

    at: Mapping[str, int] = field(default_factory=dict)
    submissions: int = 0
    compiler: Mapping[str, str] = field(default_factory=dict)  # a kernel's name: its fault

    def compiling(self, name: str) -> None:
        """What the compiler does to a kernel, when it does not do its work."""
        fault = self.compiler.get(name)
        if fault == "compile_abort":
            os.abort()
        while fault:
            signal.pause()

    def due(self, name: str) -> bool:
        """True from the fault's submission on."""
        return name in self.at and self.submissions >= self.at[name]


def parse(specs: str | Iterable[str], kind: str, generation: int) -> Faults:
    """The faults for the worker of this kind and generation; a string has commas between them.

    Raises:
        ValueError: a malformed one, whatever worker it is for.
    """
    at: dict[str, int] = {}
    compiler: dict[str, str] = {}
    if isinstance(specs, str):
        specs = [s.strip() for s in specs.split(",") if s.strip()]
    for fault in map(fault_words.parse, specs):
        if fault.kind != kind:
            continue
        if fault.kernel:
            compiler[fault.kernel] = fault.name
        elif generation == 1:
            at[fault.name] = fault.number
    return Faults(at, compiler=compiler)


class FaultyBackend:
    """A backend with the same interface that passes everything on, faults aside."""

    def __init__(self, inner: Backend, faults: Faults) -> None:
        self._inner = inner
        self._faults = faults
        self.info = inner.info

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def weights(self, blobs: Mapping[str, Array]) -> WeightSet:
        return self._inner.weights(blobs)

    def executable(self, program: Program, weights: WeightSet, lent: Lent = NOTHING) -> Executable:
        inner_lent = {name: (e._inner, buffer) for name, (e, buffer) in lent.items()}
        made = self._inner.executable(program, weights, inner_lent)
        return FaultyExecutable(made, self._faults)

    def adopt(self, memory: Array, fd: int = -1) -> Adopted | None:
        return self._inner.adopt(memory, fd)

    def counters(self) -> dict[str, int]:
        return self._inner.counters()

    def close(self) -> None:
        self._inner.close()


class FaultyExecutable:
    """An executable whose runs count as submissions."""

    def __init__(self, inner: Executable, faults: Faults) -> None:
        self._inner = inner
        self._faults = faults

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def write(self, buffer: str, data: Array | bytes, offset: int = 0) -> None:
        self._inner.write(buffer, data, offset)

    def read(self, buffer: str, nbytes: int, offset: int = 0) -> Array:
        return self._doubtful(self._inner.read(buffer, nbytes, offset))

    def look(self, buffer: str, nbytes: int, offset: int = 0) -> Array:
        return self._doubtful(self._inner.look(buffer, nbytes, offset))

    def _doubtful(self, data: Array) -> Array:
        if self._faults.due("nan"):
            return np.full_like(data, 0xFF)  # all bits set is NaN in f16 and f32
        return data

    def fetch(self, into: Into) -> None:
        self._inner.fetch(into)
        if self._faults.due("nan"):
            for target in into.values():
                target[:] = 0xFF

    def run(self, *sequences: str, into: Into = NOWHERE) -> RunStats:
        faults = self._faults
        faults.submissions += 1
        if faults.due("device_lost"):
            raise DeviceLost("the device reported loss (a fault of the test)")
        if faults.due("exit"):
            os._exit(9)
        while faults.due("hang"):
            signal.pause()
        if "slow" in faults.at:
            time.sleep(faults.at["slow"] / 1000)
        stats = self._inner.run(*sequences)
        self.fetch(into)
        return stats

    def close(self) -> None:
        self._inner.close()
