# SPDX-License-Identifier: Apache-2.0
"""Who gets the next slice."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping

from pvrd.workers.schedule import DEADLINE_RUN, Scheduler


class Fake:
    def __init__(self, name: str, priority: int = 5, deadline: int | None = None) -> None:
        self.name, self.priority, self.due = name, priority, deadline
        self.parked = False

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


def run(scheduler: Scheduler, slices: int, cost: Mapping[str, float] | None = None) -> list[str]:
    order = []
    for _ in range(slices):
        task = scheduler.pick()
        assert isinstance(task, Fake)
        scheduler.charge(task, (cost or {}).get(task.name, 1.0))
        order.append(task.name)
    return order


def test_nothing_to_do() -> None:
    scheduler = Scheduler()
    assert scheduler.pick() is None
    task = Fake("a")
    task.parked = True
    scheduler.add(task)
    assert scheduler.pick() is None


def test_equal_tasks_take_turns() -> None:
    scheduler = Scheduler()
    for name in "ab":
        scheduler.add(Fake(name))
    order = run(scheduler, 10)
    assert Counter(order) == {"a": 5, "b": 5}
    assert all(x != y for x, y in itertools.pairwise(order))


def test_priority_is_a_share_of_time() -> None:
    scheduler = Scheduler()
    scheduler.add(Fake("low", 0))
    scheduler.add(Fake("high", 3))
    counts = Counter(run(scheduler, 100))
    assert abs(counts["high"] - 80) <= 2


def test_long_slices_count_as_what_they_take() -> None:
    scheduler = Scheduler()
    scheduler.add(Fake("long"))
    scheduler.add(Fake("short"))
    counts = Counter(run(scheduler, 110, {"long": 10.0}))
    assert abs(counts["long"] - 10) <= 1


def test_parked_task_saves_up_nothing() -> None:
    scheduler = Scheduler()
    parked, other = Fake("parked"), Fake("other")
    parked.parked = True
    scheduler.add(parked)
    scheduler.add(other)
    run(scheduler, 50)
    parked.parked = False
    assert abs(Counter(run(scheduler, 10))["parked"] - 5) <= 1


def test_newcomer_starts_level() -> None:
    scheduler = Scheduler()
    scheduler.add(Fake("old"))
    run(scheduler, 50)
    scheduler.add(Fake("new"))
    assert abs(Counter(run(scheduler, 10))["new"] - 5) <= 1


def test_earliest_deadline_goes_first_but_does_not_starve_the_rest() -> None:
    scheduler = Scheduler()
    scheduler.add(Fake("text"))
    scheduler.add(Fake("late", deadline=20))
    scheduler.add(Fake("soon", deadline=10))
    order = run(scheduler, 2 * (DEADLINE_RUN + 1))
    assert order[:DEADLINE_RUN] == ["soon"] * DEADLINE_RUN
    assert Counter(order) == {"soon": 2 * DEADLINE_RUN, "text": 2}


def test_removed_task_runs_no_more() -> None:
    scheduler = Scheduler()
    a, b = Fake("a"), Fake("b")
    scheduler.add(a)
    scheduler.add(b)
    scheduler.remove(a)
    scheduler.remove(a)
    assert run(scheduler, 3) == ["b"] * 3
    assert scheduler.tasks() == [b]
    assert len(scheduler) == 1
