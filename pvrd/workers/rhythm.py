# SPDX-License-Identifier: Apache-2.0
"""Where in each refresh the compositor draws, and how to keep out of its way.

A compositor works on the GPU for a part of each refresh, at the same place in it. pvrd tells the
worker how long a refresh is (an agent measured it); where that part lies the worker feels: a
submission that meets another's work takes longer than it does alone. From what was felt the part is
found (rhythm_search.py); from then on nothing is submitted that would not be done before the part
begins, and nothing before it is over.

Both ends of the part move inwards, by CREEP_S in each refresh that probes, and back at a touch, by
more when one follows the other: so they follow a compositor whose frames change, and a part where
nobody works any more closes within seconds. Where the ends are known few refreshes probe and the
others keep a margin: a touch costs the compositor's frame about a millisecond, and a device that
finishes what it began (an H200 up to 0.7 ms of it) does not let us feel that we were late. Touches
that go on for LOST refreshes say that the part lies elsewhere: it is searched anew.

Pure: times are arguments, in seconds, CLOCK_MONOTONIC.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Hashable

from pvrd.workers import rhythm_search
from pvrd.workers.rhythm_search import MOST

KINDS = 4096  # of submissions that are remembered
# After such pauses a device wakes up first, or turns from somebody else to us: kinds of their own;
# and what that takes at most.
PAUSES_S, WAKE_S = (0.4e-3, 2e-3), (0.0, 0.2e-3, 0.35e-3)
AFTER = range(len(WAKE_S))
RISE = 1.0003  # of what a kind takes alone, a submission: a device that slows down is noticed
FELT_S, FELT = 0.15e-3, 0.04  # longer than alone by so much, and by this share of it: a touch
RANK, STEP_S = 0.95, 0.01e-3  # the quantile of that far from the part, and how it is followed
NOISES, MOST_NOISE_S = 1.6, 0.35e-3  # so many times that is a touch; the most that it is
FULL, LITTLE = 0.7, 0.2  # of the longest touch since the search: met all of it, or little
SPAN, MOST_SEEN = 8, 1024  # refreshes, and submissions of them, that a search is of
FEW = 4  # touches, and refreshes, before it
PROBE = 12  # of so many refreshes one goes to the ends that are known
MARGIN_S = 0.15e-3, 0.05e-3  # that the others keep to the part's begin and end
CREEP_S = 0.05e-3  # at a probe; more after each LONG of them without a touch
LONG = 24, 8  # after so many, too, every refresh probes: an end that is late costs a frame less
BACK_S = 0.7e-3, 0.15e-3  # after a touch; doubles from probe to probe
MOST_BACK_S = 1.5e-3, 0.5e-3
NEAR_S = 1.0e-3  # of an end of the part: a touch is with that end
AIM_S, SLOP_S = 0.05e-3, 0.25e-3  # before the part: where the last one is to end, or after it
LEAST_S = 0.3e-3  # a shorter part is none
TRUE = 0.0015  # so far from what was told the refresh's length may be
LEAST_TURNS, MOST_TURNS, GAIN = 30, 400, 0.3  # refreshes between touches that tell it; of each
LOST = 6  # refreshes in a row with a touch: the part lies elsewhere
PATIENCE = 3, 6  # refreshes of waiting, since sleeps end late: it need not fit; it goes at once


class Rhythm:
    """See the module. Off until `pace` tells how long a refresh is."""

    def __init__(self) -> None:
        self.told = self.period = 0.0
        self.start: float | None = None  # of the part in the present refresh
        self.busy = 0.0  # how long the part is
        self._alone: OrderedDict[tuple[Hashable, int], float] = OrderedDict()
        self._ended = 0.0  # the last submission
        self._noise = 0.7 * MOST_NOISE_S  # seconds longer than alone that few are far from the part
        self._aimed = False  # was the wait such that the next one ends where the part begins?
        self._since: float | None = None  # the present submission waits
        self._restart()

    def _restart(self) -> None:
        """Nothing is known of the part."""
        self.start, self._most = None, 0.0
        self._seen: deque[tuple[float, float, float]] = deque(maxlen=MOST_SEEN)
        self._felt = 0  # touches among them
        self._begin(0.0)

    def _begin(self, busy: float) -> None:
        """A part of this length was found. What is kept for both its ends: begin and end."""
        self.busy = busy
        self._doubled = [0, 0]  # touches in a row
        self._calm = [long + 1 for long in LONG]  # probes without one; half of them after one
        self._probes = [True, True]  # does the present refresh probe?
        self._last: list[float | None] = [None, None]  # where it was when it was touched
        self._number = self._rows = 0  # refreshes since then; in a row with a touch
        self._clear()

    def _clear(self) -> None:
        self._touched = [False, False]
        self._stray = False  # was the part met where it is not?
        self._met = [False, False]  # did anything of ours run near that end?

    @property
    def on(self) -> bool:
        """Is the length of a refresh known?"""
        return self.period > 0

    def pace(self, refresh_hz: float) -> None:
        """Refreshes a second of a compositor that is at work; 0: there is none."""
        period = 1.0 / refresh_hz if refresh_hz > 0 else 0.0
        if period != self.told:
            self.told = self.period = period
            self._restart()

    def alone(self, kind: Hashable) -> float:
        """What this kind of submission takes alone, 0 while that is not known."""
        least = 0.0
        for after in AFTER:  # it is asked some times for each submission: no lists here
            known = self._alone.get((kind, after), 0.0)
            if known and (not least or known < least):
                least = known
        return least

    def room(self, now: float) -> float:
        """Seconds from now on that are free for a submission which need not be short, since it
        looks for no end of the part; 0 where nothing is known.
        """
        start = self._turn(now)
        if start is None or (at := now - start) < self.busy:
            return 0.0
        return max(0.0, self.period - at - MARGIN_S[0] - NEAR_S * self._probes[0])

    def wait(self, now: float, need: float) -> float:
        """How long to wait before a submission that takes `need` alone; to be asked again then,
        until it is 0.
        """
        pause = self._pause(now, need)
        if pause <= 0:
            self._since = None
            return 0.0
        since = self._since = now if self._since is None else self._since
        waited = (now - since) / self.period
        if self.start is not None and waited > PATIENCE[0]:  # a busy machine wakes nobody in time
            pause = max(0.0, self.start + self.busy - now) if waited <= PATIENCE[1] else 0.0
            if not pause:
                self._since, self._aimed = None, False
        return pause

    def ahead(self, now: float, need: float) -> float:
        """About how long a submission that takes `need` would wait now."""
        if self.start is None:
            return 0.0
        at, free = (now - self.start) % self.period, self.busy + MARGIN_S[1]
        if at < free:
            return free - at
        return 0.0 if at + need < self.period - MARGIN_S[0] else self.period + free - at

    def _pause(self, now: float, need: float) -> float:
        """As wait, however long it waits already."""
        if self.start is None:
            return 0.0
        start = self._turn(now)
        if start is None:
            return 0.0
        at = now - start
        before, after = (0.0 if p else m for p, m in zip(self._probes, MARGIN_S, strict=True))
        free = self.busy + after
        if at < free:
            return free - at
        again = self.period + free - at
        if need > self.period - self.busy - sum(MARGIN_S):
            # it never fits: at least it begins with the free part
            return 0.0 if at < free + NEAR_S else again
        left = self.period - before - at - need
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
        after = sum(begin - self._ended > pause for pause in PAUSES_S)
        key = kind, after
        self._ended = end
        alone = self._alone.pop(key, took)
        if after:  # it may never have been alone after a pause
            alone = min(alone, self._alone.get((kind, 0), alone) + WAKE_S[after])
        self._alone[key] = min(took, RISE * alone)
        if len(self._alone) > KINDS:
            self._alone.popitem(last=False)
        if not self.on:
            return
        excess = took - alone
        least = max(FELT_S, FELT * alone, NOISES * self._noise)
        felt = excess > least
        if excess > MOST * self.period:
            return  # a hiccup: no part of a refresh takes so long
        if felt:
            self._most = max(self._most, excess)
        if felt or excess < least / 2:  # between them it tells nothing
            self._seen.append((begin, end, excess if felt else 0.0))
        while self._seen and begin - self._seen[0][0] > SPAN * self.period:
            self._seen.popleft()
        if self.start is None:
            self._hear(excess)
            self._felt += felt
            if self._felt >= FEW and begin - self._seen[0][0] >= FEW * self.period:
                self._find(begin)
            return
        start = self._turn(begin)
        if start is not None:
            self._follow(begin - start, end - start, excess, felt)

    def _find(self, now: float) -> None:
        """Searches the part. Where nothing is found the most that it can be lets the other one
        come to an end, and shows more.
        """
        found = rhythm_search.find(self._seen, self.period)
        start, busy = found or (now, MOST * self.period)
        self.start = start + (now - start) // self.period * self.period
        self._most = max((excess for _, _, excess in self._seen), default=0.0)
        self._begin(busy)

    def _hear(self, excess: float) -> None:
        """How much longer than alone a submission takes where nobody else is at work."""
        step = RANK if excess > self._noise else RANK - 1
        self._noise = min(max(self._noise + STEP_S * step, 0.0), MOST_NOISE_S)

    def _follow(self, begin: float, end: float, excess: float, felt: bool) -> None:
        """A submission from `begin` to `end`, from the part's begin on."""
        late = begin < self.busy + NEAR_S
        early = end - excess > self.period - NEAR_S
        self._met[1] |= late
        if end - excess > self.period + SLOP_S:
            return  # it could not but meet the next part: that tells of no end
        self._met[0] |= early or end > self.period - NEAR_S
        if not (late or early):
            self._hear(excess)
        if not felt:
            return
        full = excess > FULL * self._most
        reaches = end > self.period - NEAR_S
        if reaches and (not late or full):
            if full or (self._probes[0] and excess > LITTLE * self._most):
                self._touch(0, 0.0)
        elif late and (more := begin + excess - self.busy) > 0:  # else the part is what it was
            if self._probes[1] or full:
                self._touch(1, more)
        elif full and not late:
            self._stray = True

    def _touch(self, which: int, more: float) -> None:
        """The part begins earlier (0) or ends later (1) than was thought, by `more` at least."""
        if self._touched[which]:
            return
        self._touched[which] = True
        self._calm[which] //= 2  # one alone may be a hiccup
        back = max(BACK_S[which] * 2.0 ** self._doubled[which], more)
        back = min(back, MOST_BACK_S[which])
        if not self._doubled[which]:
            self._drift(which)
        self._doubled[which] += 1
        self._grow(which, back)

    def _drift(self, which: int) -> None:
        """A screen's 60 Hz are not quite those of our clock: by as much as an end of the part went
        on from touch to touch.
        """
        assert self.start is not None
        at, last = self.start + which * self.busy, self._last[which]
        count = 0 if last is None else round((at - last) / self.told)
        if last is None or count >= LEAST_TURNS:
            self._last[which] = at
        if last is None or not LEAST_TURNS <= count <= MOST_TURNS:
            return
        low, high = (1 - TRUE) * self.told, (1 + TRUE) * self.told
        self.period += GAIN * (min(max((at - last) / count, low), high) - self.period)

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
            if any(self._touched) or self._stray:
                self._rows += 1
            elif any(p and m for p, m in zip(self._probes, self._met, strict=True)):
                self._rows = 0
            self._number += 1
            for which in (0, 1):
                if self._probes[which] and self._met[which] and not self._touched[which]:
                    self._doubled[which] = 0
                    self._calm[which] = min(self._calm[which] + 1, 2 * LONG[which])
                    self._grow(which, -CREEP_S * (1 + self._calm[which] // LONG[which]))
                calm = self._calm[which] > LONG[which]
                self._probes[which] = calm or self._touched[which] or not self._number % PROBE
            self._clear()
            if self.busy < LEAST_S:
                self._restart()
            elif self._rows >= LOST:
                self._find(now)
        return self.start
