# SPDX-License-Identifier: Apache-2.0
"""Submissions that wait for their place in a compositor's refresh (rhythm.py), and tokens in parts
that are short enough to find one."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeVar

from engine.backends.base import RunStats
from pvrd.workers.canary import Canary
from pvrd.workers.rhythm import Rhythm

T = TypeVar("T")
CUTS = ("ahead", "decode")  # sequences that are cut into parts
PART_S, ROOM, MOST_PARTS = 0.8e-3, 1.3, 16
KNOWN = 8  # parts after which their time is known
WHOLE = 16  # slices, of which one is whole: samples of the work are still computed again


class Gate:
    """What each submission passes: it waits before, and is judged after."""

    def __init__(self, rhythm: Rhythm, canary: Canary) -> None:
        self.rhythm = rhythm
        self._canary = canary
        self.waited = 0.0  # seconds, of all

    def run(self, kind: Hashable, submit: Callable[[], T]) -> tuple[T, float]:
        """Submits when that disturbs nobody: what comes of it, and the seconds that it took."""
        rhythm = self.rhythm
        if rhythm.on:
            began = time.monotonic()
            while (pause := rhythm.wait(time.monotonic(), rhythm.alone(kind))) > 0:
                time.sleep(pause)
            self.waited += time.monotonic() - began
        began = time.monotonic()
        result = submit()
        ended = time.monotonic()
        self._canary.slice(kind, ended - began)
        rhythm.took(kind, began, ended)
        return result, ended - began


class Cut:
    """In how many parts an executable's tokens are computed: each takes about PART_S."""

    def __init__(self, gate: Gate, executable: Any) -> None:
        self._gate = gate
        self._exe = executable
        self._parts = dict.fromkeys(CUTS, 1)
        self._seen = dict.fromkeys(CUTS, 0)
        self._runs = 0
        self._segments: Any = None

    def wanted(self, sequences: Sequence[str]) -> bool:
        """Should this slice be run in parts?"""
        if not self._gate.rhythm.on or sequences[0] not in CUTS:
            return False
        if getattr(self._exe, "_recorded", None) is None:
            return False
        self._runs += 1
        return self._runs % WHOLE != 1

    def run(self, kind: Sequence[Hashable], sequences: Sequence[str]) -> RunStats:
        """Runs it; without its waits. `kind` tells the executable and its state."""
        if self._segments is None:
            from engine.backends.vulkan.segments import Segments

            self._segments = Segments(self._exe)

        def paced(part: tuple[str, int, int], submit: Callable[[], None]) -> None:
            own = (*kind, part)
            self._gate.run(own, submit)
            self._took(part, self._gate.rhythm.alone(own))

        cut = sequences[0]
        return RunStats(self._segments.run(sequences, cut, self._parts[cut], paced))

    def _took(self, part: tuple[str, int, int], alone: float) -> None:
        name, count, _ = part
        if count != self._parts.get(name):
            return
        self._seen[name] += 1
        if self._seen[name] > KNOWN and alone > ROOM * PART_S and count < MOST_PARTS:
            self._parts[name] = min(MOST_PARTS, math.ceil(count * alone / PART_S))
            self._seen[name] = 0
