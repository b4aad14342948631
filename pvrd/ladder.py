# SPDX-License-Identifier: Apache-2.0
"""By which level a frame is made: the session's own network, smaller ones, the CPU, interpolation.

A pure class: time and measurements are given to it. It falls as soon as a frame would be, or was,
too late, and climbs by trials of one frame. A trial that fails costs that frame its quality, not
its deadline (it is interpolated), and the next one at that level waits twice as long, so that a
constant load is tried ever more rarely.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

FIT = 0.85  # of the time that there is: what a level may be expected to take
FIRST_S, MOST_S = 1.0, 60.0  # from a fall to the trial after it; doubled by each failure
TRIAL_S = 0.5  # from one trial to the next, of any level
SLOW_S = 10.0  # at one level, before one is tried that was too slow when it was measured
GAP_S = 0.002  # a client that waits for less does not pace its frames
NOTHING: Mapping[int, str] = {}


@dataclass
class Level:
    """A way to make frames, and what is known of the time that it takes."""

    name: str  # as clients see it
    device: str  # gpu, cpu
    takes: float | None = None  # seconds of a frame, lately; None: not known
    alone: float | None = None  # the least that it was
    wait: float = FIRST_S  # to the next trial, should it fail
    after: float = 0.0  # no trial before
    since: float = field(default=float("-inf"))  # it is, or was last, in use from then on


class Ladder:
    """The levels of a session, the best first. The last one, plain interpolation, always fits."""

    def __init__(self, levels: Sequence[Level]) -> None:
        self.levels = list(levels)
        self.at = 0
        self.reason = ""  # why it is this level, of the last fall or climb; "" at the first
        self.changes = 0
        self._trial: int | None = None
        self._tried = float("-inf")
        self._share = 1.0

    def know(self, level: int, seconds: float) -> None:
        """What a level takes, measured before its first frame."""
        one = self.levels[level]
        one.takes = one.alone = seconds

    def share(self, share: float) -> None:
        """The part of the GPU's time that all work together may take now, 0..1."""
        share = max(share, 0.01)
        if share != self._share:
            for level in self.levels:
                if level.device == "gpu" and level.takes is not None:
                    level.takes *= self._share / share
            self._share = share

    def pick(
        self,
        now: float,
        budget: float | None,
        barred: Mapping[int, str] = NOTHING,
        calm: bool = True,
        wait: float = 0.0,
    ) -> int | None:
        """The level for the next frame; None when all are barred.

        budget: seconds that the frame may take, None without a limit. barred: levels that cannot be
        used now, and why. calm: no other frame waits, so that one may try a better level. wait:
        seconds until the device of the present level is free.
        """
        free = [i for i in range(len(self.levels)) if i not in barred]
        if not free:
            return None
        if budget is None:
            self._go(now, free[0], barred.get(0, ""))
            return free[0]
        if self.at in barred:
            below = [i for i in free if i > self.at] or free[-1:]
            self._go(now, self._fitting(below, budget), barred[self.at])
        elif wait + self._expected(self.at) > budget and self.at != free[-1]:
            self._fall(now, budget, free, wait)
        if calm and (trial := self._due(now, budget, free)) is not None:
            self._trial, self._tried = trial, now
            return trial
        return self.at

    def done(self, now: float, level: int, took: float, budget: float | None, fine: bool) -> None:
        """A frame was made. took: seconds; fine: by this level and in time."""
        one = self.levels[level]
        if not fine and budget is not None:
            took = max(took, budget / FIT)
        one.takes = took if one.takes is None else max(took, 0.8 * one.takes + 0.2 * took)
        one.alone = took if one.alone is None else min(took, one.alone)
        trial = level == self._trial
        if trial:
            self._trial = None
        if budget is None:
            return
        if trial and level < self.at:
            if fine and took <= FIT * budget:
                one.takes = took
                self._go(now, level, f"on the way up: {one.name} takes {_of(took, budget)}")
            else:
                self._later(one, now)
        elif level == self.at and not fine and level < len(self.levels) - 1:
            self._fall(now, budget, range(level, len(self.levels)))

    # -- how

    def _expected(self, level: int) -> float:
        """Seconds; 0 where nothing tells. A device that is slow for one level is so for others."""
        one, here = self.levels[level], self.levels[self.at]
        if level == self.at or one.device != here.device:
            return one.takes or 0.0
        if one.alone is None:
            return 0.0
        slow = here.takes / here.alone if here.takes and here.alone else 1.0
        return one.alone * max(1.0, slow)

    def _fitting(self, levels: Sequence[int], budget: float, wait: float = 0.0) -> int:
        """The first of these that fits, else the last."""
        last, device = len(self.levels) - 1, self.levels[self.at].device

        def fits(i: int) -> bool:
            there = wait if self.levels[i].device == device else 0.0
            return i == last or there + self._expected(i) <= FIT * budget

        return next(filter(fits, levels), levels[-1])

    def _fall(
        self, now: float, budget: float, free: Sequence[int], wait: float = 0.0
    ) -> None:
        one = self.levels[self.at]
        why = f"{one.name} takes {_of(one.takes or 0, budget)}"
        below = [i for i in free if i > self.at]
        if below:
            if now - one.since < 4 * one.wait:
                self._later(one, now)  # it did not hold for long: as a trial that failed
            else:
                one.wait, one.after = FIRST_S, now + FIRST_S
            self._go(now, self._fitting(below, budget, wait), why)

    def _later(self, one: Level, now: float) -> None:
        one.after = now + one.wait
        one.wait = min(2 * one.wait, MOST_S)

    def _due(self, now: float, budget: float, free: Sequence[int]) -> int | None:
        """A better level that may be tried: the nearest that is fast enough alone, else the nearest
        that was not when it was measured.
        """
        if now - self._tried < TRIAL_S or now - self.levels[self.at].since < TRIAL_S:
            return None
        due = [i for i in reversed(free) if i < self.at and self.levels[i].after <= now]
        quick = [i for i in due if (self.levels[i].alone or 0.0) <= FIT * budget]
        if quick:
            return quick[0]
        if not due or now - self.levels[self.at].since < SLOW_S:
            return None
        self.levels[due[0]].wait = max(SLOW_S, self.levels[due[0]].wait)
        return due[0]

    def _go(self, now: float, level: int, why: str) -> None:
        if level != self.at:
            self.at = level
            self.changes += 1
            self.levels[level].since = now
            self._trial = None
            self.reason = why
        if level == 0:
            self.reason = ""


def _of(took: float, budget: float) -> str:
    return f"{1000 * took:.0f} ms of {1000 * budget:.0f}"


class Pace:
    """Seconds from one frame to the next: of their deadlines, or else of the SUBMITs of a client
    that waits between them though it has a slot free. None for one that sends as fast as it may.
    """

    def __init__(self, slots: int) -> None:
        self._need = slots + 4  # more than a client sends at once at the beginning
        self._gaps: deque[float] = deque(maxlen=self._need)
        self._last: float | None = None
        self._deadline = 0

    def submitted(self, now: float, deadline_ns: int, free_before: bool) -> None:
        """A SUBMIT came. free_before: since the one before there was always a slot free."""
        gap = None
        if deadline_ns:
            if self._deadline and deadline_ns > self._deadline:
                gap = (deadline_ns - self._deadline) / 1e9
        elif self._last is not None and free_before:
            gap = now - self._last
        if gap is not None and GAP_S <= gap < 1.0:
            self._gaps.append(gap)
        self._last, self._deadline = now, deadline_ns

    @property
    def interval(self) -> float | None:
        """The median of late; None while it is not known."""
        if len(self._gaps) < (2 if self._deadline else self._need):
            return None
        return sorted(self._gaps)[len(self._gaps) // 2]
