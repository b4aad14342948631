# SPDX-License-Identifier: Apache-2.0
"""Pacing on the simulated device of benchmarks/qos_rhythm."""

from __future__ import annotations

import statistics

import pytest

from benchmarks import qos_rhythm
from benchmarks.qos_rhythm import FRAME_S, LOCKED_S, Device, Ways
from engine.meanwhile import MEANWHILE
from engine.pace import LIMIT
from pvrd.workers import paced


def test_alone_the_compositor_draws_its_frames() -> None:
    device = Device(60.0, 1, 0.0)
    device.idle(10.0)
    took = [seconds for _, seconds in device.took]
    assert len(took) == pytest.approx(600, abs=2)
    assert statistics.median(took) == pytest.approx(FRAME_S, rel=0.01)


def test_more_that_goes_together_is_more_text_and_leaves_frames_as_they_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen = {}
    for together in (paced.TOGETHER_S, paced.STREAMS_S):
        monkeypatch.setattr(paced, "TOGETHER_S", together)
        runs = [qos_rhythm.run(Device(60.0, seed, 0.0), LOCKED_S + 6, False) for seed in range(4)]
        worst = statistics.mean(frames[len(frames) * 99 // 100] for _, frames in runs)
        seen[together] = sum(rate for rate, _ in runs), worst
    (more, p99), (less, before) = seen.values()
    assert more > 1.01 * less
    assert p99 < 1.1 * before


def test_a_stream_takes_of_the_text_and_is_told_to_the_gate() -> None:
    rate, _ = qos_rhythm.run(Device(60.0, 1, 0.0), LOCKED_S + 3, False)
    beside, _ = qos_rhythm.run(Device(60.0, 1, 0.0), LOCKED_S + 3, True)
    assert 0.6 * rate < beside < rate
    assert LIMIT.streams == 0  # as it was


def test_the_ways_of_a_streams_frames_are_more_text_and_disturb_no_more() -> None:
    """The same seeds each time; each of the three ways alone is of use, too."""
    before, *others = (
        qos_rhythm.found(4, LOCKED_S + 8, True, ways)
        for ways in (
            Ways(False, False, False), Ways(True, False, False), Ways(False, True, False),
            Ways(False, False, True), Ways(),
        )
    )  # fmt: skip
    assert all(rate > before[0] for rate, _ in others)
    assert others[-1][0] > 1.03 * before[0]
    assert others[-1][1] < 1.05 * before[1]
    assert not MEANWHILE
