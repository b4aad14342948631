# SPDX-License-Identifier: Apache-2.0
"""Rotary positions (Su et al. 2021) and the ways to stretch them over longer contexts.

A table's frequencies are turns per position of each pair, in radians; everything is computed in
float64 and rounded once, to the float32 of the table, so that position 30,000 is as right as
position 3.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from engine.errors import BadModel

MAX_DIMS = 1 << 12  # of a head

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Rope:
    """Radians per position of each pair, and what cosine and sine are multiplied with."""

    freqs: tuple[float, ...]
    magnitude: float = 1.0

    def table(self, positions: int) -> npt.NDArray[np.float32]:
        """(cos, sin) of each position and pair: f32 [positions, R/2, 2], computed as doubles."""
        angles = np.arange(positions)[:, None] * np.asarray(self.freqs)[None, :]
        return (self.magnitude * np.stack([np.cos(angles), np.sin(angles)], 2)).astype(np.float32)


def made(freqs: Floats, magnitude: float = 1.0) -> Rope:
    """A Rope of computed frequencies.

    Raises:
        BadModel: they are no numbers, or a magnitude makes no sense.
    """
    if not np.isfinite(freqs).all() or not 0 < magnitude < 100:
        raise BadModel("The model's rotary positions make no sense.")
    return Rope(tuple(float(f) for f in freqs), magnitude)


def plain(base: float, dims: int, factor: float = 1.0) -> Floats:
    """base^(-2i/R) over a factor ("linear" scaling; Chen et al. 2023).

    Raises:
        BadModel
    """
    if not 1 <= base < 1e12 or not 1e-3 < factor < 1e6:
        raise BadModel("The model's rope base or factor makes no sense.")
    if not 2 <= dims <= MAX_DIMS or dims % 2:
        raise BadModel(f"The model claims {dims} rotated elements, which makes no sense.")
    return base ** (-np.arange(0, dims, 2, dtype=np.float64) / dims) / factor


def divided(freqs: Floats, factors: Floats) -> Floats:
    """Each frequency over a factor of its own, as files hold them ("longrope", GGUF's rope_freqs).

    Raises:
        BadModel: a factor is not above 0.
    """
    if factors.shape != freqs.shape or not (factors > 1e-6).all():
        raise BadModel("The model's rope factors make no sense.")
    return freqs / factors


def llama3(freqs: Floats, factor: float, low: float, high: float, original: int) -> Floats:
    """Llama 3.1's: slow pairs over the factor, fast ones as they are, those between in between.

    Raises:
        BadModel
    """
    if not 1 <= factor < 1e6 or not 0 < low < high or original < 1:
        raise BadModel("The model's rope scaling makes no sense.")
    turns = original * freqs / (2 * np.pi)  # within the context that the model was trained for
    smooth = np.clip((turns - low) / (high - low), 0, 1)
    return (1 - smooth) * freqs / factor + smooth * freqs


def yarn(
    base: float,
    dims: int,
    factor: float,
    original: int,
    fast: float = 32.0,
    slow: float = 1.0,
) -> Floats:
    """YaRN (Peng et al. 2023): pairs that turn more than `fast` times within the original context
    stay, those that turn less than `slow` times are over the factor, a ramp lies between.

    Raises:
        BadModel
    """
    if original < 1 or not 0 < slow < fast or base <= 1:
        raise BadModel("The model's rope scaling makes no sense.")
    freqs = plain(base, dims)

    def pair(turns: float) -> float:
        return dims * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(base))

    first, last = max(0, math.floor(pair(fast))), min(dims - 1, math.ceil(pair(slow)))
    ramp = np.clip((np.arange(dims // 2) - first) / max(0.001, last - first), 0, 1)
    return freqs * (1 - ramp) + plain(base, dims, factor) * ramp


def yarn_magnitude(factor: float) -> float:
    """What YaRN multiplies queries and keys with."""
    return 0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0


def longrope_magnitude(factor: float, original: int) -> float:
    """What LongRoPE (Ding et al. 2024) multiplies queries and keys with: a function of how much
    longer the context is than the original one.
    """
    return math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 < original else 1.0
