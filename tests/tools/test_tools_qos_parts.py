# SPDX-License-Identifier: Apache-2.0
"""The parts of benchmarks/qos: the compositor's beat and calibration, its frames, the days."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from benchmarks import qos_compositor, qos_days, qos_gpu
from benchmarks.qos_compositor import Beat, Scene, calibrate


@pytest.mark.parametrize("budget", [1.0, 6.0, 10.8])
def test_as_many_layers_as_the_budget_allows(budget: float) -> None:
    layers = calibrate(lambda count: 0.2 + 0.15 * count, budget, trials=1)
    assert abs(0.2 + 0.15 * layers - budget) <= 0.15
    assert calibrate(lambda _: 100.0, budget, trials=1) <= 2


def test_frames_that_are_late_leave_refreshes_out() -> None:
    beat = Beat(0, 100.0)  # 10 ms
    assert [beat.done(9_000_000), beat.due()] == [0, 10_000_000]
    assert [beat.done(21_000_000), beat.due()] == [0, 20_000_000]  # just late enough to be shown
    assert [beat.done(34_000_000), beat.due()] == [1, 40_000_000]
    assert [beat.done(75_000_000), beat.due()] == [3, 80_000_000]
    assert beat.missed == 4


def test_run_tells_of_each_frame(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [1_000_000_000]
    monkeypatch.setattr("time.monotonic_ns", lambda: clock[0])
    monkeypatch.setattr(qos_compositor, "sleep_until", lambda at: clock.__setitem__(0, at))

    def frame() -> float:
        clock[0] += 25_000_000
        return 0.025

    said: list[dict[str, Any]] = []
    end = qos_compositor.run(frame, 60, 60.0, said.append)
    assert len(end["took_ms"]) == len(end["began_s"]) == 60
    assert end["missed"] == 60  # each took two refreshes
    assert said[0]["latency_ms"] == 25.0
    assert said[0]["missed_per_s"] == pytest.approx(30.0, abs=1.0)


def test_percentiles_of_frames() -> None:
    frames = qos_gpu.Frames([float(i) for i in range(1, 101)], 0, 1.0, [], 1, "gpu")
    assert (frames.p50, frames.p99, frames.over(90.0)) == (50.5, 100.0, 10.0)


def test_what_video_got_done() -> None:
    done = qos_gpu.Beside(1.0, {"sent": 50, "in_time": 40, "lower": 10})
    assert (done.in_time, done.own) == (80.0, 60.0)
    assert qos_gpu.Beside(1.0, {}).in_time == 0.0


@pytest.mark.gpu
def test_layers_take_time() -> None:
    with Scene(software=True) as scene:
        for layers in (2, 64):
            scene.frame(layers)
        few, many = (min(scene.frame(n) for _ in range(5)) for n in (2, 64))
    assert many > few


def test_days_are_the_same_each_time() -> None:
    assert list(qos_days.rows()) == list(qos_days.rows())


def test_the_governor_lies_between_the_static_policies() -> None:
    ours, full, low = (
        qos_days.life(policy)
        for policy in (qos_days.governed(), qos_days.always("full"), qos_days.always("low"))
    )
    assert full.hours < ours.hours < low.hours
    assert full.per_joule < ours.per_joule < low.per_joule
    assert 0 < ours.full < ours.tokens
    assert all(a >= b for a, b in itertools.pairwise(ours.charge))


def test_the_governor_keeps_a_board_cool_and_a_desktop_smooth() -> None:
    assert qos_days.heat(qos_days.governed()).hot_s < qos_days.heat(qos_days.always("full")).hot_s
    ours, static = (qos_days.bursts(p) for p in (qos_days.governed(), qos_days.always("full")))
    assert 5 * ours.missed < static.missed
    assert ours.tokens > 0.5 * static.tokens
