# SPDX-License-Identifier: Apache-2.0
"""What a piece of a kernel call is (kernels/pieces.py makes them)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
# Bytes of a binding as they are now: name, first byte, count (less where the binding ends before).
Read = Callable[[str, int, int], Array]


@dataclass
class Piece:
    """`takes`: for each binding runs of bytes (place in the binding, count), put together in this
    order. `shows`: how to look at an output: its type, and the part of it that the piece alone
    writes.
    """

    params: npt.NDArray[np.uint32]
    push: dict[str, Any]
    takes: dict[str, list[tuple[int, int]]]
    shows: Mapping[str, Callable[[Array], Array]]
    given: dict[str, Array] = field(default_factory=dict)

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
            if name in self.given:
                out[name] = self.given[name]
            else:
                runs = [read(name, at, n) for at, n in self.takes[name]]
                out[name] = np.concatenate(runs) if len(runs) > 1 else runs[0].copy()
        return out
