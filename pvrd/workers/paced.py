# SPDX-License-Identifier: Apache-2.0
"""Submissions that wait for their place in a compositor's refresh (rhythm.py), and tokens in parts
that are short enough to find one. Where there is room for several of them they go together: between
submissions a device has nothing to do, and the first one after that takes longer. What the host has
to do beside (engine/meanwhile.py) it does while the device works, or while it waits itself."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from engine.backends.base import RunStats
from engine.meanwhile import MEANWHILE
from engine.pace import ASIDE, LIMIT, TURN
from pvrd.workers.arrivals import Arrivals
from pvrd.workers.canary import Canary
from pvrd.workers.rhythm import Rhythm

if TYPE_CHECKING:
    from engine.backends.vulkan.segments import Run

T = TypeVar("T")
CUTS = ("ahead", "decode")  # sequences that are cut into parts, each a token
PART_S, MOST_PARTS = 0.6e-3, 16  # alone a part costs a tenth of a millisecond beside its work
TOGETHER_S = 10e-3  # that parts may take which go together, all that a refresh may have free
STREAMS_S = 4e-3  # the same where a stream's frame may come, since it waits for the end
NEARLY = 1.3  # times too many or too few parts are as good
APART_S = 0.02  # what a slice of several tokens in parts may take, without its waits
HOST = 0.5  # of a submission's time: where the host worked so long meanwhile it tells nothing
WHOLE = 16  # slices of one token, of which one is whole: samples of it are still computed again


class Gate:
    """What each submission passes: it waits before, and is judged after."""

    def __init__(self, rhythm: Rhythm, canary: Canary) -> None:
        self.rhythm = rhythm
        self._canary = canary
        self.waited = 0.0  # seconds, of all
        self.arrivals = Arrivals()

    def run(self, kind: Hashable, submit: Callable[[], T]) -> tuple[T, float]:
        """Submits when that disturbs nobody: what comes of it, and the seconds that it took."""
        if self.rhythm.on:
            self.wait(self.rhythm.alone(kind))
        return self.pass_through(kind, submit)

    def wait(self, need: float) -> None:
        """Until the turn of a submission that takes `need` seconds alone."""
        began = time.monotonic()
        while (pause := self.rhythm.wait(now := time.monotonic(), need)) > 0:
            if MEANWHILE:
                MEANWHILE.run()
                pause -= time.monotonic() - now
            time.sleep(max(0.0, pause))
        TURN.seconds += (waited := time.monotonic() - began)
        self.waited += waited

    def pass_through(self, kind: Hashable, submit: Callable[[], T]) -> tuple[T, float]:
        """As run, at once. A submission of which a part was computed again meanwhile, or beside
        which the host worked for long, tells nothing of what such submissions take.
        """
        began, aside, host = time.monotonic(), ASIDE.seconds, MEANWHILE.seconds
        result = submit()
        ended = time.monotonic()
        if ASIDE.seconds == aside and MEANWHILE.seconds - host <= HOST * (ended - began):
            self._canary.slice(kind, ended - began)
            self.rhythm.took(kind, began, ended)
        return result, ended - began


class Cut:
    """In how many parts an executable's tokens are computed: each takes about PART_S."""

    def __init__(self, gate: Gate, executable: Any) -> None:
        self._gate = gate
        self._exe = executable
        self._parts = dict.fromkeys(CUTS, 1)
        self._runs = 0
        self._segments: Any = None
        self.pieces = 1  # of the last slice: after each it could have ended

    @property
    def on(self) -> bool:
        """Are slices cut now?"""
        return self._gate.rhythm.on and getattr(self._exe, "_recorded", None) is not None

    def wanted(self, sequences: Sequence[str]) -> bool:
        """Should this slice be run in parts?"""
        if not self.on or sequences[0] not in CUTS:
            return False
        if sequences.count(sequences[0]) > 1:
            return True
        self._runs += 1
        return self._runs % WHOLE != 1

    def run(
        self, kind: Sequence[Hashable], sequences: Sequence[str], stop: Callable[[], bool]
    ) -> RunStats:
        """Runs it, up to the token after which `stop()`; without its waits. `kind` tells the
        executable and its state.
        """
        if self._segments is None:
            from engine.backends.vulkan.segments import Segments

            self._segments = Segments(self._exe)

        def paced(runs: Sequence[Run], submit: Callable[[Run], None]) -> int:
            self._gate.wait(self._gate.rhythm.alone((*kind, _name(runs[0]))))
            run = self._longest(kind, runs)
            self.pieces += run[-1].last
            self._gate.pass_through((*kind, _name(run)), partial(submit, run))
            return len(run)

        cut, self.pieces = sequences[0], 0
        count = self._count(cut, kind)
        spent, done = self._segments.run(sequences, cut, count, paced, stop)
        return RunStats(spent, None, done)

    def _longest(self, kind: Sequence[Hashable], runs: Sequence[Run]) -> Run:
        """The longest of these that there is room for now."""
        rhythm, now = self._gate.rhythm, time.monotonic()
        most = TOGETHER_S
        if LIMIT.streams:
            most = min(most, max(STREAMS_S, self._gate.arrivals.calm(now)))
        room = min(rhythm.room(now), most)
        best, takes, parts = runs[0], 0.0, 0
        for run in runs:
            # What is not known takes no longer than what is known of it and the rest one by one.
            for part in run[parts:]:
                takes += rhythm.alone((*kind, _name((part,)))) or math.inf
            parts = len(run)
            takes = min(takes, rhythm.alone((*kind, _name(run))) or math.inf)
            if parts > len(best) and takes > room:
                break
            best = run
        return best

    def _count(self, cut: str, kind: Sequence[Hashable]) -> int:
        """By what the parts of a token, or a whole one, take alone."""
        alone, count = self._gate.rhythm.alone, self._parts[cut]
        takes = sum(each := [alone((*kind, (cut, count, number, 1))) for number in range(count)])
        if all(each) and not count / NEARLY < takes / PART_S < count * NEARLY:
            self._parts[cut] = min(MOST_PARTS, max(1, math.ceil(takes / PART_S)))
        return self._parts[cut]


def _name(run: Run) -> tuple[str, int, int, int]:
    """What tells runs apart that take different times."""
    first = run[0]
    return first.own[0], first.wanted, first.number, len(run)
