# SPDX-License-Identifier: Apache-2.0
"""The governor: thresholds, dwell times, order of trust, and properties of random days."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from pvrd import config, governor, systemd
from pvrd.config import Config
from pvrd.governor import Decision, Governor, Snapshot, State, decide

DEFAULTS = Config({key: rule.default for key, rule in config.KEYS.items()})


def settings(**values: Any) -> Config:
    return Config({**DEFAULTS.values, **{k.replace("__", "."): v for k, v in values.items()}})


class Day:
    """Snapshots one after the other, with a clock of its own."""

    def __init__(self, given: Config = DEFAULTS) -> None:
        self.config = given
        self.now = 100.0
        self.state = State()
        self.decision = Decision()

    def __call__(self, seconds: float = 0.0, **known: Any) -> Decision:
        """The decision after the machine was like this for so long."""
        end = self.now + seconds
        while True:
            snapshot = Snapshot(self.now, **known)
            self.decision, self.state = decide(snapshot, self.state, self.config)
            if self.now >= end:
                return self.decision
            # As the daemon does: again when the state says so.
            assert self.state.look_s > self.now
            self.now = min(end, self.state.look_s)


def test_nothing_known_is_the_gpu_with_long_slices() -> None:
    decision = Day()()
    assert decision == Decision(slice_ms=20.0, reason="")


def test_a_session_at_work_shortens_slices_at_once_and_idleness_lengthens_them_late() -> None:
    day = Day()
    assert day(session_active=True).slice_ms == 2.0
    assert "session is active" in day.decision.reason
    assert day(session_active=True, idle=True).slice_ms == 2.0
    assert day(4.9, session_active=True, idle=True).slice_ms == 2.0
    assert day(0.2, session_active=True, idle=True).slice_ms == 20.0
    assert day(session_active=True, idle=False).slice_ms == 2.0
    assert day(6, session_active=False).slice_ms == 20.0
    assert day(refresh_hz=60.0).slice_ms == 2.0  # no logind, but a compositor
    assert day(refresh_hz=59.94).refresh_hz == 59.94


def test_slices_never_become_longer_than_configured_for_idleness() -> None:
    day = Day(settings(governor__slice_ms=50.0))
    assert day(session_active=True).slice_ms == 20.0


@pytest.mark.parametrize(
    ("known", "device", "share", "word"),
    [
        ({"canary": 1.4}, "gpu", 1.0, "canary"),
        ({"canary": 2.5}, "gpu", 0.75, "2.5 times"),
        ({"canary": 20.0}, "cpu", 0.25, "20.0 times"),
        ({"missed_per_s": 4.0}, "gpu", 0.5, "misses 4 refreshes"),
        ({"missed_per_s": 30.0}, "cpu", 0.25, "misses 30"),
        ({"missed_per_s": 30.0, "canary": 1.0}, "gpu", 0.75, "misses 30"),
        ({"missed_per_s": 30.0, "canary": 1.2}, "cpu", 0.25, "misses 30"),
        ({"others_gpu": 0.8}, "gpu", 0.5, "80 % of the GPU"),
        ({"others_gpu": 1.0}, "gpu", 0.25, "100 % of the GPU"),
        ({"psi_cpu": 99.0, "session_active": True}, "gpu", 0.75, "wait for a CPU"),
        ({"psi_memory": 20.0, "session_active": True}, "gpu", 0.75, "wait for memory"),
        ({"psi_cpu": 99.0, "psi_memory": 99.0, "psi_io": 99.0}, "gpu", 1.0, ""),
    ],
)
def test_contention_is_believed_in_the_order_of_trust(
    known: dict[str, float], device: str, share: float, word: str
) -> None:
    decision = Day()(30, **known)
    assert (decision.device, decision.share) == (device, share)
    assert word in decision.reason
    assert bool(word) == bool(decision.reason)


def test_the_most_trusted_sensor_gives_the_reason() -> None:
    decision = Day()(30, canary=3.5, missed_per_s=4.0, others_gpu=0.8)
    assert "canary" in decision.reason
    assert "misses" not in decision.reason


def test_contention_rises_step_by_step_and_falls_later() -> None:
    day = Day()
    shares = [day(0.5, canary=20.0).share for _ in range(4)]
    assert shares == [0.75, 0.5, 0.25, 0.25]
    assert day.decision.device == "cpu"
    assert day(9.9, canary=1.0).device == "cpu"
    assert day(0.2, canary=1.0).device == "gpu"
    assert [day(5, canary=1.0).share for _ in range(3)] == [0.5, 0.75, 1.0]
    assert day(5, canary=1.0).reason == ""


def test_a_gpu_that_is_lost_again_and_again_is_tried_ever_more_rarely() -> None:
    day = Day()
    waits = []
    for _ in range(7):
        day(5, canary=20.0)
        assert day.decision.device == "cpu"
        left = day.now
        while day.decision.device == "cpu":
            day(1)  # there is no canary while nothing runs on the GPU
        waits.append(day.now - left)
    assert waits == [10, 20, 40, 80, 160, 160, 160]
    day(200)
    day(5, canary=20.0)
    left = day.now
    while day.decision.device == "cpu":
        day(1)
    assert day.now - left == 10, "after a long calm it begins anew"


def test_noise_around_a_threshold_changes_nothing_more() -> None:
    day, noise = Day(), random.Random(7)
    day(1, canary=2.6)
    assert day.decision.share == 0.75
    for _ in range(2000):
        assert day(0.1, canary=2.0 + noise.uniform(-0.4, 0.4)).share == 0.75


def test_a_short_burst_is_no_contention() -> None:
    day = Day()
    for _ in range(100):
        assert day(0.3, canary=9.0).share == 1.0
        day(0.3, canary=1.0)


def test_heat_takes_workgroups_then_slices() -> None:
    day = Day()
    assert day(5, margin_c=8.0).group_scale == 1.0
    assert day(5, margin_c=4.0).group_scale == 0.75
    assert day.decision.slice_ms == 20.0
    assert day(5, margin_c=2.0).group_scale == 0.5
    assert day.decision.slice_ms == 2.0
    assert day(5, margin_c=-3.0).group_scale == 0.25
    assert "3 degrees beyond" in day.decision.reason
    assert day(9, margin_c=10.0).group_scale == 0.25
    assert day(30, margin_c=10.0).group_scale == 1.0
    assert day(60, margin_c=6.0).group_scale == 1.0
    assert day(5, temperature_c=120.0).group_scale == 1.0, "without a trip nothing is known"


def test_a_low_battery_asks_for_small_models() -> None:
    day = Day()
    assert day(9, battery=50.0, on_battery=True).precision == "full"
    assert day(1, battery=19.9, on_battery=True).precision == "full"
    assert day(2, battery=19.9, on_battery=True).precision == "low"
    assert "battery is at 20 %" in day.decision.reason
    assert day(60, battery=22.0, on_battery=True).precision == "low"
    assert day(60, battery=23.5, on_battery=True).precision == "full"
    assert day(9, battery=5.0, on_battery=True).precision == "low"
    assert day(6, battery=5.0, on_battery=False).precision == "full"
    assert day(9, power_saver=True).precision == "low"
    assert day(9, battery=5.0).precision == "low", "not known to be at the mains"
    never = Day(settings(governor__battery_low=0.0))
    assert never(9, battery=0.0, on_battery=True).precision == "full"


def test_a_hold_counts_at_once_and_ends_a_second_late() -> None:
    day = Day()
    decision = day(holds=("game X", "b", "c", "d"))
    assert (decision.device, decision.release, decision.parked) == ("cpu", True, False)
    assert "the GPU is held: game X, b, c and 1 more" in decision.reason
    assert "held: y" in day(holds=("y",)).reason
    assert day(0.9).device == "cpu"
    assert day(0.2) == Decision(slice_ms=20.0)


def test_sleep_parks_and_waking_does_not_wait() -> None:
    day = Day()
    decision = day(sleeping=True)
    assert decision.parked
    assert decision.release
    assert decision.device == "gpu"
    assert day() == Decision(slice_ms=20.0)


def test_a_wedged_gpu_is_left() -> None:
    day = Day()
    decision = day(wedged=True)
    assert (decision.device, decision.release) == ("cpu", True)
    assert "wedged" in decision.reason
    assert day(5.1).device == "gpu"


def test_a_governor_that_is_turned_off_obeys_people_alone() -> None:
    day = Day(settings(governor__enabled=False))
    known = {"canary": 99.0, "margin_c": -9.0, "battery": 1.0, "session_active": True}
    assert day(60, **known) == Decision(slice_ms=20.0)
    assert day(holds=("x",)).device == "cpu"
    assert day(sleeping=True).parked


def test_each_change_is_logged_once_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[tuple[str, dict[str, str]]] = []
    monkeypatch.setattr(systemd, "log", lambda _, text, **f: lines.append((text, f)))
    brain = Governor(DEFAULTS)
    brain.decide(Snapshot(1.0))
    assert lines == []
    for i in range(50):
        brain.decide(Snapshot(2.0 + 0.1 * i, holds=("a game",)))
    assert len(lines) == 1
    text, fields = lines[0]
    assert "device cpu" in text
    assert "the GPU is held: a game" in text
    assert fields["PVRD_REASON"] == "the GPU is held: a game"
    assert fields["MESSAGE_ID"] == systemd.MESSAGE_DECISION
    brain.decide(Snapshot(7.0))
    brain.decide(Snapshot(8.0))
    assert len(lines) == 2
    assert "nothing asks for less" in lines[1][0]


# -- properties

FIELDS: dict[str, Callable[[random.Random], Any]] = {
    "canary": lambda r: r.choice([None, 1.0, r.lognormvariate(0.6, 0.8)]),
    "missed_per_s": lambda r: r.choice([None, 0.0, r.expovariate(0.2)]),
    "others_gpu": lambda r: r.choice([None, r.random()]),
    "psi_cpu": lambda r: r.choice([None, r.uniform(0, 100)]),
    "psi_memory": lambda r: r.choice([None, r.uniform(0, 30)]),
    "margin_c": lambda r: r.choice([None, r.uniform(-5, 15)]),
    "battery": lambda r: r.choice([None, r.uniform(10, 30)]),
    "on_battery": lambda r: r.choice([None, True, False]),
    "idle": lambda r: r.choice([None, True, False]),
    "session_active": lambda r: r.choice([None, True, False]),
    "refresh_hz": lambda r: r.choice([None, 60.0]),
    "holds": lambda r: r.choice([(), (), ("x",)]),
}


def days(seed: int, count: int = 1500) -> Iterator[Snapshot]:
    """A day of a machine gone mad: each field jumps now and then, at odd times."""
    r = random.Random(seed)
    now, known = 50.0, {}
    for _ in range(count):
        now += r.choice([0.0, 0.01, 0.1, 0.5, 1.0, r.expovariate(0.3)])
        for name in r.sample(sorted(FIELDS), r.choice([0, 1, 1, 3])):
            known[name] = FIELDS[name](r)
        yield Snapshot(now, **known)


def moves(times: list[tuple[float, float]]) -> Iterator[tuple[float, float, float]]:
    """(seconds since the move before, that move, this move) of a value that moves."""
    changed = [
        (now, value - before)
        for (_, before), (now, value) in itertools.pairwise(times)
        if value != before
    ]
    for (t0, a), (t1, b) in itertools.pairwise(changed):
        yield t1 - t0, a, b


@pytest.mark.parametrize("seed", range(5))
def test_no_ladder_turns_faster_than_its_dwell(seed: int) -> None:
    state = State()
    seen: dict[str, list[tuple[float, float]]] = {
        name: [] for name in ("contention", "heat", "battery", "desktop", "hold")
    }
    for snapshot in days(seed):
        decision, state = decide(snapshot, state, DEFAULTS)
        for name, values in seen.items():
            values.append((snapshot.time_s, getattr(state, name).level))
        assert decision.share in governor.SHARES
        assert decision.group_scale in governor.SCALES
        assert decision.reason or decision == Decision(slice_ms=20.0)
    dwells = {
        "contention": governor.CONTENTION_S, "heat": governor.HEAT_S, "hold": governor.HOLD_S,
        "battery": governor.BATTERY_S, "desktop": governor.DESKTOP_S,
    }  # fmt: skip
    for name, (up, down) in dwells.items():
        for seconds, _, second in moves(seen[name]):
            assert seconds >= (up if second > 0 else down) - 1e-9, name
        if name in ("contention", "heat"):
            steps = {abs(b) for _, _, b in moves(seen[name])}
            assert steps <= {1.0}, "one step at a time"
    assert all(any(values) for values in seen.values())


@pytest.mark.parametrize("seed", range(5))
def test_worse_news_never_give_more(seed: int) -> None:
    r = random.Random(1000 + seed)
    worse: dict[str, Callable[[float], float]] = {
        "canary": lambda v: v * r.uniform(1, 3),
        "missed_per_s": lambda v: v + r.uniform(0, 10),
        "others_gpu": lambda v: min(1.0, v + r.random()),
        "psi_cpu": lambda v: v + r.uniform(0, 50),
        "psi_memory": lambda v: v + r.uniform(0, 20),
        "margin_c": lambda v: v - r.uniform(0, 10),
        "battery": lambda v: v - r.uniform(0, 20),
    }
    state = State()
    for snapshot in days(seed, 800):
        decision, new = decide(snapshot, state, DEFAULTS)
        for name, change in worse.items():
            value = getattr(snapshot, name)
            if value is None:
                continue
            changed = {name: change(value)}
            other, _ = decide(replace(snapshot, **changed), state, DEFAULTS)
            assert other.share <= decision.share, name
            assert other.group_scale <= decision.group_scale, name
            assert other.slice_ms <= decision.slice_ms, name
            assert other.device == "cpu" or decision.device == "gpu", name
            assert other.precision == "low" or decision.precision == "full", name
        state = new


@pytest.mark.parametrize("seed", range(4))
def test_it_asks_to_be_asked_again_exactly_when_something_is_due(seed: int) -> None:
    """Between news the decision changes at `look_s` and at no other time."""
    state = State()
    for snapshot in days(100 + seed, 600):
        decision, state = decide(snapshot, state, DEFAULTS)
        if state.look_s < snapshot.time_s + 300:
            early = replace(snapshot, time_s=(snapshot.time_s + state.look_s) / 2)
            same, _ = decide(early, state, DEFAULTS)
            assert same == decision
        else:
            late = replace(snapshot, time_s=snapshot.time_s + 299)
            same, _ = decide(late, state, DEFAULTS)
            assert same == decision


def test_a_compositor_that_misses_nothing_is_believed_before_the_canary() -> None:
    """Slices that wait for its frames take twice as long: that harms nobody but them."""
    decision, state = Decision(), State()
    for tenth in range(100):
        seen = Snapshot(0.1 * tenth, canary=4.0, missed_per_s=0.0, refresh_hz=60.0)
        decision, state = decide(seen, state, DEFAULTS)
    assert (decision.device, decision.share) == ("gpu", 1.0)
    for tenth in range(100, 200):
        seen = Snapshot(0.1 * tenth, canary=4.0, missed_per_s=4.0, refresh_hz=60.0)
        decision, state = decide(seen, state, DEFAULTS)
    assert (decision.device, decision.share) == ("gpu", 0.5)
    for tenth in range(200, 300):
        seen = Snapshot(0.1 * tenth, canary=9.0, missed_per_s=0.0, refresh_hz=60.0)
        decision, state = decide(seen, state, DEFAULTS)
    assert decision.device == "cpu"
