# SPDX-License-Identifier: Apache-2.0
"""What a piece of a kernel call is (kernels/pieces.py makes them)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Push = Mapping[str, Any]
# Bytes of a binding as they are now: name, first byte, count (less where the binding ends before).
Read = Callable[[str, int, int], Array]

GAP = 16 << 10  # bytes between two runs that are read with them: a device is asked less often


def floats(array: Array) -> Array:
    return array.view(np.float32)


def words(array: Array) -> Array:
    return array.view(np.uint32)


@dataclass(frozen=True)
class Draw:
    """What is left to chance, and how much work a piece may be: about as many nanoseconds of its
    reference, where nobody has measured that.
    """

    rng: np.random.Generator
    most: float = math.inf

    def of(self, count: int) -> int:
        """One of 0..count-1."""
        return int(self.rng.integers(max(1, int(count))))

    def fit(self, each: float, full: int, beside: float = 0.0) -> int:
        """How many parts, 1 to `full`, of so much work each there may be beside other work."""
        room = (self.most - beside) / max(each, 1e-9)
        return int(max(1, min(full, room)))

    def some(self, count: int, each: float, full: int, beside: float = 0.0) -> tuple[int, int]:
        """Some neighbours of 0..count-1, as many as `fit`: the first and how many."""
        taken = min(self.fit(each, full, beside), int(count))
        return self.of(int(count) - taken + 1), taken


@dataclass
class Piece:
    """`takes`: for each binding runs of bytes (place in the binding, count), put together in this
    order. `shows`: how to look at an output: its type, and the part of it that the piece alone
    writes. `given`: bindings as they are instead. `work`: see Draw; 0: as many as it takes bytes.
    """

    params: npt.NDArray[np.uint32]
    push: dict[str, Any]
    takes: dict[str, list[tuple[int, int]]]
    shows: Mapping[str, Callable[[Array], Array]]
    given: dict[str, Array] = field(default_factory=dict)
    work: float = 0.0

    def __post_init__(self) -> None:
        self.work = self.work or float(self.nbytes())

    def nbytes(self, names: frozenset[str] | None = None) -> int:
        """Bytes that are copied of these bindings (None: of all)."""
        return sum(
            n for name, runs in self.takes.items() if names is None or name in names
            for _, n in runs
        )  # fmt: skip

    def copy(self, read: Read, names: frozenset[str]) -> dict[str, Array]:
        """The piece's bytes of these bindings, now."""
        out = {}
        for name in names:
            out[name] = self.given[name] if name in self.given else _joined(name, self, read)
        return out


def _joined(name: str, piece: Piece, read: Read) -> Array:
    """A binding's runs, those that lie close to each other read at once."""
    parts: list[Array] = []
    group: list[tuple[int, int]] = []

    def close() -> None:
        begin, (last, count) = group[0][0], group[-1]
        found = read(name, begin, last + count - begin)
        parts.extend(found[at - begin : at - begin + n] for at, n in group)

    for at, n in piece.takes[name]:
        if group and not 0 <= at - sum(group[-1]) <= GAP:
            close()
            group = []
        group.append((at, n))
    if group:
        close()
    return np.concatenate(parts) if parts else np.empty(0, np.uint8)
