# SPDX-License-Identifier: Apache-2.0
"""The governor on the days of tests/data/days: what a day is about is what it answers to."""

from __future__ import annotations

import itertools
from pathlib import Path

from pvrd import config
from pvrd.governor import Decision, Snapshot, State, decide
from pvrd.sensors import recording

DAYS = Path(__file__).parents[1] / "data" / "days"


def day(name: str) -> list[tuple[Snapshot, Decision]]:
    """Each snapshot with the decision on it."""
    settings = config.Config({key: rule.default for key, rule in config.KEYS.items()})
    state, out = State(), []
    for snapshot in recording.read(DAYS / f"{name}.jsonl"):
        decision, state = decide(snapshot, state, settings)
        out.append((snapshot, decision))
    return out


def test_the_last_fifth_of_a_battery() -> None:
    seen = day("battery")
    low = [s for s, d in seen if d.precision == "low"]
    assert low
    assert all((s.battery or 0) < 25 for s in low)
    assert all(d.precision == "low" for s, d in seen if s.on_battery and (s.battery or 0) < 17)
    assert seen[-1][1].precision == "full"
    assert all(d.parked and d.release for s, d in seen if s.sleeping)
    assert not any(d.parked for s, d in seen if not s.sleeping)


def test_a_zone_that_heats_up() -> None:
    seen = day("thermal")
    assert all(d.group_scale < 1 for s, d in seen if (s.margin_c or 0) < 1)
    assert all(d.group_scale == 1 for s, d in seen if (s.margin_c or 0) > 25)
    assert seen[-1][1].group_scale == 1
    scales = [d.group_scale for _, d in seen]
    changes = sum(a != b for a, b in itertools.pairwise(scales))
    assert changes <= 16  # two climbs, down and up: it does not flap


def test_bursts_of_a_compositor() -> None:
    seen = day("bursts")
    assert min(d.share for _, d in seen) < 1
    assert all(d.device == "cpu" or d.release for s, d in seen if s.holds)
    last = seen[-1][1]  # nobody is there
    assert (last.device, last.share) == ("gpu", 1.0)
    assert last.slice_ms > seen[0][1].slice_ms
