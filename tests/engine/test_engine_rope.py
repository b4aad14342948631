# SPDX-License-Identifier: Apache-2.0
"""Rotary tables: right at position 30,000 as at position 3, and the ways to stretch them."""

from __future__ import annotations

import math
from decimal import Decimal, getcontext

import numpy as np
import pytest

from engine.errors import BadModel
from engine.importers import rope

PI = Decimal("3.14159265358979323846264338327950288419716939937510582097494459")


def exact(angle: Decimal) -> tuple[float, float]:
    """Cosine and sine by Taylor's series, with 50 digits."""
    angle = angle.remainder_near(2 * PI)
    cos = sin = Decimal(0)
    term = Decimal(1)
    for n in range(60):
        value = term if n % 4 < 2 else -term
        cos, sin = (cos + value, sin) if n % 2 == 0 else (cos, sin + value)
        term = term * angle / (n + 1)
    return float(cos), float(sin)


@pytest.mark.parametrize("base", [1e4, 5e5, 1e6])
def test_position_30000(base: float) -> None:
    """Of each pair's cosine and sine the table has the nearest float32, at long positions too:
    angles in float32 would be off by up to 30,000 * 2^-25, a thousandth of a turn.
    """
    getcontext().prec = 50
    dims = 64
    made = rope.made(rope.plain(base, dims))
    table = made.table(30_001)
    for position in (3, 4096, 30_000):
        for pair in range(0, dims // 2, 3):
            want = exact(position * Decimal(base) ** (Decimal(-2 * pair) / dims))
            np.testing.assert_allclose(table[position, pair], want, rtol=0, atol=1e-7)
    # The same in float32 throughout is what the table is for.
    angles = np.float32(30_000) * np.asarray(made.freqs, np.float32)
    assert np.abs(np.cos(angles) - table[30_000, :, 0]).max() > 1e-4


def test_ways_to_stretch() -> None:
    plain = rope.plain(1e4, 32)
    np.testing.assert_allclose(rope.plain(1e4, 32, 4.0), plain / 4)
    llama3 = rope.llama3(plain, 8.0, 1.0, 4.0, 8192)
    assert llama3[0] == plain[0]
    assert llama3[-1] == pytest.approx(plain[-1] / 8)
    assert ((llama3 <= plain) & (llama3 >= plain / 8)).all()
    yarn = rope.yarn(1e4, 32, 4.0, 2048)
    assert yarn[0] == plain[0]
    assert yarn[-1] == pytest.approx(plain[-1] / 4)
    assert rope.yarn_magnitude(4.0) == pytest.approx(0.1 * math.log(4) + 1)
    assert rope.longrope_magnitude(1.0, 4096) == 1.0


def test_the_magnitude_is_in_the_table() -> None:
    table = rope.made(rope.plain(1e4, 8), 1.25).table(5)
    np.testing.assert_allclose(np.hypot(table[:, :, 0], table[:, :, 1]), 1.25, rtol=1e-6)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: rope.plain(0.5, 32),
        lambda: rope.plain(1e4, 32, 0.0),
        lambda: rope.divided(rope.plain(1e4, 8), np.array([1.0, 0.0, 1.0, 1.0])),
        lambda: rope.divided(rope.plain(1e4, 8), np.ones(3)),
        lambda: rope.llama3(rope.plain(1e4, 8), 8.0, 4.0, 1.0, 8192),
        lambda: rope.yarn(1e4, 8, 4.0, 0),
        lambda: rope.yarn(1.0, 8, 4.0, 100),
        lambda: rope.made(np.array([np.nan])),
        lambda: rope.made(np.ones(4), 1e9),
    ],
)
def test_what_makes_no_sense(wrong: object) -> None:
    with pytest.raises(BadModel, match="make"):
        wrong()  # type: ignore[operator]
