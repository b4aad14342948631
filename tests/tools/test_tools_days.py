# SPDX-License-Identifier: Apache-2.0
"""The made-up days are what their generator makes, and have in them what they are for."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from pvrd.sensors import recording
from tools import days

FOLDER = Path(__file__).parents[1] / "data" / "days"


@pytest.mark.parametrize("name", sorted(days.DAYS))
def test_the_files_are_the_generators(name: str) -> None:
    assert (FOLDER / f"{name}.jsonl").read_text(encoding="utf-8") == days.content(name)


@pytest.mark.parametrize("name", sorted(days.DAYS))
def test_every_line_is_a_snapshot(name: str) -> None:
    made = list(days.DAYS[name]())
    assert list(recording.read(FOLDER / f"{name}.jsonl")) == made


def test_the_battery_passes_a_fifth_and_is_charged() -> None:
    levels = [(s.battery or 0.0, s.on_battery) for s in days.battery()]
    assert any(level < 20 and on_battery for level, on_battery in levels)
    assert levels[-1][0] > 50
    assert levels[-1][1] is False
    assert any(s.sleeping for s in days.battery())
    assert any(s.power_saver for s in days.battery())


def test_the_zone_passes_its_trip_twice() -> None:
    beyond = [(s.margin_c or 0.0) < -1 for s in days.thermal()]
    assert sum(not a and b for a, b in itertools.pairwise(beyond)) >= 2
    assert not beyond[-1]


def test_the_compositor_has_bursts_a_game_and_nobody() -> None:
    seen = list(days.bursts())
    assert any((s.missed_per_s or 0) > 5 for s in seen)
    assert any(s.holds for s in seen)
    assert seen[-1].idle
    assert seen[-1].missed_per_s is None


def test_a_recording_of_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DBUS_SYSTEM_BUS_ADDRESS", "unix:path=/nonexistent")
    out = tmp_path / "day.jsonl"
    monkeypatch.setattr("sys.argv", ["days", "record", str(out), "--seconds=0.3", "--every=0.1"])
    assert days.main() == 0
    seen = list(recording.read(out))
    assert seen
    assert seen[0].time_s < 1
    monkeypatch.setattr("sys.argv", ["days", "record", str(tmp_path / "none" / "day")])
    assert days.main() == 1
