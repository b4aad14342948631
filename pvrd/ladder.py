# SPDX-License-Identifier: Apache-2.0
"""By which level a frame is made: the session's own network, smaller ones, the CPU, interpolation.

A pure class: time and measurements are given to it. It falls when frames would be, or were, too
late: a level that had held for a while is forgiven FORGIVEN of them, since each costs its quality
alone (it is interpolated). It climbs by trials of one frame. The next one after a trial that failed
waits twice as long, so that a constant load is tried ever more rarely; but from plain
interpolation, where a trial costs no frame its quality, only ROOMY_S while its device has time to
spare, and UNHELD_S where the level was reached and did not hold: then it takes twice as many trials
in a row to reach it again.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

FIT = 0.85  # of the time that there is: what a level may be expected to take
FIRST_S, MOST_S = 1.0, 60.0  # from a fall to the trial after it; doubled by each failure
TRIAL_S = 0.5  # from one trial to the next, of any level
SLOW_S = 10.0  # at one level, before one is tried that was too slow when it was measured
FORGIVEN = 2  # frames that a level may be late with, if it had held
HELD_S = 1.0  # in use without such a frame: then it had
ROOMY_S, UNHELD_S = 2.0, 8.0  # between trials from plain interpolation, where there is time
PROOFS = 8  # the most trials in a row that have to be fine there; each rise for nothing doubles it
SPARE, IDLE = 0.9, 0.5  # of the time to spare may be asked for; a device that is free enough
APART_S = 0.1  # from one session's trial to another one's
USE_S = 1.0  # the time over which the use of a device is taken
GAP_S = 0.002  # a client that waits for less does not pace its frames
NOTHING: Mapping[int, str] = {}


@dataclass(frozen=True)
class Spare:
    """Time of a device that no frames take: seconds in a frame's interval, and 0..1 of all."""

    seconds: float
    part: float


NONE = Spare(0.0, 0.0)
NO_TIME: Mapping[str, Spare] = {}


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
    again: float = float("-inf")  # no trial before, where there is time to spare
    proofs: int = 1  # trials in a row that have to be fine, to rise from plain interpolation
    passed: int = 0  # of them


