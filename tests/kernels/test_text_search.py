# SPDX-License-Identifier: Apache-2.0
"""The search for steps of 4-bit weights: less error than the ends of a block give."""

from __future__ import annotations

import numpy as np

from kernels import search, weights


def error(words: weights.Words, w: np.ndarray, importance: np.ndarray) -> float:
    return float(((weights.unpack("q4", words, *w.shape) - w) ** 2 * importance).sum())


def test_it_errs_less_where_it_counts() -> None:
    rng = np.random.default_rng(0)
    w = rng.standard_normal((37, 256)).astype(np.float32)
    importance, even = rng.random(256) ** 4, np.ones(256)
    plain = weights.pack_q4(w)
    assert error(search.pack_q4(w), w, even) < 0.9 * error(plain, w, even)
    found = search.pack_q4(w, importance)
    assert error(found, w, importance) < 0.75 * error(plain, w, importance)


def test_blocks_that_are_flat_tiny_or_large() -> None:
    w = np.zeros((4, 64), np.float32)
    w[1], w[2, :32], w[3] = 1.5, 1e-7, np.linspace(-6e4, 6e4, 64)
    for importance in (None, np.r_[np.zeros(32), np.ones(32)]):
        back = weights.unpack("q4", search.pack_q4(w, importance), *w.shape)
        assert np.isfinite(back).all()
        np.testing.assert_allclose(back[:3], w[:3], atol=1e-6)
        assert np.abs(back[3] - w[3]).max() < 4e3


def test_what_four_bits_hold_stays() -> None:
    rng = np.random.default_rng(1)
    q, scale = rng.integers(0, 16, (16, 32)), np.float32(0.25)
    q[:, 0], q[:, 1] = 0, 15
    w = (q * scale - 2).astype(np.float32)
    np.testing.assert_array_equal(weights.unpack("q4", search.pack_q4(w), 16, 32), w)
