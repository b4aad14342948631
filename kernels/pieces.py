# SPDX-License-Identifier: Apache-2.0
"""Pieces of a kernel call, small enough to be computed again with numpy while a device serves.

A piece is a call of the same operation on a part of the same data: some rows of a matrix, a few
tokens, one head with its keys, lines of a tile. What it reads is copied before the call, what it
writes after it, and its reference has to give the same. How large a piece is follows the time that
there is for it (`Draw`), down to what still tests the kernel: a tile of rows, a token, a line. How
each operation's is made: text_pieces.py, video_pieces.py, maps_pieces.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import numpy.typing as npt

from kernels import maps_pieces, text_pieces, video_pieces
from kernels.contract import Contract
from kernels.piece import Array, Push, Read
from kernels.piece import Draw as Draw
from kernels.piece import Piece as Piece

_MAKERS: Mapping[str, Callable[..., Piece]] = {
    **text_pieces.MAKERS,
    **video_pieces.MAKERS,
    **maps_pieces.MAKERS,
}


def piece(
    contract: Contract,
    push: Push,
    params: npt.NDArray[np.uint32],
    sizes: Mapping[str, int],
    read: Read,
    draw: Draw,
) -> Piece | None:
    """A piece of a call, chosen by chance; None when the operation has no way to make one.

    sizes: bytes of each binding; read: for what the choice depends on.
    """
    make = _MAKERS.get(contract.name)
    return make(dict(push), params.copy(), sizes, read, draw) if make else None


def wrong(got: Array, want: Array, exact: bool) -> float:
    """The share of elements that cannot be rounding. `exact`: the variant computes in float32."""
    if got.dtype == np.uint32:
        from kernels.samples import differs

        return differs(got, want)
    if got.dtype.kind == "u":
        step = 1 if got.dtype.itemsize == 1 else 16
        good = np.abs(got.astype(np.int64) - want) <= step
    else:
        x, y = got.astype(np.float64), want.astype(np.float64)
        share = 5e-3 if exact else 2e-2
        size = np.abs(y[np.isfinite(y)]).max(initial=1e-6)
        good = np.isclose(x, y, rtol=share, atol=share * float(size), equal_nan=True)
    return float(1 - good.mean()) if good.size else 0.0
