# SPDX-License-Identifier: Apache-2.0
"""Plain interpolation in numpy: what takes a tile's place when its result cannot be right, and how
that is seen.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import numpy.typing as npt

from engine.backends.library import held
from kernels import video

F32 = npt.NDArray[np.float32]
Samples = npt.NDArray[Any]
Indices = npt.NDArray[np.int64]

# Every fourth sample of every fourth row is looked at, of larger tiles every eighth or sixteenth.
STEP = 4
SPARSER = ((1 << 17, 16), (1 << 15, 8))  # from so many samples of a tile on: 512 of them are seen


def _cubic(x: float, a: float = -0.5) -> float:
    """Keys' kernel."""
    x = abs(x)
    if x <= 1:
        return (a + 2) * x**3 - (a + 3) * x**2 + 1
    return a * x**3 - 5 * a * x**2 + 8 * a * x - 4 * a if x < 2 else 0.0


def bicubic_filters(scale: int = 2, siting: str = "centre") -> F32:
    """Bicubic between sample centres as [scale^2, 5, 5] filters; phase = scale * row + column. Of
    siting left the first of the samples across lies where the large one's does.
    """
    down = [(p + 0.5) / scale - 0.5 for p in range(scale)]
    left = [p / scale - (scale - 1) / (4 * scale) for p in range(scale)]
    across = left if siting == "left" else down
    rows = np.array([[_cubic(t - 2 - o) for t in range(5)] for o in down])
    cols = np.array([[_cubic(t - 2 - o) for t in range(5)] for o in across])
    filters: F32 = np.einsum("ai,bj->abij", rows, cols).reshape(-1, 5, 5).astype(np.float32)
    return filters


def enlarge(
    plane: Samples,
    y: int,
    x: int,
    rows: int,
    cols: int,
    bits: int,
    scale: int = 2,
    siting: str = "centre",
) -> Samples:
    """Rows and columns y.., x.. of a plane [height, width], bicubic: [scale rows, scale cols]."""
    iy = video.clamped(y - 2, rows + 4, plane.shape[0])
    ix = video.clamped(x - 2, cols + 4, plane.shape[1])
    window = plane[iy[:, None], ix].astype(np.float32)
    sums = video.phases(window, bicubic_filters(scale, siting))
    return video.shuffled(video.quantise(sums, bits), scale)


@functools.lru_cache(maxsize=256)
def _grid(starts: bytes, height: int, width: int) -> tuple[int, Indices, F32, F32]:
    """A grid over the tiles of a band: every so manieth row and column; of each tile its first
    column there, how many samples it has, and how much further off their mean may be: that of few
    samples says little.
    """
    columns = np.frombuffer(starts, np.int64)
    size = height * width // len(columns)
    fit = (n for most, n in SPARSER if size >= most and not (columns % n).any())
    sparse = next(fit, STEP)
    firsts, rows, across = columns // sparse, -(-height // sparse), -(-width // sparse)
    counts = (np.diff(firsts, append=across) * rows).astype(np.float32)
    return sparse, firsts, counts, 1 + np.float32(8) / counts


def implausible(
    low: Samples, high: Samples, starts: Indices, bits: int, scale: int = 2
) -> list[int]:
    """Numbers of the tiles of a band whose result cannot be that of any network of ours.

    low: the band [rows, width]; high: its result [scale rows, scale width]; starts: first column of
    each tile, multiples of STEP. A sparse grid of results is held against a bilinear estimate; the
    mean difference, and its mean size, may be as large as some levels of 255 plus the mean steps to
    the neighbours there. Black, scrambled, shifted and inverted tiles are far outside, noise and
    text are not. NaN has become 0 before (kernels/shuffle_out).
    """
    levels = 1.0 if bits == 8 else 1 / 257
    sparse, firsts, counts, few = _grid(starts.tobytes(), *low.shape)
    mean, size_of, step = held(low, high, scale, sparse, firsts) / counts * levels
    bad = (size_of > few * (12 + step)) | (np.abs(mean) > few * (8 + step / 3))
    found: list[int] = np.flatnonzero(bad).tolist()
    return found
