# SPDX-License-Identifier: Apache-2.0
"""KV caches as kernels keep them, in one of two formats.

A cache is K or V of one layer: rows [Hk, ctx] of `dim` elements, dim a multiple of 4. `f16`:
halves, row after row. `q8`: int8 [Hk, ctx, dim], then the scales of all rows: a half for each 32
elements of a row (the last may be fewer), an even count of them. A scale is the greatest magnitude
/ 127, at least 2^-14, rounded up to a half: then every device rounds it alike, and no element
passes 127.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from kernels.contract import Variant, ceil_div
from kernels.text import view

Array = npt.NDArray[Any]
FORMATS = ("f16", "q8")
MAX_DIM = 256  # of a row
BLOCK = 32  # elements with a scale of their own
_LEAST = np.float32(2.0**-14)

ADDRESS = frozenset({"buffer_address"})
DEFINES = {"f16": {}, "q8": {"KV_Q8": "1"}}


def addressed(variant: Variant) -> Variant:
    """The form of a variant that reaches the bindings kc and vc by their addresses."""
    return replace(
        variant,
        name=f"{variant.name}_address",
        defines={**variant.defines, "KV_ADDRESS": "1"},
        needs=variant.needs | ADDRESS,
        baseline=False,
        addressed=("kc", "vc"),
    )


def scale_halves(dim: int) -> int:
    """Halves that a row's scales take."""
    return 2 * ceil_div(ceil_div(dim, BLOCK), 2)


def row_nbytes(fmt: str, dim: int) -> int:
    """Bytes of a row, with its scales."""
    return 2 * dim if fmt == "f16" else dim + 2 * scale_halves(dim)


def nbytes(fmt: str, kv_heads: int, ctx: int, dim: int) -> int:
    """Bytes of a cache."""
    return kv_heads * ctx * row_nbytes(fmt, dim)


def runs(
    fmt: str, shape: tuple[int, int, int], heads: range, first: int, count: int
) -> list[tuple[int, int]]:
    """Runs of bytes (place, count) of a cache of `shape` (Hk, ctx, dim) that make up a cache of
    `count` positions from `first` on, for some heads.
    """
    kv_heads, ctx, dim = shape
    planes = [(0, 2 * dim)]
    if fmt != "f16":
        planes = [(0, dim), (kv_heads * ctx * dim, 2 * scale_halves(dim))]
    return [
        (start + each * (head * ctx + first), each * count)
        for start, each in planes
        for head in heads
    ]


def _q8(cache: Array, shape: tuple[int, int, int]) -> tuple[Array, Array]:
    """Views of the int8 and of the scales of a cache."""
    kv_heads, ctx, dim = shape
    flat, end, halves = view(cache, np.int8), kv_heads * ctx * dim, scale_halves(dim)
    scales = flat[end : end + kv_heads * ctx * 2 * halves].view(np.float16)
    return flat[:end].reshape(shape), scales.reshape(kv_heads, ctx, halves)


def load(fmt: str, cache: Array, shape: tuple[int, int, int]) -> Array:
    """What a cache holds, float64 [Hk, ctx, dim]."""
    if fmt == "f16":
        halves = view(cache, np.float16)[: shape[0] * shape[1] * shape[2]]
        return halves.reshape(shape).astype(np.float64)
    data, scales = _q8(cache, shape)
    each = np.repeat(scales.astype(np.float64), BLOCK, axis=2)[..., : shape[2]]
    return data * each


def quantise(rows: Array) -> tuple[Array, Array]:
    """Rows f32 [..., dim] as int8 and their scales, a half for each block."""
    dim = rows.shape[-1]
    pad = [(0, 0)] * (rows.ndim - 1) + [(0, -dim % (2 * BLOCK))]
    blocks = np.pad(rows.astype(np.float32), pad).reshape(*rows.shape[:-1], -1, BLOCK)
    scale = np.maximum(np.abs(blocks).max(axis=-1) * np.float32(1 / 127), _LEAST)
    bits = (scale.view(np.uint32) + np.uint32(0x1FFF)) & np.uint32(0xFFFFE000)
    scale = bits.view(np.float32)
    q = np.rint(blocks * (np.float32(1) / scale)[..., None]).astype(np.int8)
    return q.reshape(*rows.shape[:-1], -1)[..., :dim], scale.astype(np.float16)


def store(fmt: str, cache: Array, shape: tuple[int, int, int], pos: int, rows: Array) -> None:
    """Writes a position's rows f32 [Hk, dim] into a cache."""
    if fmt == "f16":
        halves = view(cache, np.float16)[: shape[0] * shape[1] * shape[2]]
        halves.reshape(shape)[:, pos] = rows
        return
    data, scales = _q8(cache, shape)
    data[:, pos], scales[:, pos] = quantise(rows)
