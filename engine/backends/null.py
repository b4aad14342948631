# SPDX-License-Identifier: Apache-2.0
"""A device that computes nothing, or slowly and surely with the numpy references. For tests of what
lies above.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

import kernels
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
from engine.backends.host import HostExecutable, HostWeights
from engine.errors import DeviceLost, InvalidArgument
from engine.program import Call, Program
from kernels.contract import PARAM_WORDS


class NullExecutable(HostExecutable):
    """Runs nothing; with `reference`, each call's numpy reference. `lost` is asked before each
    slice.
    """

    def __init__(
        self,
        counters: dict[str, int],
        program: Program,
        weights: HostWeights,
        reference: bool,
        lost: Callable[[], bool],
        lent: Lent = NOTHING,
    ) -> None:
        super().__init__(counters, program, weights, lent)
        self._reference = reference
        self._lost = lost

    def _call(self, call: Call) -> None:
        contract = kernels.op(call.op)
        bound = {}
        for bind, b in zip(contract.bindings, call.bindings, strict=True):
            whole = self.view(b.buffer)
            end = whole.nbytes if b.nbytes is None else b.offset + b.nbytes
            bound[bind.name] = whole[b.offset : end]
        contract.reference(
            self.view("params")[call.params :][: 4 * PARAM_WORDS].view(np.uint32),
            bound,
            contract.unpack(call.push),
        )

    def run(self, *sequences: str, into: Into = NOWHERE) -> RunStats:
        if missing := [s for s in sequences if s not in self.program.sequences]:
            raise InvalidArgument(f"the program has no sequence {missing[0]!r}")
        self.view("params")  # a closed executable runs nothing
        self._counters["submissions"] += 1
        if self._lost():
            raise DeviceLost("the null device was told to report loss")
        started = time.perf_counter()
        for name in sequences:
            for call in self.program.sequences[name]:
                if self._reference:
                    self._call(call)
                self._counters["dispatches"] += 1
        self.fetch(into)
        return RunStats(wall_s=time.perf_counter() - started)


class NullBackend:
    """`reference`: compute with numpy. `lose_at`: the n-th submission (from 1) reports device loss;
    0 never.
    """

    def __init__(
        self, reference: bool = False, lose_at: int = 0, limits: Limits | None = None
    ) -> None:
        self.reference = reference
        self.lose_at = lose_at
        self._counters = dict.fromkeys(COUNTERS, 0)
        self.info = DeviceInfo(
            kind="null",
            name="null",
            driver="numpy" if reference else "none",
            software=True,
            limits=limits or Limits(),
        )

    def weights(self, blobs: Mapping[str, Array]) -> HostWeights:
        return HostWeights(blobs)

    def executable(self, program: Program, weights: Any, lent: Lent = NOTHING) -> NullExecutable:
        def lost() -> bool:
            return 0 < self.lose_at <= self._counters["submissions"]

        return NullExecutable(self._counters, program, weights, self.reference, lost, lent)

    def adopt(self, memory: Array, fd: int = -1) -> None:
        """Nothing."""

    def counters(self) -> dict[str, int]:
        return dict(self._counters)

    def close(self) -> None:
        """Nothing is held."""
