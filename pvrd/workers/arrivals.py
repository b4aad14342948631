# SPDX-License-Identifier: Apache-2.0
"""When frames of video sessions come: until the next one is due, longer work disturbs none."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from itertools import pairwise

KNOWN = 4  # times between frames that are compared
EVEN = 1.25  # times the shortest of them is the longest, where a stream has a pace
EARLY_S = 1.5e-3  # before its moment a frame is expected


class Arrivals:
    """The paces of open streams. Times are CLOCK_MONOTONIC seconds."""

    def __init__(self) -> None:
        self._came: dict[Hashable, deque[float]] = {}

    def opened(self, stream: Hashable) -> None:
        """Its frames will come; nobody knows when."""
        self._came[stream] = deque(maxlen=KNOWN + 1)

    def closed(self, stream: Hashable) -> None:
        """None will come any more; one that is not open is no error."""
        self._came.pop(stream, None)

    def came(self, stream: Hashable, now: float) -> None:
        """A frame is there."""
        self._came[stream].append(now)

    def calm(self, now: float) -> float:
        """Seconds from now on in which no frame is expected of any stream; 0 where one could come
        at any time.
        """
        return max(0.0, min((_next(came) for came in self._came.values()), default=0.0) - now)


def _next(came: deque[float]) -> float:
    """From when on the next frame is expected, 0: nobody knows."""
    if len(came) <= KNOWN:
        return 0.0
    between = [b - a for a, b in pairwise(came)]
    shortest = min(between)
    return came[-1] + shortest - EARLY_S if max(between) <= EVEN * shortest else 0.0
