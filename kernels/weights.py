# SPDX-License-Identifier: Apache-2.0
"""Weight matrices in the form that every backend reads as it lies: tiles of 16 rows.

The layout is in docs/architecture.md, "Weights". W is [N, K], K a multiple of 32; N is padded to 16
with rows of zeros. All functions give and take flat uint32 arrays (little-endian words).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.uint32]
Floats = npt.NDArray[np.float32]

ROWS = 16  # rows of a tile
BLOCK = 32  # elements along K that share a scale
WORDS = {"q4": 80, "q8": 144}  # of a tile and block


def nbytes(fmt: str, n: int, k: int) -> int:
    """Bytes of a packed matrix [n, k].

    Raises:
        ValueError: the format is unknown or k no multiple of 32.
    """
    if k % BLOCK or k <= 0 or n <= 0:
        raise ValueError(
            f"a matrix of {n} x {k} cannot be packed: k has to be a multiple of {BLOCK}"
        )
    tiles = -(-n // ROWS)
    if fmt == "f16":
        return tiles * ROWS * k * 2
    if fmt in WORDS:
        return tiles * (k // BLOCK) * WORDS[fmt] * 4
    raise ValueError(f"there is no weight format {fmt!r}")


def pack(fmt: str, w: npt.ArrayLike) -> Words:
    """A float matrix [N, K] in format f16, q8 or q4."""
    packers = {"f16": pack_f16, "q8": pack_q8, "q4": pack_q4}
    if fmt not in packers:
        raise ValueError(f"there is no weight format {fmt!r}")
    return packers[fmt](w)


def pack_f16(w: npt.ArrayLike) -> Words:
    """A matrix [N, K] of any float type as halves; values beyond the range of a half become the
    largest half."""
    a = np.asarray(w)
    nbytes("f16", *a.shape)
    if a.dtype != np.float16:
        a = np.clip(a, -65504.0, 65504.0).astype(np.float16)
    tiles = _pad_rows(a).reshape(-1, ROWS, a.shape[1])
    out = np.empty((len(tiles), a.shape[1], ROWS), np.float16)
    for row in range(ROWS):  # twice as fast as a copy of the transposed array
        out[:, :, row] = tiles[:, row]
    return _words(out)


def pack_q8(w: npt.ArrayLike) -> Words:
    """A float matrix [N, K], rounded to int8 with a scale (a half) for each 32 along K."""
    a = np.asarray(w, np.float32)
    n, k = a.shape
    nbytes("q8", n, k)
    blocks = a.reshape(n, k // BLOCK, BLOCK)
    scale = np.abs(blocks).max(axis=2) / np.float32(127)
    half = scale.astype(np.float16)
    quants = np.rint(blocks * _inverse(half)[:, :, None])
    return pack_q8_parts(half, np.clip(quants, -127, 127).reshape(n, k))


def pack_q8_parts(scale: npt.ArrayLike, quants: npt.ArrayLike) -> Words:
    """w = scale * q from scale [N, K/32] (stored as halves) and quants int8 [N, K]."""
    q = np.asarray(quants, np.int8)
    n, k = q.shape
    nbytes("q8", n, k)
    head = _header(scale, None, n, k // BLOCK)
    tiles = _pad_rows(q).reshape(-1, ROWS, k // BLOCK, BLOCK)
    words = _words(tiles).reshape((*tiles.shape[:3], 8))
    return _join(head, words.transpose(0, 2, 3, 1))


def pack_q4(w: npt.ArrayLike) -> Words:
    """A float matrix [N, K], rounded to 16 steps between the least and the greatest of each 32
    along K."""
    a = np.asarray(w, np.float32)
    n, k = a.shape
    nbytes("q4", n, k)
    blocks = a.reshape(n, k // BLOCK, BLOCK)
    low = blocks.min(axis=2)
    scale = ((blocks.max(axis=2) - low) / np.float32(15)).astype(np.float16)
    low = low.astype(np.float16)
    quants = np.rint((blocks - low.astype(np.float32)[:, :, None]) * _inverse(scale)[:, :, None])
    return pack_q4_parts(scale, low, np.clip(quants, 0, 15).reshape(n, k))


def pack_q4_parts(scale: npt.ArrayLike, minimum: npt.ArrayLike, quants: npt.ArrayLike) -> Words:
    """w = scale * q + minimum from scale and minimum [N, K/32] (stored as halves) and quants 0..15
    [N, K]."""
    q = np.asarray(quants, np.uint8)
    n, k = q.shape
    nbytes("q4", n, k)
    head = _header(scale, minimum, n, k // BLOCK)
    fours = _words(_pad_rows(q)).reshape(-1, ROWS, k // BLOCK, 4, 2)  # no bit leaves its byte
    words = fours[..., 0] | (fours[..., 1] << np.uint32(4))
    return _join(head, words.transpose(0, 2, 3, 1))


def unpack(fmt: str, words: npt.NDArray[Any], n: int, k: int) -> Floats:
    """The matrix [n, k] that packed words stand for, as float32."""
    flat = np.ascontiguousarray(words).reshape(-1).view(np.uint32)[: nbytes(fmt, n, k) // 4]
    if fmt == "f16":
        halves = flat.view(np.float16).reshape(-1, k, ROWS)
        return halves.transpose(0, 2, 1).reshape(-1, k)[:n].astype(np.float32)
    scale, low, quants = unpack_parts(fmt, flat, n, k)
    w = quants.reshape(n, -1, BLOCK).astype(np.float32) * scale[:, :, None] + low[:, :, None]
    return w.reshape(n, k)


def unpack_parts(
    fmt: str, words: npt.NDArray[Any], n: int, k: int
) -> tuple[Floats, Floats, npt.NDArray[np.int8]]:
    """scale [n, k/32], minimum [n, k/32] and quants [n, k] of a q4 or q8 matrix."""
    flat = np.ascontiguousarray(words).reshape(-1).view(np.uint32)[: nbytes(fmt, n, k) // 4]
    tiles = flat.reshape(-1, k // BLOCK, WORDS[fmt])
    head = np.ascontiguousarray(tiles[:, :, :ROWS]).view(np.float16)
    head = head.reshape(-1, k // BLOCK, ROWS, 2).transpose(0, 2, 1, 3).reshape(-1, k // BLOCK, 2)
    scale, low = (head[:n, :, i].astype(np.float32) for i in (0, 1))
    body = tiles[:, :, ROWS:].reshape(tiles.shape[0], k // BLOCK, -1, ROWS).transpose(0, 3, 1, 2)
    octets = np.ascontiguousarray(body).view(np.uint8)
    if fmt == "q8":
        quants = octets.reshape(-1, k).view(np.int8)
    else:
        octets = octets.reshape(-1, k // BLOCK, 4, 1, 4)
        both = np.concatenate([octets & 15, octets >> 4], axis=3)
        quants = both.reshape(-1, k).astype(np.int8)
    return scale, low, quants[:n]


def _pad_rows(a: npt.NDArray[Any]) -> npt.NDArray[Any]:
    missing = -a.shape[0] % ROWS
    return np.pad(a, ((0, missing), (0, 0))) if missing else a


def _words(a: npt.NDArray[Any]) -> Words:
    """The bytes of an array in its own order, as little-endian words."""
    return np.ascontiguousarray(a).reshape(-1).view(np.uint32)


def _inverse(scale: npt.NDArray[np.float16]) -> Floats:
    """1 / scale, 0 where a block has no range."""
    s = scale.astype(np.float32)
    return np.divide(np.float32(1), s, out=np.zeros_like(s), where=s != 0)


def _header(scale: npt.ArrayLike, minimum: npt.ArrayLike | None, n: int, blocks: int) -> Words:
    """Words half2(scale, minimum) in the order [tiles, blocks, 16]."""
    pair = np.zeros((n, blocks, 2), np.float16)
    pair[:, :, 0] = scale
    if minimum is not None:
        pair[:, :, 1] = minimum
    rows = _pad_rows(_words(pair).reshape(n, blocks))
    return rows.reshape(-1, ROWS, blocks).transpose(0, 2, 1)


def _join(head: Words, words: Words) -> Words:
    """Headers [tiles, blocks, 16] and words [tiles, blocks, j, 16], one after the other in each
    block."""
    body = words.reshape(words.shape[0], words.shape[1], -1)
    return np.concatenate([head, body], axis=2).reshape(-1)
