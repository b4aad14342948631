# SPDX-License-Identifier: Apache-2.0
"""From a lowering to something that runs, with kernels that the device can be trusted with."""

from __future__ import annotations

from collections.abc import Callable

from engine.backends.base import NOTHING, Backend, Executable, Lent, WeightSet
from engine.backends.selftest import Quarantined
from engine.program import Program
from engine.variants import NoKernel


def recorded(
    backend: Backend, make: Callable[[], Program], weights: WeightSet, lent: Lent = NOTHING
) -> tuple[Program, Executable]:
    """A program and its executable. `make` lowers with `variants.allowed(backend)`; when a variant
    turns out to be wrong at its first use, it lowers again without it.

    Raises:
        Quarantined: an operation has no variant left that the device can be trusted with.
        PvrError: what `make` and Backend.executable raise.
    """
    tried: set[str] = set()
    while True:
        try:
            program = make()
        except NoKernel as e:
            doubt = getattr(backend, "doubt", None)
            doubts = [doubt(e.op, v) for v in e.variants] if doubt else []
            if found := [d for d in doubts if d]:
                raise Quarantined(f"{found[0]}, and there is no other kernel for {e.op}") from e
            raise
        try:
            return program, backend.executable(program, weights, lent)
        except Quarantined as e:
            # Each round leaves one more variant out; the same one twice would go on for ever.
            if str(e) in tried:
                raise
            tried.add(str(e))
