# SPDX-License-Identifier: Apache-2.0
"""Which calls of a recording have to wait for those before them."""

from __future__ import annotations

from collections.abc import Sequence

from engine.backends.gate import Range


class Hazards:
    """Which calls of a sequence need a barrier: those that meet what was written, or write what was
    read, since.
    """

    def __init__(self) -> None:
        self._written: list[Range] = []
        self._read: list[Range] = []

    def add(self, ranges: Sequence[Range], access: Sequence[str]) -> bool:
        """The next call's bindings; whether a barrier has to come before it."""
        reads = [r for r, a in zip(ranges, access, strict=True) if "r" in a]
        writes = [r for r, a in zip(ranges, access, strict=True) if "w" in a]
        needed = _meet([*reads, *writes], self._written) or _meet(writes, self._read)
        if needed:
            self._written, self._read = [], []
        self._written += writes
        self._read += reads
        return needed


def _meet(some: Sequence[Range], others: Sequence[Range]) -> bool:
    return any(
        a == b and begin < stop and start < end
        for a, begin, end in some
        for b, start, stop in others
    )
