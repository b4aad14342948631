# SPDX-License-Identifier: Apache-2.0
"""Which tiles of a frame have to be computed, and which are as they were in the frame before.

A tile depends on a window of each plane (engine/video/tiles.py) and on nothing else. Of the last
frame the input is kept; a tile whose windows did not change keeps its result.

- exact: not a bit of the windows changed, so the result would be the same to the bit;
- tolerant: in every block of BLOCK x BLOCK samples the mean of the differences is at most LEVELS
  of 255, and the mean of their sizes at most NOISE times that: a camera's noise has no mean, an
  edge that moves has one. A tile is held against the input that its result was computed from, so
  that a slow change adds up until it is seen.

While everything changes from frame to frame only some rows are kept and compared, until they say
that a tile stands still; it keeps its result from the frame after the next one on.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from engine.video.frames import Bytes, FrameFormat, empty, samples

MODES = ("exact", "tolerant", "off")
BLOCK = 8
LEVELS, NOISE = 2.0, 3.0
PROBE = 16  # every so many rows are compared first: where all changed, they tell it
RESTLESS = 2  # frames in a row in which all changed, after which only those rows are kept

Flags = npt.NDArray[np.bool_]
Indices = npt.NDArray[np.int64]
_WORD = 8  # bytes that are compared at once


@dataclass(frozen=True)
class Window:
    """What the tiles of a band depend on in a plane: rows low..high-1; of tile t the columns of
    pixels from t * width - reach to (t + 1) * width + reach. Its own part are the rows begin..end-1
    and its own columns.
    """

    begin: int
    end: int
    low: int
    high: int
    width: int
    reach: int


class Unchanged:
    """The input that the tiles' results were computed from."""

    def __init__(
        self, fmt: FrameFormat, windows: Sequence[Sequence[Window]], columns: int, tolerant: bool
    ) -> None:
        """windows: for each band and plane."""
        self._format, self._windows, self._tolerant = fmt, windows, tolerant
        self._input = empty(fmt)
        self._known: Flags = np.zeros((len(windows), columns), bool)
        self._restless = 0

    @property
    def restless(self) -> bool:
        """Does everything change, and has of late?"""
        return self._restless > RESTLESS

    def forget(self) -> None:
        """No tile's result is to be used again."""
        self._known[:] = False

    def changed(self, planes: Sequence[Bytes]) -> Flags:
        """[bands, columns]: the tiles that have to be computed for a frame."""
        found = ~self._known
        if self.restless:
            if self._any_still(planes):
                self._restless = 0
            return found  # all: none is known
        for tiles, windows in zip(found, self._windows, strict=True):
            for plane, window in enumerate(windows):
                if tiles.all():
                    break
                if not self._tolerant:
                    tiles |= self._compared(planes, plane, window, PROBE)
                if not tiles.all():
                    tiles |= self._compared(planes, plane, window, 1)
        return found

    def _any_still(self, planes: Sequence[Bytes]) -> bool:
        """Is there a tile that is as it was, as far as some rows tell?"""
        for windows in self._windows:
            tiles = np.zeros(self._known.shape[1], bool)
            for plane, window in enumerate(windows):
                if not tiles.all():
                    tiles |= self._compared(planes, plane, window, PROBE)
            if not tiles.all():
                return True
        return False

    def keep(self, planes: Sequence[Bytes], computed: Flags, good: Flags) -> None:
        """A frame is done: its input stands for the results of the tiles that were computed; those
        that are not good are not to be used again.
        """
        self._restless = self._restless + 1 if computed.all() else 0
        if self.restless:
            self._known[:] = False
            for windows in self._windows:
                for plane, window in enumerate(windows):
                    rows = slice(window.low, window.high, PROBE)
                    self._input[plane][rows] = planes[plane][rows]
            return
        self._known &= ~computed
        self._known |= good
        for done, windows in zip(computed, self._windows, strict=True):
            if not done.any():
                continue
            for plane, window in enumerate(windows):
                new, old = (p[plane][window.begin : window.end] for p in (planes, self._input))
                if done.all() or not self._tolerant:  # what was not computed is equal anyway
                    old[:] = new
                    continue
                size = window.width * self._pixel(plane)
                for tile in np.flatnonzero(done):
                    old[:, tile * size : (tile + 1) * size] = new[
                        :, tile * size : (tile + 1) * size
                    ]

    def _pixel(self, plane: int) -> int:
        """Bytes of a pixel."""
        pairs = self._format.roles[plane] == "pairs"
        return self._format.sample_bytes * (2 if pairs else 1)

    def _compared(self, planes: Sequence[Bytes], plane: int, window: Window, every: int) -> Flags:
        """Which tiles of a band see a difference in a plane, in every so manieth row."""
        new, old = (p[plane][window.low : window.high : every] for p in (planes, self._input))
        width, pixel = self._format.pixels(self._format.roles[plane])[0], self._pixel(plane)
        if self._tolerant:
            unit, found = BLOCK, np.zeros(max(1, width // BLOCK), bool)
            depth, step = self._format.depth, pixel // self._format.sample_bytes
            a, b = (samples(p, width * step, depth) for p in (new, old))
            for part in range(step):
                found |= _blocks(a[:, part::step], b[:, part::step], depth)
        else:
            unit, found = _WORD // pixel, _words(new, old, width * pixel)
        if found.all():  # as in what moves: each window has some
            return np.ones(self._known.shape[1], bool)
        # Differences up to each unit: a window has one where the sum grows.
        sums = np.zeros(len(found) + 1, np.int64)
        np.cumsum(found, out=sums[1:])
        first, last = _units(window, unit, len(found), self._known.shape[1])
        different: Flags = sums[last] > sums[first]
        return different


@functools.lru_cache(maxsize=1024)
def _units(window: Window, unit: int, count: int, columns: int) -> tuple[Indices, Indices]:
    """Of a row in `count` units of so many pixels the first one that each tile's window has, and
    the one after its last.
    """
    tiles = np.arange(columns) * window.width
    first = np.clip((tiles - window.reach) // unit, 0, count - 1)
    last = np.clip(-(-(tiles + window.width + window.reach) // unit), first + 1, count)
    return first, last


def _words(new: Bytes, old: Bytes, nbytes: int) -> Flags:
    """Where the first `nbytes` of any row differ, by words of _WORD bytes."""
    whole = nbytes // _WORD
    a, b = (p.view(np.uint64)[:, :whole] for p in (new, old))
    found: Flags = (a != b).any(axis=0)
    if nbytes % _WORD:
        rest = slice(whole * _WORD, nbytes)
        found = np.append(found, (new[:, rest] != old[:, rest]).any())
    return found


def _blocks(new: npt.NDArray[Any], old: npt.NDArray[Any], depth: int) -> Flags:
    """In which columns of BLOCK samples a block differs by more than noise."""
    # Sums of a block's column fit: 15 rows at most.
    whole = np.int16 if depth == 8 else np.int32
    difference = new.astype(whole) - old
    # The last block has what is left over, too: a mean of few samples says little.
    ys, xs = (np.arange(0, max(1, n - BLOCK + 1), BLOCK) for n in difference.shape)
    counts = np.outer(
        np.diff(np.append(ys, difference.shape[0])), np.diff(np.append(xs, difference.shape[1]))
    )

    def means(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        rows = np.add.reduceat(values, ys, 0, whole).astype(np.int32)
        sums: npt.NDArray[Any] = np.add.reduceat(rows, xs, 1) / counts
        return sums

    level = LEVELS * (1 if depth == 8 else 257)
    drift, size = np.abs(means(difference)), means(np.abs(difference))
    found: Flags = ((drift > level) | (size > NOISE * level)).any(axis=0)
    return found
