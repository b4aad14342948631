# SPDX-License-Identifier: Apache-2.0
"""The CPU as a device: Programs become arrays of C structs; a slice is one call into
libpvrkernels.so.

The library has every operation for every instruction set and picks the best at load (PVRD_ISA
lowers it). ctypes releases the GIL around the call. Weights stay views of what the caller mapped.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from engine.backends.base import (
    COUNTERS,
    NOTHING,
    NOWHERE,
    Array,
    DeviceInfo,
    Into,
    Lent,
    Limits,
    RunStats,
)
from engine.backends.host import ALIGN, HostExecutable, HostWeights
from engine.backends.library import library
from engine.errors import InvalidArgument, OutOfMemory, PvrError
from engine.program import Program

MAX_BINDINGS, MAX_PUSH_WORDS = 8, 32  # PVR_MAX_BINDINGS, PVR_MAX_PUSH_WORDS of pvr.h

# pvr_call of pvr.h
_CALL = np.dtype(
    [
        ("op", np.uint32),
        ("reserved", np.uint32),
        ("push", np.uint32, MAX_PUSH_WORDS),
        ("buf", np.uintp, MAX_BINDINGS),
    ]
)
_STATUS = {
    -1: "an operation that the library does not have",
    -2: "no memory for the kernels' scratch",
}


def has(op: str) -> bool:
    """Does the library have an operation? It may be built with some alone, or before one."""
    return int(library().pvr_op_index(op.encode())) >= 0


def isas() -> tuple[str, ...]:
    """The instruction sets that this CPU has and the library knows, the plainest first."""
    found: list[str] = []
    while name := library().pvr_isa_at(len(found)):
        found.append(name.decode())
    return tuple(found)


def set_isa(name: str) -> None:
    """Makes every CPU backend of this process use an instruction set; for tests and benchmarks.

    Raises:
        InvalidArgument: the CPU lacks it.
    """
    if library().pvr_set_isa(name.encode()):
        raise InvalidArgument(f"this CPU has no {name!r}; it has {', '.join(isas())}")


def isa() -> str:
    """The instruction set in use."""
    name: bytes = library().pvr_isa()
    return name.decode()


def usable_cpus() -> int:
    """CPUs that this process may run on."""
    return len(os.sched_getaffinity(0))


def _cpu_name() -> str:
    """The processor's name as the kernel prints it; boards have only the device tree's."""
    try:
        for line in (
            Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
        ):
            key, _, value = line.partition(":")
            if key.strip() in ("model name", "uarch") and value.strip():
                return value.strip()
    except OSError:
        pass
    try:
        model = Path("/proc/device-tree/model").read_bytes()
        return model.rstrip(b"\0").decode("utf-8", "replace") or os.uname().machine
    except OSError:
        return os.uname().machine


class CpuExecutable(HostExecutable):
    """A Program as arrays of pvr_call."""

    def __init__(
        self,
        counters: dict[str, int],
        program: Program,
        weights: HostWeights,
        threads: int,
        lent: Lent = NOTHING,
    ) -> None:
        super().__init__(counters, program, weights, lent)
        self._threads = threads
        self._weights = weights  # the encoded addresses point into them
        self._encoded = {name: self._encode(name) for name in program.sequences}
        self._slices: dict[tuple[str, ...], Array] = {}
        # Where the calls of a slice have the outputs' own memory, and those that hold results.
        self._writes: dict[tuple[str, ...], dict[str, Array]] = {}
        self._parts: set[str] = set()

    def _encode(self, sequence: str) -> Array:
        calls = self.program.sequences[sequence]
        out = np.zeros(len(calls), _CALL)
        params = self.view("params").ctypes.data
        for row, call in zip(out, calls, strict=True):
            index = library().pvr_op_index(call.op.encode())
            if index < 0:
                raise InvalidArgument(f"the library has no operation {call.op!r}")
            if (
                len(call.push) > 4 * MAX_PUSH_WORDS
                or len(call.push) % 4
                or len(call.bindings) >= MAX_BINDINGS
            ):
                raise InvalidArgument(f"{call.op}: too many push constants or bindings")
            row["op"] = index
            row["push"][: len(call.push) // 4] = np.frombuffer(call.push, np.uint32)
            row["buf"][0] = params + call.params
            for i, b in enumerate(call.bindings, 1):
                row["buf"][i] = self.view(b.buffer).ctypes.data + b.offset
        return out

    def _slice(self, sequences: tuple[str, ...]) -> Array:
        self.view("params")  # a closed executable runs nothing
        calls = self._slices.get(sequences)
        if calls is None:
            if missing := [s for s in sequences if s not in self._encoded]:
                raise InvalidArgument(f"the program has no sequence {missing[0]!r}")
            calls = np.concatenate([np.zeros(0, _CALL), *(self._encoded[s] for s in sequences)])
            self._slices[sequences] = calls
            outputs = {b.name: self.view(b.name).ctypes.data
                       for b in self.program.buffers.values() if b.kind == "output"}  # fmt: skip
            found = {name: calls["buf"] == address for name, address in outputs.items()}
            self._writes[sequences] = {name: at for name, at in found.items() if at.any()}
        return calls

    def run(self, *sequences: str, into: Into = NOWHERE) -> RunStats:
        calls, rest = self._straight(sequences, into)
        started = time.perf_counter()
        self._calls(calls)
        wall = time.perf_counter() - started
        self._counters["submissions"] += 1
        self._counters["dispatches"] += len(calls)
        self.fetch(rest)
        self._parts -= rest.keys()
        return RunStats(wall_s=wall)

    def _straight(self, sequences: tuple[str, ...], into: Into) -> tuple[Array, Into]:
        """The calls with their outputs going to `into` at once, and what has to be copied yet:
        memory that is smaller than the buffer or no whole lines, and what has results already.
        """
        calls = self._slice(sequences)
        straight: dict[str, Array] = {}
        for name in self._writes[sequences]:
            target, whole = into.get(name), self.view(name).nbytes
            if (
                isinstance(target, np.ndarray)
                and name not in self._parts
                and (target.nbytes, target.ctypes.data % ALIGN) == (whole, 0)
                and target.flags.c_contiguous
            ):
                straight[name] = target
            else:
                self._parts.add(name)
        if straight:
            calls = calls.copy()
        for name, target in straight.items():
            calls["buf"][self._writes[sequences][name]] = target.ctypes.data
            self._counters["bytes_read_back"] += target.nbytes
            self._counters["bytes_direct"] += target.nbytes
        return calls, {name: target for name, target in into.items() if name not in straight}

    def run_apart(
        self,
        sequences: Sequence[str],
        apart: Sequence[int],
        before: Callable[[int], None],
        after: Callable[[int], None],
    ) -> RunStats:
        """As run, but the calls with these numbers in the slice are made alone, in order; `before`
        and `after` are called around each with its number.
        """
        calls = self._slice(tuple(sequences))
        started = time.perf_counter()
        done = 0
        for at in apart:
            self._calls(calls[done:at])
            before(at)
            self._calls(calls[at : at + 1])
            after(at)
            done = at + 1
        self._calls(calls[done:])
        self._counters["submissions"] += 1
        self._counters["dispatches"] += len(calls)
        return RunStats(wall_s=time.perf_counter() - started)

    def _calls(self, calls: Array) -> None:
        if not len(calls):
            return
        status = library().pvr_run(calls.ctypes.data, len(calls), self._threads)
        if status == -2:
            raise OutOfMemory(_STATUS[status])
        if status:
            raise PvrError(f"the kernels refused a slice: {_STATUS.get(status, status)}")

    def close(self) -> None:
        self._slices, self._encoded, self._writes = {}, {}, {}
        super().close()


class CpuBackend:
    """The C kernels with a team of `threads` (0: one for each CPU that this process may use)."""

    def __init__(self, threads: int = 0) -> None:
        self.threads = threads if threads > 0 else usable_cpus()
        self._counters = dict.fromkeys(COUNTERS, 0)
        self.info = DeviceInfo(
            kind="cpu",
            name=_cpu_name(),
            driver="C with OpenMP",
            software=True,
            limits=Limits(
                max_storage_range=1 << 62, storage_align=ALIGN, max_push_bytes=4 * MAX_PUSH_WORDS
            ),
            features=frozenset({f"isa:{isa()}"}),
            properties={"threads": self.threads},
        )

    def misfit(self, op: str, variant: str) -> str:
        """Why the library cannot do an operation, whatever the variant; "" when it can."""
        return "" if library().pvr_op_index(op.encode()) >= 0 else "it was not compiled"

    def weights(self, blobs: Mapping[str, Array]) -> HostWeights:
        return HostWeights(blobs)

    def executable(self, program: Program, weights: Any, lent: Lent = NOTHING) -> CpuExecutable:
        return CpuExecutable(self._counters, program, weights, self.threads, lent)

    def adopt(self, memory: Array, fd: int = -1) -> None:
        """Nothing: kernels compute from cached copies of a band."""

    def counters(self) -> dict[str, int]:
        return dict(self._counters)

    def close(self) -> None:
        """Nothing is held beyond what executables and weights hold."""
