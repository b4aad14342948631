# SPDX-License-Identifier: Apache-2.0
"""GGML's k-quants taken apart: super-blocks of 256 elements in groups of 16 or 32, each group with
a scale (and minimum) of few bits that two halves a super-block stretch.

Every type stands for scale * q + minimum with one scale and minimum a group. The functions take
blocks as they lie in the file, uint8 [n, blocks, bytes], and give `Parts`. Layouts follow ggml's
`ggml-common.h`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

SUPER = 256  # elements of a block

Raw = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Parts:
    """x[n, g, i] = scale[n, g] * quants[n, g, i] + minimum[n, g] for groups g along a row."""

    scale: Floats
    minimum: Floats | None
    quants: npt.NDArray[Any]  # [n, groups, 16 or 32]

    def values(self) -> Floats:
        """The numbers, float32 [n, k]."""
        out = self.quants * self.scale[:, :, None]
        if self.minimum is not None:
            out += self.minimum[:, :, None]
        return out.reshape(len(out), -1)


def _half(raw: Raw, at: int) -> Floats:
    """The half at byte `at` of each block, [n, blocks, 1]."""
    halves: Floats = np.ascontiguousarray(raw[:, :, at : at + 2]).view("<f2").astype(np.float32)
    return halves


def _planes(raw: Raw, width: int, bits: int) -> Raw:
    """Fields of `bits` bits: in each run of `width` bytes first the lowest of all, then the next.

    [n, blocks, bytes] -> [n, blocks, elements].
    """
    shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    runs = raw.reshape(*raw.shape[:2], -1, 1, width)
    fields = runs >> shifts & np.uint8((1 << bits) - 1)
    return fields.reshape(*raw.shape[:2], -1)


def _grouped(quants: npt.NDArray[Any], group: int) -> npt.NDArray[Any]:
    return quants.reshape(len(quants), -1, group)


def _stretched(factor: Floats, steps: npt.NDArray[Any]) -> Floats:
    """A factor of each block times the few bits of each group, [n, groups of the row]."""
    out: Floats = (factor * steps).astype(np.float32).reshape(len(steps), -1)
    return out


def _six_bits(raw: Raw) -> tuple[Raw, Raw]:
    """The 8 scales and 8 minima, of 6 bits each, in the 12 bytes of Q4_K and Q5_K."""
    low, high, rest = raw[:, :, :4], raw[:, :, 4:8], raw[:, :, 8:12]
    scales = np.concatenate([low & 63, (rest & 15) | (low >> 2 & 48)], axis=2)
    minima = np.concatenate([high & 63, (rest >> 4) | (high >> 2 & 48)], axis=2)
    return scales, minima


def _q2_k(raw: Raw) -> Parts:
    scale = _stretched(_half(raw, 80), raw[:, :, :16] & 15)
    minimum = -_stretched(_half(raw, 82), raw[:, :, :16] >> 4)
    return Parts(scale, minimum, _grouped(_planes(raw[:, :, 16:80], 32, 2), 16))


def _q3_k(raw: Raw) -> Parts:
    packed = raw[:, :, 96:108]
    steps = _planes(packed[:, :, :8], 8, 4) | _planes(packed[:, :, 8:], 4, 2) << 4
    scale = _stretched(_half(raw, 108), steps.astype(np.int8) - np.int8(32))
    # A bit of the mask that is not set takes 4 away.
    above = _planes(raw[:, :, :32], 32, 1) << 2
    quants = (_planes(raw[:, :, 32:96], 32, 2) | above).astype(np.int8) - np.int8(4)
    return Parts(scale, None, _grouped(quants, 16))


def _q4_k(raw: Raw) -> Parts:
    scales, minima = _six_bits(raw[:, :, 4:16])
    quants = _planes(raw[:, :, 16:], 32, 4)
    scale = _stretched(_half(raw, 0), scales)
    return Parts(scale, -_stretched(_half(raw, 2), minima), _grouped(quants, 32))


def _q5_k(raw: Raw) -> Parts:
    scales, minima = _six_bits(raw[:, :, 4:16])
    quants = _planes(raw[:, :, 48:], 32, 4) | _planes(raw[:, :, 16:48], 32, 1) << 4
    scale = _stretched(_half(raw, 0), scales)
    return Parts(scale, -_stretched(_half(raw, 2), minima), _grouped(quants, 32))


def _q6_k(raw: Raw) -> Parts:
    quants = _planes(raw[:, :, :128], 64, 4) | _planes(raw[:, :, 128:192], 32, 2) << 4
    steps = np.ascontiguousarray(raw[:, :, 192:208]).view(np.int8)
    scale = _stretched(_half(raw, 208), steps)
    return Parts(scale, None, _grouped(quants.astype(np.int8) - np.int8(32), 16))


PARTS: Mapping[str, Callable[[Raw], Parts]] = {
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}
