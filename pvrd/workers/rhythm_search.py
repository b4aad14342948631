# SPDX-License-Identifier: Apache-2.0
"""Where in a refresh somebody else works, from what submissions felt: the part that explains best
what was seen lately, by trying all on a grid.

What a part should explain: a submission that took as long as alone did not meet it; one that took
longer met it, for about as long as it took longer (a device that takes turns: up to twice that).
Each fault counts up to WORST, so that a few hiccups of a machine decide nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

MOST = 0.8  # of a refresh: a longer part is not looked for
MOST_SEEN = 64  # submissions that are compared, all touches among them
CELLS = 64  # places of the part's begin, and lengths, in a refresh
UNIT_S, WORST = 0.2e-3, 5.0  # a fault of so many seconds counts one; what a submission counts
ALL = 0.8  # of the submissions: so many touches tell of no place
POOR = 0.3  # of the worst that could be: nothing is explained
CLOSE = 0.5  # parts that are as good as the best

Floats = npt.NDArray[Any]


def find(seen: Sequence[tuple[float, float, float]], period: float) -> tuple[float, float] | None:
    """The part's begin, in the refresh in which the first submission began, and its length.

    Args:
        seen: submissions: begin, end, and how much longer than alone they took, 0 for no longer.
            Seconds, in order.
        period: seconds of a refresh.

    Returns:
        None when nothing explains them.
    """
    data = _chosen(np.array(seen))
    origin, excess = float(data[0, 0]), data[:, 2]
    begin = (data[:, 0] - origin) % period
    end = begin + data[:, 1] - data[:, 0]
    if (excess > 0).mean() > ALL:
        return None
    cell = period / CELLS
    starts = (np.arange(CELLS) * cell)[:, None, None]
    lengths = (np.arange(1, int(MOST * CELLS) + 1) * cell)[None, :, None]
    loss = _loss(begin, end, excess, starts, lengths, period)
    best = loss.min()
    if best > POOR * WORST * len(data):
        return None
    # Of those that are as good a short one, since one that is too short is felt at once; and of
    # its places the middle.
    good = np.argwhere(loss <= best + CLOSE)
    ranked = np.sort(good[:, 1])
    length = int(ranked[len(ranked) // 4])
    turns = np.exp(2j * np.pi * good[good[:, 1] == length][:, 0] / CELLS).mean()
    at = float(np.angle(turns) / (2 * np.pi)) % 1.0 * period
    return origin + at, (length + 1) * cell


def _chosen(data: Floats) -> Floats:
    """All touches and some of the rest, evenly."""
    if len(data) <= MOST_SEEN:
        return data
    felt = np.flatnonzero(data[:, 2] > 0)[-MOST_SEEN:]
    rest = np.flatnonzero(data[:, 2] <= 0)
    room = max(MOST_SEEN - len(felt), MOST_SEEN // 2)
    rest = rest[:: -(-len(rest) // room)] if len(rest) else rest
    chosen: Floats = data[np.sort(np.concatenate([felt, rest]))]
    return chosen


def _loss(
    begin: Floats, end: Floats, excess: Floats, starts: Floats, lengths: Floats, period: float
) -> Floats:
    """The faults of each part: (starts, lengths)."""
    met = np.zeros(1)  # seconds that each submission and each part have in common
    for turn in (-1, 0, 1, 2):
        first = starts + turn * period
        both = np.minimum(end, first + lengths) - np.maximum(begin, first)
        met = met + np.clip(both, 0.0, None)
    missed = np.where(met > 0, 0.0, WORST)
    short = np.clip(excess - met - UNIT_S, 0.0, None) / UNIT_S
    long = np.clip(met - 2 * excess - UNIT_S, 0.0, None) / UNIT_S
    touched = np.maximum(missed, np.minimum(np.maximum(short, long), WORST))
    faults: Floats = np.where(excess > 0, touched, np.minimum(met / UNIT_S, WORST))
    out: Floats = np.add.reduce(faults, axis=2)
    return out
