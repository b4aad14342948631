# SPDX-License-Identifier: Apache-2.0
"""The ranges of values between a network's layers, for bytes there (kernels/nsr_int8).

They are taken from pictures made here, so that a model needs nothing beside its weights: leaves of
every size that fell over one another, which have the edges and flat parts of photographs in their
shares (Lee, Mumford and Huang, "Occlusion models for natural images", 2001).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kernels import video
from kernels.nsr import op as nsr
from kernels.nsr_int8.op import Ranges, Skips

SIDE, PICTURES, LEAVES = 64, 6, 300


def pictures() -> list[video.F32]:
    """Luma 0..1, each SIDE x SIDE."""
    rng = np.random.default_rng(20261130)
    return [_leaves(rng) for _ in range(PICTURES)]


def _leaves(rng: np.random.Generator) -> video.F32:
    """Discs and boxes of many sizes and shades, at twice the size and made smaller; some noise."""
    y, x = np.mgrid[0 : 2 * SIDE, 0 : 2 * SIDE]
    out = np.full(x.shape, 0.5)
    for _ in range(LEAVES):
        size = 3 / max(rng.random(), 0.03) ** 0.8
        (cx, cy), angle = rng.random(2) * 2 * SIDE, rng.random() * np.pi
        dx, dy = x - cx, y - cy
        along = dx * np.cos(angle) + dy * np.sin(angle)
        across = dy * np.cos(angle) - dx * np.sin(angle)
        disc = rng.random() < 0.5
        inside = (
            np.hypot(dx, dy) < size if disc
            else np.maximum(np.abs(along), 2 * np.abs(across)) < size
        )  # fmt: skip
        shade = np.clip(rng.normal(0.45, 0.2), 0.06, 0.92)
        slant = rng.normal(0, 0.003, 2)
        out[inside] = (shade + slant[0] * dx + slant[1] * dy)[inside]
    small = out.reshape(SIDE, 2, SIDE, 2).mean((1, 3)) + rng.normal(0, 0.01, (SIDE, SIDE))
    return np.asarray(np.clip(small, 0, 1), np.float32)


def ranges(layers: Sequence[nsr.Layer], skips: Skips, share: float = 1.0) -> Ranges:
    """Least and greatest value of each channel of each layer's result but the last one's, times
    `share`: what few values lose at the ends, all others gain in finer steps.
    """
    found: list[video.F32] = []
    before: list[list[video.F32]] = []
    values = [sample[None] for sample in pictures()]
    for i, (taps, bias, slope) in enumerate(layers[:-1]):
        values = [nsr.convolved(v, taps) + bias[:, None, None] for v in values]
        if i in skips:
            source, slope = skips[i]
            inner = (slice(None), *[slice(i - source, source - i)] * 2)
            values = [v + k[inner] for v, k in zip(values, before[source], strict=True)]
        values = [nsr.activated(v, slope) for v in values]
        before.append(values)
        low = np.min([v.min((1, 2)) for v in values], 0)
        high = np.max([v.max((1, 2)) for v in values], 0)
        found.append(np.stack([low, high], 1) * np.float32(share))
    return found
