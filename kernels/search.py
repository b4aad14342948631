# SPDX-License-Identifier: Apache-2.0
"""4-bit weights with less error than the ends of a block give: a search for each block's step and
minimum.

Of some widths of the range each is tried, the best line through what it rounds to (least squares,
as in ggml's k-quants) becomes step and minimum, and what errs least is kept. Errors count by the
mean square of what a column is multiplied with (`importance`), where that is known.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from kernels import weights
from kernels.weights import BLOCK, Floats, Words

_WIDTHS = (1.0, 0.95, 0.9, 0.85, 0.8, 0.72)  # of the block's range
_MOST = 65504.0  # of a half

Array = npt.NDArray[Any]


def pack_q4(w: npt.ArrayLike, importance: npt.ArrayLike | None = None) -> Words:
    """A float matrix [N, K] in q4; importance [K]."""
    return weights.pack_q4_parts(*parts(w, importance))


def parts(
    w: npt.ArrayLike, importance: npt.ArrayLike | None = None
) -> tuple[Floats, Floats, Array]:
    """scale and minimum [N, K/32], values that halves hold, and quants 0..15 [N, K]."""
    a = np.asarray(w, np.float32)
    n, k = a.shape
    x = a.reshape(n, k // BLOCK, BLOCK)
    v = np.ones((1, k // BLOCK, BLOCK), np.float32)
    if importance is not None:
        own = np.asarray(importance, np.float32).reshape(v.shape)
        # A column that the text never used still has to be something like itself.
        v = own + np.float32(1e-3) * own.mean(axis=2, keepdims=True) + np.float32(1e-30)
    low, high = x.min(axis=2), x.max(axis=2)
    total = np.broadcast_to(v.sum(axis=2), low.shape)
    best = np.full(low.shape, np.inf, np.float32)
    scale, minimum = np.zeros_like(low), np.zeros_like(low)
    quants = np.zeros(x.shape, np.uint8)
    for width in _WIDTHS:
        begin = low + np.float32((1 - width) / 2) * (high - low)
        q = _rounded(x, (high - low) * np.float32(width / 15), begin)
        for fitted in (False, True):
            s, m = (high - low) * np.float32(width / 15), begin
            if fitted:
                vq = v * q
                ones, squares = vq.sum(axis=2), (vq * q).sum(axis=2)
                values, products = (v * x).sum(axis=2), (vq * x).sum(axis=2)
                det = total * squares - ones * ones
                flat = det <= 1e-6 * total * squares
                s = np.where(flat, 0, (total * products - ones * values) / np.where(flat, 1, det))
                m = (values - s * ones) / total
            s, m = (_half(part) for part in (s, m))
            q = _rounded(x, s, m)
            error = (v * (q * s[:, :, None] + m[:, :, None] - x) ** 2).sum(axis=2)
            better = error < best
            best = np.where(better, error, best)
            scale, minimum = np.where(better, s, scale), np.where(better, m, minimum)
            quants = np.where(better[:, :, None], q.astype(np.uint8), quants)
    return scale, minimum, quants.reshape(n, k)


def _half(x: Floats) -> Floats:
    return np.clip(x, -_MOST, _MOST).astype(np.float16).astype(np.float32)


def _rounded(x: Floats, scale: Floats, minimum: Floats) -> Floats:
    inverse = np.divide(1, scale, out=np.zeros_like(scale), where=scale != 0)
    steps: Floats = np.rint((x - minimum[:, :, None]) * inverse[:, :, None])
    return np.clip(steps, 0, 15)
