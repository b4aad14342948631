# SPDX-License-Identifier: Apache-2.0
"""Tokens in parts beside a simulated compositor: what goes together leaves the device idle less."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from engine.backends.vulkan.segments import Part, Run
from pvrd.workers import paced
from pvrd.workers.paced import Cut
from pvrd.workers.timings import Meter
from tests.workers.test_workers_rhythm import FRAME_S, LOCKED_S, Screen, frames

TOKEN, PARTS, TOKENS = 3.2e-3, 6, 6  # seconds of a token, its parts, tokens of a slice
EACH_S, BETWEEN_S = 0.05e-3, 0.13e-3  # of a submission, beside its work; the host, between two


class Segments:
    """Of a device that is simulated: as the real ones, without commands."""

    def __init__(self, screen: Screen) -> None:
        self._screen, self._rng = screen, random.Random(3)
        self.submissions = 0

    def run(
        self,
        sequences: Sequence[str],
        cut: str,
        count: int,
        paced: Callable[[Sequence[Run], Callable[[Run], None]], int],
        stop: Callable[[], bool],
    ) -> tuple[float, int]:
        parts = [Part((cut,), count, i, count) for _ in sequences for i in range(count)]
        at = 0
        while at < len(parts):
            ends = range(at + 1, min(len(parts), at + 20) + 1)
            at += paced([tuple(parts[at:end]) for end in ends], lambda r: self._submit(r, count))
            self._screen.idle(self._screen.now + BETWEEN_S * (0.7 + 0.6 * self._rng.random()))
        return 0.0, len(sequences)

    def _submit(self, run: Run, count: int) -> None:
        self._screen.work(EACH_S + len(run) * TOKEN / count)
        self.submissions += 1


def tokens(screen: Screen, seconds: float, patch: pytest.MonkeyPatch) -> tuple[float, float]:
    """Tokens and submissions a second beside the compositor."""
    clock: Any = SimpleNamespace(
        monotonic=lambda: screen.now, sleep=lambda s: screen.idle(screen.now + s + 30e-6)
    )
    patch.setattr(paced, "time", clock)
    gate = Meter().gate
    gate.rhythm.pace(screen.hz)
    cut = Cut(gate, None)
    cut._segments = segments = Segments(screen)
    cut._parts["ahead"] = PARTS
    done, before = 0, 0
    while screen.now < seconds:
        if screen.now < LOCKED_S:
            done, before = 0, segments.submissions
        cut.run(("model",), ["ahead"] * TOKENS, lambda: False)
        done += TOKENS
    spent = screen.now - LOCKED_S
    return done / spent, (segments.submissions - before) / spent


@pytest.mark.parametrize("kind", ["turns", "first", "finishes"])
def test_what_goes_together_is_faster_and_frames_stay_as_they_are(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    for together in (paced.TOGETHER_S, paced.STREAMS_S, 0.0):
        monkeypatch.setattr(paced, "TOGETHER_S", together)
        screen = Screen(kind=kind)
        rate, submissions = tokens(screen, 12.0, monkeypatch)
        middle, p99 = frames(screen)
        assert middle <= 1.05 * 1e3 * FRAME_S
        assert p99 <= 1.3 * 1e3 * FRAME_S
        seen.append((rate, submissions))
    (most, few), (some, more), (least, many) = seen
    assert most > 1.01 * some > 1.02 * least
    assert few < more < many