class Ladder:
    """The levels of a session, the best first. The last one, plain interpolation, always fits."""

    def __init__(self, levels: Sequence[Level]) -> None:
        self.levels = list(levels)
        self.at = 0
        self.reason = ""  # why it is this level, of the last fall or climb; "" at the first
        self.changes = 0
        self._trial: int | None = None
        self._tried = float("-inf")
        self._missed = FORGIVEN  # frames that were late, or would have been, of late
        self._miss = float("-inf")  # the last of them
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
        spare: Mapping[str, Spare] = NO_TIME,
    ) -> int | None:
        """The level for the next frame; None when all are barred.

        budget: seconds that the frame may take, None without a limit. barred: levels that cannot be
        used now, and why. calm: no other frame waits, so that one may try a better level. wait:
        seconds until the device of the present level is free. spare: what devices (gpu, cpu) have.
        """
        free = [i for i in range(len(self.levels)) if i not in barred]
        if not free:
            return None
        here = self.levels[self.at]
        here.since = max(here.since, now) if math.isinf(here.since) else here.since
        if budget is None:
            self._go(now, free[0], barred.get(0, ""))
            return free[0]
        if self.at in barred:
            below = [i for i in free if i > self.at] or free[-1:]
            self._go(now, self._fitting(below, budget), barred[self.at])
        elif wait + self._expected(self.at) > budget and self.at != free[-1]:
            if self._forgives(now):  # this one alone goes by a lower level
                return self._fitting([i for i in free if i > self.at], budget, wait)
            self._fall(now, budget, free, wait)
        if calm and (trial := self._due(now, budget, free, spare)) is not None:
            self._trial, self._tried = trial, now
            return trial
        return self.at

    def done(self, now: float, level: int, took: float, budget: float | None, fine: bool) -> None:
        """A frame was made. took: seconds; fine: by this level and in time."""
        one = self.levels[level]
        if not fine and budget is not None:
            took = max(took, budget / FIT)
        trial = level == self._trial
        last = level == len(self.levels) - 1
        mine = level == self.at and not trial and not last
        slow = budget is not None and (not fine or took > budget)
        if mine and slow and self._forgives(now):
            return  # it says nothing of the next one
        one.takes = took if one.takes is None else max(took, 0.8 * one.takes + 0.2 * took)
        one.alone = took if one.alone is None else min(took, one.alone)
        if trial:
            self._trial = None
        if budget is None:
            return
        if trial and level < self.at:
            if fine and took <= FIT * budget:
                one.takes, one.passed = took, one.passed + 1
                if self.at == len(self.levels) - 1 and one.passed < one.proofs:
                    one.after = now
                    return
                one.passed = 0
                self._go(now, level, f"on the way up: {one.name} takes {_of(took, budget)}")
            else:
                self._later(one, now)
        elif mine and not fine:
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

    def _forgives(self, now: float) -> bool:
        """A frame at the present level is late, or would be: is that no reason to leave it?"""
        clean = now - max(self._miss, self.levels[self.at].since)
        if clean > HELD_S:
            self._missed = 0
        self._missed += 1
        self._miss = now
        return self._missed <= FORGIVEN

    def _fall(
        self, now: float, budget: float, free: Sequence[int], wait: float = 0.0
    ) -> None:
        one = self.levels[self.at]
        why = f"{one.name} takes {_of(one.takes or 0, budget)}"
        below = [i for i in free if i > self.at]
        if below:
            if now - one.since < 4 * one.wait:
                self._later(one, now)  # it did not hold for long: as a trial that failed
                one.again = now + UNHELD_S
                one.proofs = min(2 * one.proofs, PROOFS)
            else:
                one.proofs = 1
                one.wait, one.after = FIRST_S, now + FIRST_S
                one.again = now + FIRST_S
            self._go(now, self._fitting(below, budget, wait), why)

    def _later(self, one: Level, now: float) -> None:
        one.again, one.after, one.passed = now + ROOMY_S, now + one.wait, 0
        one.wait = min(2 * one.wait, MOST_S)

    def _roomy(self, at: int, now: float, spare: Mapping[str, Spare]) -> bool:
        """Is there time for a level that plain interpolation stands in for?"""
        one = self.levels[at]
        if self.at < len(self.levels) - 1 or one.alone is None or now < one.again:
            return False
        there = spare.get(one.device, NONE)
        return one.alone <= SPARE * there.seconds or there.part >= IDLE

    def _due(
        self, now: float, budget: float, free: Sequence[int], spare: Mapping[str, Spare]
    ) -> int | None:
        """A better level that may be tried: the nearest that is fast enough alone, else the nearest
        that was not when it was measured.
        """
        if now - self._tried < TRIAL_S or now - self.levels[self.at].since < TRIAL_S:
            return None
        due = [
            i for i in reversed(free)
            if i < self.at and (self.levels[i].after <= now or self._roomy(i, now, spare))
        ]  # fmt: skip
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
            self._missed, self._miss = FORGIVEN, now  # it has to hold first
            self.reason = why
        if level == 0:
            self.reason = ""


def _of(took: float, budget: float) -> str:
    return f"{1000 * took:.0f} ms of {1000 * budget:.0f}"


class Use:
    """What the frames of all sessions take of a device's time: 0..1, over the last USE_S or so. And
    whose turn it is to try a better level: many at once would all be slow.
    """

    def __init__(self) -> None:
        self._sum, self._at = 0.0, 0.0
        self._tried = float("-inf")

    def calm(self, now: float) -> bool:
        """May a session try now?"""
        return now >= self._tried + APART_S

    def tries(self, now: float) -> None:
        """It does."""
        self._tried = now

    def took(self, now: float, seconds: float) -> None:
        """A frame, or what was done of one."""
        self._sum, self._at = self._of(now) + max(seconds, 0.0), now

    def part(self, now: float) -> float:
        """Of all the time."""
        return min(1.0, self._of(now) / USE_S)

    def _of(self, now: float) -> float:
        return self._sum * math.exp(min(0.0, self._at - now) / USE_S)


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
