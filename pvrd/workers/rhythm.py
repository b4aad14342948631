# SPDX-License-Identifier: Apache-2.0
"""Where in each refresh the compositor draws, and how to keep out of its way.

A compositor works on the GPU for a part of each refresh, at the same place in it. pvrd tells the
worker how long a refresh is (an agent measured it); where that part lies the worker feels: a
submission that meets another's work takes longer than it does alone. From then on nothing is
submitted that would not be done before the part begins, and nothing before it is over.

Both ends of the part move inwards by CREEP_S a refresh and back at the first touch, by more when
one follows the other: so they follow a compositor whose frames change, and a part where nobody
works any more closes within seconds. Pure: times are arguments, in seconds, CLOCK_MONOTONIC.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable

KINDS = 256  # of submissions that are remembered
RISE = 1.002  # of what a kind takes alone, a submission: a device that slows down is noticed
FELT_S, FELT = 0.15e-3, 0.04  # longer than alone by so much, and by this share of it: a touch
NOISES, MOST_NOISE_S = 2.5, 0.25e-3  # and so many times what it is when nobody else is at work
CREEP_S = 0.025e-3  # a refresh; more after each LONG of them without a touch
LONG = 12
BACK_S = 0.15e-3  # after a touch; doubles from refresh to refresh
MOST_BACK_S = 1.2e-3
NEAR_S = 1.0e-3  # of an end of the part: a touch is with that end
AIM_S, SLOP_S = 0.05e-3, 0.25e-3  # before the part: where the last one is to end, or after it
LEAST_S = 0.3e-3  # a shorter part is none
DRIFT_S = 1.6e-6  # of the refresh's length, at a touch of the begin; an eighth back without one
TRUE = 0.005  # so far from what was told the length may be
MOST = 0.8  # of a refresh: pvrd has the rest in any case
LOST = 6  # touches in a row that are near no end: the part lies elsewhere


class Rhythm:
    """See the module. Off until `pace` tells how long a refresh is."""

    def __init__(self) -> None:
        self.told = self.period = 0.0
        self.start: float | None = None  # of the part in the present refresh
        self.busy = 0.0  # how long the part is
        self._alone: OrderedDict[Hashable, float] = OrderedDict()
        self._episode: float | None = None  # begin of the first of the touches in a row
        self._stray = 0
        self._noise = 0.0  # seconds longer than alone, on the average, far from the part
        self._aimed = False  # was the wait such that the next one ends where the part begins?
        self._clear()
        self._doubled = [0, 0]  # touches in a row with the begin and with the end
        self._calm = [0, 0]  # refreshes in a row without one

    def _clear(self) -> None:
        self._touched = [False, False]
        self._seen = [False, False]  # did anything of ours run near that end?

    @property
    def on(self) -> bool:
        """Is the length of a refresh known?"""
        return self.period > 0

    def pace(self, refresh_hz: float) -> None:
        """Refreshes a second of a compositor that is at work; 0: there is none."""
        period = 1.0 / refresh_hz if refresh_hz > 0 else 0.0
        if period != self.told:
            self.start, self._episode = None, None
            self.told = self.period = period

    def alone(self, kind: Hashable) -> float:
        """What this kind of submission takes alone, 0 while that is not known."""
        return self._alone.get(kind, 0.0)

    def wait(self, now: float, need: float) -> float:
        """How long to wait before a submission that takes `need` alone."""
        if self.start is None:
            return 0.0
        start = self._turn(now)
        if start is None:
            return 0.0
        at = now - start
        if at < self.busy:
            return self.busy - at
        again = self.period + self.busy - at
        if need > self.period - self.busy:  # it never fits: at least it begins with the free part
            return 0.0 if at < self.busy + NEAR_S else again
        left = self.period - at - need
        if self._aimed and left > -SLOP_S:
            self._aimed = False
            return 0.0
        self._aimed = False
        if left < 0:
            return again
        if left < need and left > 2 * AIM_S:  # the last one: its end shows where the part begins
            self._aimed = True
            return left - AIM_S
        return 0.0

    def took(self, kind: Hashable, begin: float, end: float) -> None:
        """A submission of this kind began and was done then."""
        took = end - begin
        alone = self._alone.pop(kind, took)
        self._alone[kind] = min(took, RISE * alone)
        if len(self._alone) > KINDS:
            self._alone.popitem(last=False)
        if not self.on:
            return
        excess = took - alone
        felt = excess > max(FELT_S, FELT * alone, NOISES * self._noise)
        if self.start is None:
            self._search(begin, felt)
            return
        start = self._turn(begin)
        if start is not None:
            self._follow(begin - start, end - start, excess, felt)

    def _search(self, begin: float, felt: bool) -> None:
        """Touches in a row, from the first one's begin to that of what came after them."""
        if felt:
            self._episode = begin if self._episode is None else self._episode
            if begin - self._episode > self.period:  # two that never come to an end together
                self._found(begin, MOST * self.period)
        elif self._episode is not None:
            length = begin - self._episode
            if LEAST_S < length < self.period:
                self._found(self._episode, min(length, MOST * self.period))
            self._episode = None

    def _found(self, start: float, busy: float) -> None:
        self.start, self.busy, self._episode = start, busy, None
        self._doubled, self._calm, self._stray = [0, 0], [0, 0], 0
        self._clear()

    def _follow(self, begin: float, end: float, excess: float, felt: bool) -> None:
        """A submission from `begin` to `end`, from the part's begin on."""
        late, early = begin < self.busy + NEAR_S, end - excess > self.period - NEAR_S
        self._seen[1] |= late
        if end - excess > self.period + SLOP_S:
            return  # it could not but meet the next part: that tells of no end
        self._seen[0] |= early or end > self.period - NEAR_S
        if not (late or early):
            seen = min(max(excess, 0.0), MOST_NOISE_S)
            self._noise += 0.02 * (seen - self._noise)
        if not felt:
            self._stray = 0
            return
        if late:
            self._touch(1, excess)
        elif end > self.period - NEAR_S:
            self._touch(0, excess)
        else:
            self._stray += 1
            if self._stray >= LOST:
                self.start, self._stray = None, 0

    def _touch(self, which: int, excess: float) -> None:
        """The part begins earlier (0) or ends later (1) than was thought."""
        if self._touched[which]:
            return
        self._touched[which] = True
        self._calm[which] = 0
        back = min(BACK_S * 2.0 ** self._doubled[which], MOST_BACK_S)
        if which:
            back = min(max(back, excess), MOST_BACK_S)
        if not which:
            self._drift(-DRIFT_S * 2.0 ** self._doubled[0])
        self._doubled[which] += 1
        self._grow(which, back)

    def _drift(self, by: float) -> None:
        """A screen's 60 Hz are not quite those of our clock."""
        low, high = (1 - TRUE) * self.told, (1 + TRUE) * self.told
        self.period = min(max(self.period + by, low), high)

    def _grow(self, which: int, by: float) -> None:
        assert self.start is not None
        by = min(by, MOST * self.period - self.busy)
        self.busy += by
        if not which:
            self.start -= by

    def _turn(self, now: float) -> float | None:
        """Goes on to the refresh of `now`; without a touch both ends come nearer. The part's
        begin, None when there is none any more.
        """
        while self.start is not None and now >= self.start + self.period:
            gone = int((now - self.start) / self.period)
            self.start += gone * self.period
            for which in (0, 1):
                if self._seen[which] and not self._touched[which]:
                    self._doubled[which] = 0
                    self._calm[which] += 1
                    if not which:
                        self._drift(DRIFT_S / 8)
                    self._grow(which, -CREEP_S * (1 + self._calm[which] // LONG))
            self._clear()
            if self.busy < LEAST_S:
                self.start = None
        return self.start
