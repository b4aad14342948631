# SPDX-License-Identifier: Apache-2.0
"""Submissions that wait for their place in a compositor's refresh (rhythm.py), and tokens in parts
that are short enough to find one."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeVar

from engine.backends.base import RunStats
from engine.pace import ASIDE, TURN
from pvrd.workers.canary import Canary
from pvrd.workers.rhythm import Rhythm

T = TypeVar("T")
CUTS = ("ahead", "decode")  # sequences that are cut into parts, each a token
PART_S, MOST_PARTS = 1.1e-3, 16  # a part costs a tenth of a millisecond beside its work
NEARLY = 1.3  # times too many or too few parts are as good
APART_S = 0.025  # what a slice of several tokens in parts may take, with its waits
WHOLE = 16  # slices of one token, of which one is whole: samples of it are still computed again


class Gate:
    """What each submission passes: it waits before, and is judged after."""

    def __init__(self, rhythm: Rhythm, canary: Canary) -> None:
        self.rhythm = rhythm
        self._canary = canary
        self.waited = 0.0  # seconds, of all

    def run(self, kind: Hashable, submit: Callable[[], T]) -> tuple[T, float]:
        """Submits when that disturbs nobody: what comes of it, and the seconds that it took. One of
        which a part was computed again meanwhile tells nothing of what such submissions take.
        """
        rhythm = self.rhythm
        if rhythm.on:
            began = time.monotonic()
            while (pause := rhythm.wait(time.monotonic(), rhythm.alone(kind))) > 0:
                time.sleep(pause)
            TURN.seconds += (waited := time.monotonic() - began)
            self.waited += waited
        began, aside = time.monotonic(), ASIDE.seconds
        result = submit()
        ended = time.monotonic()
        if ASIDE.seconds == aside:
            self._canary.slice(kind, ended - began)
            rhythm.took(kind, began, ended)
        return result, ended - began


class Cut:
    """In how many parts an executable's tokens are computed: each takes about PART_S."""

    def __init__(self, gate: Gate, executable: Any) -> None:
        self._gate = gate
        self._exe = executable
        self._parts = dict.fromkeys(CUTS, 1)
        self._runs = 0
        self._segments: Any = None

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

        def paced(part: tuple[str, int, int], submit: Callable[[], None]) -> None:
            self._gate.run((*kind, part), submit)

        cut = sequences[0]
        count = self._count(cut, kind)
        spent, done = self._segments.run(sequences, cut, count, paced, stop)
        return RunStats(spent, None, done)

    def _count(self, cut: str, kind: Sequence[Hashable]) -> int:
        """By what the parts of a token, or a whole one, take alone."""
        alone, count = self._gate.rhythm.alone, self._parts[cut]
        takes = sum(each := [alone((*kind, (cut, count, number))) for number in range(count)])
        if all(each) and not count / NEARLY < takes / PART_S < count * NEARLY:
            self._parts[cut] = min(MOST_PARTS, max(1, math.ceil(takes / PART_S)))
        return self._parts[cut]
