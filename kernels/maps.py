# SPDX-License-Identifier: Apache-2.0
"""Feature maps of general convolutional networks: how they lie, and what their operations share.

The maps of a value lie in blocks of `lanes` channels (16, or 4 for values of at most 4 channels):
[block][row][x][lane] float32. Around the h x w samples of a map is a border of zeros that no
operation writes: what a convolution with zero padding reads there. `xs` is the distance of rows and
`ps` that of blocks, both in pixels, `origin` the pixel of sample (0, 0). Behind the last sample
to the right and below lie as many zeros as make the sides multiples of 4 and the border once more.
Channels that fill up the last block are zero or of no account (their weights are zero).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kernels.contract import Groups, Variant, Word, ceil_div

Array = npt.NDArray[Any]
F32 = npt.NDArray[np.float32]
Push = Mapping[str, Any]

WIDE, THIN = 16, 4  # lanes
GEOMETRY = ("w", "h", "xs", "ps", "origin")  # push constants that say how maps lie
SLACK = 64  # pixels behind the last block, read by the last vectors of a row

# What follows a sum: PReLU (ReLU, LeakyReLU and none are slopes 0, a and 1), x * sigmoid(x),
# sigmoid(x), and (x + r) * (sigmoid(x) - 1/2) with the residual r, the gate of SPAN's blocks.
SLOPE, SILU, SIGMOID, GATE = range(4)

# Words of the parameter buffer, in samples of the network's input: where the window lies in the
# frame, and the part of the frame (end exclusive) that the slice writes.
X0, Y0, CORE_X0, CORE_Y0, CORE_X1, CORE_Y1 = range(4, 10)


@dataclass(frozen=True)
class Geometry:
    """How maps of h rows of w samples lie, with a border of so many zeros."""

    w: int
    h: int
    border: int

    @property
    def xs(self) -> int:
        return ceil_div(self.w, 4) * 4 + 2 * self.border

    @property
    def ps(self) -> int:
        """A multiple of 16 pixels, so that each block begins where a binding may."""
        return ceil_div((ceil_div(self.h, 4) * 4 + 2 * self.border) * self.xs, 16) * 16

    @property
    def origin(self) -> int:
        return self.border * (self.xs + 1)

    def push(self, prefix: str = "") -> dict[str, int]:
        """The push constants of an operation."""
        return {prefix + name: int(getattr(self, name)) for name in GEOMETRY}

    def nbytes(self, blocks: int, lanes: int) -> int:
        """Bytes of a buffer for so many blocks."""
        return 4 * lanes * (blocks * self.ps + SLACK)


def geometry(prefix: str = "") -> tuple[tuple[str, Word], ...]:
    """Push constants for a Geometry, as a contract lists them; Geometry.push gives the values."""
    return tuple((prefix + name, "u32") for name in GEOMETRY)


def view(buffer: Array, blocks: int, lanes: int, push: Push, prefix: str = "") -> F32:
    """The samples of a value's maps, [blocks, h, w, lanes], a view; `prefix` is that of the push
    constants with its geometry.
    """
    w, h, xs, ps, origin = (int(push[prefix + k]) for k in GEOMETRY)
    flat = buffer.reshape(-1).view(np.float32)[origin * lanes :]
    return np.lib.stride_tricks.as_strided(
        flat, (blocks, h, w, lanes), (4 * ps * lanes, 4 * xs * lanes, 4 * lanes, 4)
    )


def activated(act: int, x: F32, slope: F32 | float, residual: F32 | float) -> Array:
    """A sum's activation, in float32."""
    if act == SLOPE:
        return np.where(x > 0, x, slope * x)
    gate = 1 / (1 + np.exp(-np.clip(x, -87, 87)))
    if act == SILU:
        return x * gate
    return gate if act == SIGMOID else (x + residual) * (gate - np.float32(0.5))


def groups_of_pixels(pixels: int) -> Any:
    """Dispatch sizes of an operation whose invocations do `pixels` of a row and 4 lanes."""

    def groups(push: Push, variant: Variant) -> Groups:
        across = ceil_div(ceil_div(push["w"], pixels), variant.workgroup[0])
        return across, push["h"], push["blocks"] * push["lanes"] // 4

    return groups
