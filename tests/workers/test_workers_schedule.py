# SPDX-License-Identifier: Apache-2.0
"""Who gets the next slice: the worker's tasks by the rules of pvrd/scheduler.py, which has tests of
its own."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping

from pvrd.workers.schedule import Scheduler
from pvrd.workers.timings import Meter, Spans


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Fake:
    def __init__(
        self,
        clock: Clock,
        name: str,
        priority: int = 5,
        deadline: int | None = None,
        share: int = 0,
    ) -> None:
        self.name, self.priority, self.due, self.share = name, priority, deadline, share
        self.account = name
        self.parked = False
        self.spans = Spans(Meter(), clock)
        self.beside: list[Fake] = []

    def subject(self) -> Mapping[str, str]:
        return {"job": self.name}

    def ready(self) -> bool:
        return not self.parked

    def deadline(self) -> int | None:
        return self.due

    def step(self) -> bool:
        return True

    def close(self) -> None:
        return


class Bench:
    """A scheduler with a clock that slices alone move; a slice is a millisecond."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.scheduler = Scheduler(self.clock)

    def add(self, name: str, *args: int, **more: int) -> Fake:
        task = Fake(self.clock, name, *args, **more)
        self.scheduler.add(task)
        return task

    def run(self, slices: int, cost: Mapping[str, float] | None = None) -> list[str]:
        order = []
        for _ in range(slices):
            task = self.scheduler.pick()
            assert isinstance(task, Fake)
            task.spans.begins(self.clock.now)
            took = 0.001 * (cost or {}).get(task.name, 1.0)
            self.clock.now += took
            self.scheduler.charge(task, took)
            order.append(task.name)
        return order


def test_nothing_to_do() -> None:
    bench = Bench()
    assert bench.scheduler.pick() is None
    bench.add("a").parked = True
    assert bench.scheduler.pick() is None


def test_equal_tasks_take_turns() -> None:
    bench = Bench()
    for name in "ab":
        bench.add(name)
    order = bench.run(10)
    assert Counter(order) == {"a": 5, "b": 5}
    assert all(x != y for x, y in itertools.pairwise(order))


def test_priority_is_a_part_of_the_level() -> None:
    bench = Bench()
    bench.add("low", 4)
    bench.add("high", 7)
    assert abs(Counter(bench.run(100))["high"] - 80) <= 2


def test_a_higher_level_goes_first_and_the_lower_does_not_starve() -> None:
    bench = Bench()
    bench.add("low", 3)
    bench.run(3)
    bench.add("high", 4)
    order = bench.run(2000)
    assert order[0] == "high"
    assert 20 <= Counter(order)["low"] <= 70


def test_long_slices_count_as_what_they_take() -> None:
    bench = Bench()
    bench.add("long")
    bench.add("short")
    assert abs(Counter(bench.run(110, {"long": 10.0}))["long"] - 10) <= 1


def test_parked_task_saves_up_nothing() -> None:
    bench = Bench()
    parked = bench.add("parked")
    bench.add("other")
    parked.parked = True
    bench.run(50)
    parked.parked = False
    assert abs(Counter(bench.run(10))["parked"] - 5) <= 1


def test_newcomer_starts_level() -> None:
    bench = Bench()
    bench.add("old")
    bench.run(50)
    bench.add("new")
    assert abs(Counter(bench.run(10))["new"] - 5) <= 1


def test_a_share_holds_against_a_higher_level() -> None:
    bench = Bench()
    bench.add("promised", 0, share=40)
    bench.add("urgent", 15)
    assert Counter(bench.run(1000))["promised"] >= 0.95 * 400


def test_the_earliest_deadline_goes_first() -> None:
    bench = Bench()
    bench.add("text", 11)
    bench.add("late", deadline=101_000_000_000)
    bench.add("soon", deadline=100_500_000_000)
    order = bench.run(100)
    assert Counter(order)["soon"] >= 85
    assert Counter(order)["late"] == 0
    assert Counter(order)["text"] >= 5


def test_a_slice_for_several_is_charged_to_all_of_them() -> None:
    bench = Bench()
    a, b = bench.add("a"), bench.add("b")
    bench.add("alone")
    a.beside = b.beside = [a, b]
    order = Counter(bench.run(90))
    assert abs(order["alone"] - 30) <= 2


def test_waits_are_told_apart() -> None:
    bench = Bench()
    a, b = bench.add("a"), bench.add("b")
    b.parked = True
    bench.run(10)  # 10 ms of a
    b.parked = False
    bench.run(1)
    bench.scheduler.pick()
    taken = b.spans.take()
    assert taken["input"] >= 9.9
    assert 0 <= taken["queue"] <= 2.1
    assert a.spans.take()["host"] >= 9.9


def test_removed_task_runs_no_more() -> None:
    bench = Bench()
    a, b = bench.add("a"), bench.add("b")
    bench.scheduler.remove(a)
    bench.scheduler.remove(a)
    assert bench.run(3) == ["b"] * 3
    assert bench.scheduler.tasks() == [b]
    assert len(bench.scheduler) == 1


def test_what_is_due_at_a_time_is_seen_beside_the_running_task() -> None:
    bench = Bench()
    text, frame = Fake(bench.clock, "text"), Fake(bench.clock, "frame")
    bench.scheduler.add(text)
    bench.scheduler.add(frame)
    assert not bench.scheduler.dated(text)
    frame.due = 5_000_000_000
    assert bench.scheduler.dated(text)
    assert not bench.scheduler.dated(frame)
    frame.parked = True
    assert not bench.scheduler.dated(text)
