# SPDX-License-Identifier: Apache-2.0
"""The packed layout, element by element, and what packing loses."""

from __future__ import annotations

import numpy as np
import pytest

from kernels import weights


def test_q4_words_lie_where_the_document_says() -> None:
    rng = np.random.default_rng(1)
    n, k = 21, 96
    scale, low = (rng.normal(size=(n, 3)).astype(np.float16) for _ in range(2))
    quants = rng.integers(0, 16, (n, k), dtype=np.uint8)
    words = weights.pack_q4_parts(scale, low, quants)
    assert words.nbytes == weights.nbytes("q4", n, k)
    for row, col in ((0, 0), (3, 31), (15, 32), (16, 5), (20, 95), (9, 44)):
        at = ((row // 16) * 3 + col // 32) * 80
        head = int(words[at + row % 16])
        assert head & 0xFFFF == scale[row, col // 32].view(np.uint16)
        assert head >> 16 == low[row, col // 32].view(np.uint16)
        j, i = col % 32 // 8, col % 8
        word = int(words[at + 16 + j * 16 + row % 16])
        assert word >> (8 * (i % 4) + 4 * (i // 4)) & 15 == quants[row, col]
    tail = words.reshape(2, 3, 80)[1].reshape(3, 5, 16)
    assert not tail[:, :, 5:].any(), "rows past n are zeros"


def test_q8_words_lie_where_the_document_says() -> None:
    rng = np.random.default_rng(2)
    n, k = 17, 64
    scale = rng.normal(size=(n, 2)).astype(np.float16)
    quants = rng.integers(-128, 128, (n, k)).astype(np.int8)
    words = weights.pack_q8_parts(scale, quants)
    assert words.nbytes == weights.nbytes("q8", n, k)
    octets = words.view(np.int8)
    for row, col in ((0, 0), (16, 63), (15, 33), (7, 30)):
        at = ((row // 16) * 2 + col // 32) * 144
        assert words[at + row % 16] == scale[row, col // 32].view(np.uint16)
        word = at + 16 + col % 32 // 4 * 16 + row % 16
        assert octets[word * 4 + col % 4] == quants[row, col]


def test_f16_words_lie_where_the_document_says() -> None:
    w = np.random.default_rng(3).normal(size=(18, 32)).astype(np.float16)
    words = weights.pack_f16(w)
    assert words.nbytes == weights.nbytes("f16", 18, 32)
    for row, col in ((0, 0), (17, 31), (15, 3), (16, 4)):
        word = int(words[((row // 16) * 32 + col) * 8 + row % 16 // 2])
        assert word >> (16 * (row & 1)) & 0xFFFF == w[row, col].view(np.uint16)


@pytest.mark.parametrize(("n", "k"), [(1, 32), (16, 64), (33, 96)])
def test_parts_come_back(n: int, k: int) -> None:
    rng = np.random.default_rng(n)
    scale, low = (rng.normal(size=(n, k // 32)).astype(np.float16) for _ in range(2))
    q4 = rng.integers(0, 16, (n, k), dtype=np.uint8)
    got = weights.unpack_parts("q4", weights.pack_q4_parts(scale, low, q4), n, k)
    for a, b in zip(got, (scale, low, q4), strict=True):
        np.testing.assert_array_equal(a, b)
    q8 = rng.integers(-128, 128, (n, k)).astype(np.int8)
    got = weights.unpack_parts("q8", weights.pack_q8_parts(scale, q8), n, k)
    np.testing.assert_array_equal(got[0], scale)
    np.testing.assert_array_equal(got[2], q8)
    np.testing.assert_array_equal(
        weights.unpack("q8", weights.pack_q8_parts(scale, q8), n, k),
        np.repeat(scale.astype(np.float32), 32, axis=1) * q8,
    )


@pytest.mark.parametrize("fmt", ["f16", "q8", "q4"])
def test_packing_rounds_to_the_nearest_step(fmt: str) -> None:
    w = np.random.default_rng(5).normal(size=(40, 128)).astype(np.float32)
    w[3, :32] = 0
    w[4, :32] = 0.25
    got = weights.unpack(fmt, weights.pack(fmt, w), *w.shape)
    blocks = w.reshape(40, 4, 32)
    span = {
        "f16": np.full((40, 4), 1e-3),
        "q8": np.abs(blocks).max(axis=2) / 127,
        "q4": (blocks.max(axis=2) - blocks.min(axis=2)) / 15,
    }[fmt]
    # Half a step, and what rounding scale and minimum to halves adds.
    bound = np.repeat(span * 0.5 + np.abs(blocks).max(axis=2) * 2e-3, 32, axis=1)
    assert (np.abs(got - w) <= bound + 1e-6).all()
    assert not got[3, :32].any()
    np.testing.assert_allclose(got[4, :32], 0.25, rtol=1e-2)


def test_what_cannot_be_packed_is_refused() -> None:
    with pytest.raises(ValueError, match="multiple of 32"):
        weights.pack_q8(np.zeros((4, 40), np.float32))
    with pytest.raises(ValueError, match="'q5'"):
        weights.pack("q5", np.zeros((4, 32), np.float32))
    with pytest.raises(ValueError, match="'q5'"):
        weights.nbytes("q5", 4, 32)
