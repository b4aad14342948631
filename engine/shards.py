# SPDX-License-Identifier: Apache-2.0
"""Weights in shards: pieces that a device can bind and its grid can hold."""

from __future__ import annotations

import math
from collections.abc import Iterator

from engine.backends.base import Limits
from engine.errors import OutOfMemory
from engine.graph import Weight
from engine.program import Binding
from kernels import weights as packing

# Shards begin at a multiple of four tiles: a multiple of 256 bytes in every format.
SHARD_ROWS = 4 * packing.ROWS

# Rows of a matrix that a workgroup takes at least, in every variant that has them on one axis.
GROUP_ROWS = 32


def weight_nbytes(w: Weight) -> int:
    """Bytes of a weight as kernels read it."""
    if w.layout == "rows":
        return w.shape[0] * w.shape[1] * 4
    return packing.nbytes(w.format, *w.shape)


def matrix_shards(w: Weight, limits: Limits, cut: int = 0) -> Iterator[tuple[Binding, int, int]]:
    """(binding, first row, rows) of each shard of a matrix. One begins at the row `cut`, or as
    little before it as a shard can.

    Raises:
        OutOfMemory: not even the smallest shard can be bound.
    """
    tile = weight_nbytes(w) // -(-w.shape[0] // packing.ROWS)
    most = limits.max_storage_range // (4 * tile) * SHARD_ROWS
    if most == 0:
        raise OutOfMemory(f"64 rows of the matrix {w.name} are larger than the device can bind.")
    grid = limits.max_workgroup_count[0] * GROUP_ROWS // SHARD_ROWS * SHARD_ROWS
    most = min(most, max(grid, SHARD_ROWS))
    cut = cut // SHARD_ROWS * SHARD_ROWS if 0 < cut < w.shape[0] else 0
    if w.shape[0] <= most and not cut:
        yield Binding(w.name), 0, w.shape[0]
        return
    for begin, end in ((0, cut), (cut, w.shape[0])):
        for row in range(begin, end, most):
            rows = min(most, end - row)
            nbytes = -(-rows // packing.ROWS) * tile
            yield Binding(w.name, row // packing.ROWS * tile, nbytes), row, rows


def expert_shards(w: Weight, count: int, limits: Limits) -> Iterator[tuple[Binding, int, int]]:
    """(binding, first expert, experts) of each shard of a stack of `count` experts' matrices, cut
    between experts where the device cannot bind it all.

    Raises:
        OutOfMemory: not even the smallest shard can be bound.
    """
    one = weight_nbytes(w) // count
    # Each shard begins at a multiple of 256 bytes.
    step = 256 // math.gcd(one, 256)
    most = min(count, limits.max_storage_range // one)
    if most < count:
        most = most // step * step
    if most == 0:
        raise OutOfMemory(f"An expert of the matrix {w.name} is larger than the device can bind.")
    for first in range(0, count, most):
        held = min(most, count - first)
        whole = held == count
        binding = Binding(w.name) if whole else Binding(w.name, first * one, held * one)
        yield binding, first, held
