# SPDX-License-Identifier: Apache-2.0
"""What decoders compute between their products, with numpy, for the importer of ONNX to compare
with. Arrays are float32 or float64; tokens come first.
"""

from __future__ import annotations

import math

import numpy as np

from engine.importers import rope
from engine.importers.onnx_wire import Array

CLOSE = 2e-3  # of what is computed twice, in parts of the greatest


def close(a: Array, b: Array) -> bool:
    """Whether two arrays of as many numbers are the same but for rounding."""
    if a.size != b.size:
        return False
    b = b.reshape(a.shape)
    return bool(np.abs(a - b).max() <= CLOSE * max(1e-6, float(np.abs(b).max())))


def rounded(eps: float) -> float:
    """A float32's number as people write it."""
    return float(f"{eps:.6g}")


def exact(freqs: Array) -> Array:
    """Frequencies that float32 has rounded, as the powers of a base when they are that."""
    if len(freqs) > 1 and 0 < freqs[1] < 1:
        base = float(f"{freqs[1] ** -len(freqs):.5g}")
        powers = rope.plain(base, 2 * len(freqs)) if 1 <= base < 1e12 else freqs
        if np.allclose(powers, freqs, rtol=1e-5):
            return powers
    return freqs


def silu(x: Array) -> Array:
    """x times its logistic function."""
    return np.asarray(x / (1 + np.exp(-x)))


def gelu(x: Array) -> Array:
    """GELU by tanh."""
    return np.asarray(0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))))


def rotated(x: Array, table: Array) -> Array:
    """Pairs of halves, turned."""
    half = table.shape[1]
    cos, sin = table[:, None, :, 0], table[:, None, :, 1]
    a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return np.concatenate([a * cos - b * sin, a * sin + b * cos, rest], axis=-1)


def attend(q: Array, k: Array, v: Array, scale: float, window: int) -> Array:
    """Attention of each token over itself and those before it."""
    each = q.shape[1] // k.shape[1]
    k, v = (np.repeat(x, each, axis=1) for x in (k, v))
    scores = np.einsum("qhd,khd->hqk", q, k) * scale
    at = np.arange(len(q))
    behind = at[:, None] - at[None, :]
    seen = (behind >= 0) & (behind < (window or len(q)))
    scores = np.where(seen, scores, -np.inf)
    share = np.exp(scores - scores.max(axis=-1, keepdims=True))
    share /= share.sum(axis=-1, keepdims=True)
    return np.asarray(np.einsum("hqk,khd->qhd", share, v))
