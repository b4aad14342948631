# SPDX-License-Identifier: Apache-2.0
"""Faults on purpose, for tests: a backend that loses its device, hangs, lies or is slow.

A fault is written KIND:FAULT[:N], e.g. "gpu:device_lost:17": in the worker of that kind, from the
N-th submission of the process on (from 1, the default). Only the first worker of a kind (generation
1) takes such faults, so its successor is sound.

- `device_lost`  the submission raises DeviceLost
- `hang`         the submission never returns, as with a driver that is stuck
- `exit`         the process ends in the middle of the submission
- `nan`          what is read back after the submission is NaN
- `nan_logits`   the same, of logits alone
- `slow`         each submission takes N milliseconds more
- `no_device`    there is no device at all
- `vk_lost`      the N-th vkQueueSubmit answers VK_ERROR_DEVICE_LOST
- `vk_memory`    vkQueueSubmit and vkAllocateMemory answer VK_ERROR_OUT_OF_DEVICE_MEMORY
- `memory`       the submission needs 64 MiB of the host's memory (for a test that limits it)
- `node`         no fault: a software GPU says that it is /dev/dri/renderDN
- `armed`        workers of all generations have the faults of this kind, but first when they get
                 SIGUSR2, submissions counted from there; a second one ends them (`slow` and `node`
                 are always on)

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

# Fault -> the calls of Vulkan that can fail so, and the error's class in the package.
_ANSWERS = (
    ("vk_lost", ("vkQueueSubmit",), "VkErrorDeviceLost"),
    ("vk_memory", ("vkQueueSubmit", "vkAllocateMemory"), "VkErrorOutOfDeviceMemory"),
)
_LOGITS = ("logits", "topk", "records")


@dataclass
class Faults:
    """The faults of this worker and how many submissions it has made."""

    at: Mapping[str, int] = field(default_factory=dict)
    submissions: int = 0
    compiler: Mapping[str, str] = field(default_factory=dict)  # a kernel's name: its fault
    on: bool = True
    calls: int = 0  # of Vulkan that can fail as asked

    def arm(self) -> None:
        """Waits for SIGUSR2 if that was asked for; plans what the Vulkan driver answers."""
        if "armed" in self.at:
            self.on = False
            signal.signal(signal.SIGUSR2, self._toggle)
        if {"vk_lost", "vk_memory"} & set(self.at):
            from engine.backends.vulkan.api import binding

            binding.planned = self.answer

    def _toggle(self, _number: int, _frame: Any) -> None:
        self.on = not self.on
        self.submissions = self.calls = 0

    def answer(self, what: str) -> str:
        """The name of the error that a call of Vulkan gives, "" where it does its work."""
        if not self.on:
            return ""
        for fault, calls, error in _ANSWERS:
            if fault in self.at and what in calls:
                self.calls += 1
                if self.calls >= self.at[fault]:
                    return error
        return ""

    def compiling(self, name: str) -> None:
        """What the compiler does to a kernel, when it does not do its work."""
        fault = self.compiler.get(name)
        if fault == "compile_abort":
            os.abort()
        while fault:
            signal.pause()

    def due(self, name: str) -> bool:
        """True from the fault's submission on."""
        return self.on and name in self.at and self.submissions >= self.at[name]

    def node(self) -> list[str]:
        """The DRM nodes that the device is said to have; empty: its own."""
        return [f"/dev/dri/renderD{self.at['node']}"] if "node" in self.at else []


def parse(specs: str | Iterable[str], kind: str, generation: int) -> Faults:
    """The faults for the worker of this kind and generation; a string has commas between them.

    Raises:
        ValueError: a malformed one, whatever worker it is for.
    """
    at: dict[str, int] = {}
    compiler: dict[str, str] = {}
    if isinstance(specs, str):
        specs = [s.strip() for s in specs.split(",") if s.strip()]
    mine = [fault for fault in map(fault_words.parse, specs) if fault.kind == kind]
    every = generation == 1 or any(fault.name == "armed" for fault in mine)
    for fault in mine:
        if fault.kernel:
            compiler[fault.kernel] = fault.name
        elif every:
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
        data = self._inner.read(buffer, nbytes, offset)
        if buffer in _LOGITS and self._faults.due("nan_logits"):
            return np.full_like(data, 0xFF)
        return self._doubtful(data)

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
                if not isinstance(target, int):
                    target[:] = 0xFF

    def run(self, *sequences: str, into: Into = NOWHERE) -> RunStats:
        faults = self._faults
        faults.submissions += 1
        if faults.due("device_lost"):
            raise DeviceLost("the device reported loss (a fault of the test)")
        if faults.due("memory"):
            np.empty(1 << 26, np.uint8)
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
