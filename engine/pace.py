# SPDX-License-Identifier: Apache-2.0
"""How much goes into one slice, so that it stays within the time that slices may take.

A process works on one device in one thread, so what slices may take is the process's: LIMIT, which
a worker sets as pvrd tells it. Where nothing is set a slice is as large as its program allows.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field

MARGIN = 0.9  # of the time is aimed at


@dataclass
class Limit:
    """slice_s: the longest slice, 0 where any will do; scale: 0..1 of what a slice takes in;
    streams: how many there are whose work comes by deadlines.
    """

    slice_s: float = 0.0
    scale: float = 1.0
    streams: int = 0


LIMIT = Limit()


@dataclass
class Aside:
    """What the process spends beside its work: on computing samples of it again."""

    seconds: float = 0.0
    _lately: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=64))

    def add(self, seconds: float) -> None:
        """So much until now."""
        self.seconds += seconds
        self._lately.append((time.monotonic(), seconds))

    def since(self, then: float) -> float:
        """Of late, what was not over yet then (CLOCK_MONOTONIC seconds)."""
        return sum((min(s, ended - then) for ended, s in self._lately if ended > then), 0.0)


ASIDE = Aside()
TURN = Aside()  # waits for a turn on the device, within a slice


def clock() -> float:
    """Seconds as of time.perf_counter, but it stands still during ASIDE: for what work takes."""
    return time.perf_counter() - ASIDE.seconds


def device_clock() -> float:
    """As `clock`, and it stands still during TURN: for what a device takes for work."""
    return clock() - TURN.seconds


class Fit:
    """How many tokens, tiles or parts fit into a slice. It begins with `least`, which is never too
    much, doubles while there is time, and comes back at once when a slice was too long.

    Where `least` alone takes longer than a slice may, smaller slices are not to be had, and many of
    them would only cost: then a slice may take `over` times as long as that.
    """

    def __init__(self, least: int = 1, over: float = 1.0) -> None:
        self._least, self._over = least, over
        self._fits = least
        self._least_s = 0.0  # that `least` takes

    def most(self, full: int) -> int:
        """Of `full` that a slice can take in."""
        most = min(full, max(self._least, int(full * LIMIT.scale)))
        return max(1, min(most, self._fits) if LIMIT.slice_s else most)

    def took(self, count: int, seconds: float) -> None:
        """A slice of so many took so long."""
        if not LIMIT.slice_s or seconds <= 0:
            return
        if count <= self._least:
            self._least_s = min(seconds, 1.1 * (self._least_s or seconds))
        bound = max(LIMIT.slice_s, self._over * self._least_s if self._over > 1 else 0.0)
        fits = int(count * MARGIN * bound / seconds)
        if seconds > bound:
            self._fits = max(self._least, min(self._fits, fits))
        elif count >= self._fits:
            self._fits = max(count, min(2 * count, fits))
