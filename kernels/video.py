# SPDX-License-Identifier: Apache-2.0
"""What the video operations share: the words of the parameter buffer, and numpy forms of packed
samples.

A frame passes in bands of rows. A band's input buffer holds whole rows of a plane (with the rows
above and below that the filters need, as far as the frame has them), 8-bit or little-endian 16-bit
samples in u32 words; its output buffer the rows of the enlarged plane in the same form. Tiles cut a
band into columns; a slice does `N_TILES` of them, from column `COL0`. Outside of the frame its
border samples repeat.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from kernels.contract import Groups, Variant, ceil_div

Array = npt.NDArray[Any]
F32 = npt.NDArray[np.float32]

# Words of the parameter buffer; the first is N_TOKENS of the contract.
N_TILES = 0
TILE = 1  # pixels of a tile; no operation reads it, it tells kinds of slices apart
WIDTH, HEIGHT = 4, 5  # of the luma plane
BAND_Y, SRC_Y = 6, 7  # frame row of the band's first core row, and of its input buffer's first row
COL0 = 8  # the first tile column of the slice
C_WIDTH, C_HEIGHT, C_BAND_Y, C_SRC_Y = 9, 10, 11, 12  # the same for chroma
C_ROWS = 13  # rows of the band


def samples(words: Array, bits: int) -> Array:
    """Packed words as samples, a view."""
    return words.reshape(-1).view(np.uint8 if bits == 8 else np.dtype("<u2"))


def floats(words: Array) -> F32:
    """A buffer as float32, a view."""
    return words.reshape(-1).view(np.float32)


def groups_of_rows(push: Mapping[str, Any], variant: Variant) -> Groups:
    """Groups of what writes padded tiles, four samples of a row an invocation."""
    rows = push["th"] + 2 * push["halo"]
    return ceil_div(push["xs"] // 4, variant.workgroup[0]), rows, push["tokens"]


def clamped(at: int, count: int, size: int) -> npt.NDArray[np.int64]:
    """Indices at..at+count-1, held to 0..size-1: what lies outside repeats the border."""
    return np.clip(np.arange(at, at + count), 0, size - 1)


def quantise(x: F32, bits: int) -> Array:
    """Samples of values on the sample scale: rounded half up, held to the range, NaN gives 0."""
    top = np.float32((1 << bits) - 1)
    y = np.floor(np.minimum(np.where(x > 0, x, np.float32(0)) + np.float32(0.5), top))
    return y.astype(np.uint8 if bits == 8 else np.dtype("<u2"))


def phases(window: F32, filters: F32) -> F32:
    """[rows + 4, cols + 4] filtered with [n, 5, 5] to [n, rows, cols]."""
    rows, cols = window.shape[0] - 4, window.shape[1] - 4
    out = np.zeros((len(filters), rows, cols), np.float32)
    for dy in range(5):
        for dx in range(5):
            out += filters[:, dy, dx, None, None] * window[dy : dy + rows, dx : dx + cols]
    return out


def shuffled(maps: Array, scale: int) -> Array:
    """[scale^2, rows, cols] to [scale rows, scale cols]; map scale * a + b has samples (scale y +
    a, scale x + b).
    """
    rows, cols = maps.shape[1:]
    parts = maps.reshape(scale, scale, rows, cols)
    return parts.transpose(2, 0, 3, 1).reshape(scale * rows, scale * cols)
