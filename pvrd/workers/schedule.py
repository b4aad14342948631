# SPDX-License-Identifier: Apache-2.0
"""The tasks of a worker and whose turn it is: pvrd/scheduler.py with tasks, and the time that each
waits."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from pvrd.scheduler import Ready
from pvrd.scheduler import Scheduler as Rules
from pvrd.workers.timings import Spans

PERCENT = 0.01


class Task(Protocol):
    """Something that runs in slices. What is optional besides: `share` (percent of the device that
    is guaranteed to all tasks of its `account`, a session), `rescue_s` (what a cheap end of the
    work with the present deadline takes) and `beside` (whom the last slice was for, itself too).
    """

    priority: int  # 0..15
    spans: Spans

    def subject(self) -> Mapping[str, str]:
        """Whom an `error` message about it names: {"job": …} or {"session": …}."""

    def ready(self) -> bool:
        """True when a slice can run now; False while it is parked or waits for another."""

    def deadline(self) -> int | None:
        """CLOCK_MONOTONIC nanoseconds by which its present work should be done, None without."""

    def step(self) -> bool:
        """One slice. False when the task is over.

        Raises:
            PvrError: the task failed and is over.
        """

    def close(self) -> None:
        """Gives up what it holds; the loop calls it once, after the last step."""


class Scheduler:
    """Tasks in turn. `clock`: seconds, CLOCK_MONOTONIC as deadlines are."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._rules = Rules()
        self._tasks: dict[int, Task] = {}
        self._clock = clock

    def __len__(self) -> int:
        return len(self._tasks)

    def tasks(self) -> list[Task]:
        """All tasks, ready or not."""
        return list(self._tasks.values())

    def add(self, task: Task) -> None:
        """Takes a task in; it starts level with the others."""
        share = PERCENT * float(getattr(task, "share", 0) or 0)
        account = getattr(task, "account", None)
        self._tasks[id(task)] = task
        self._rules.add(id(task), task.priority, share, account if share else None)

    def remove(self, task: Task) -> None:
        """Takes a task out; one that is not there is no error."""
        self._tasks.pop(id(task), None)
        self._rules.remove(id(task))

    def pick(self) -> Task | None:
        """The task that should run next, None when none is ready."""
        now = self._clock()
        found: list[Ready] = []
        for key, task in self._tasks.items():
            ready = task.ready()
            task.spans.waits("queue" if ready else "input", now)
            if ready:
                due = task.deadline()
                rescue = float(getattr(task, "rescue_s", 0.0)) if due is not None else 0.0
                found.append(Ready(key, None if due is None else due / 1e9, rescue))
        chosen = self._rules.pick(found, now)
        return None if chosen is None else self._tasks[chosen]  # type: ignore[index]

    def waiting(self) -> bool:
        """Could any task run now?"""
        return any(task.ready() for task in self._tasks.values())

    def dated(self, running: Task | None) -> bool:
        """Does a task beside the running one wait whose work is due at a time?"""
        return any(
            task is not running and task.ready() and task.deadline() is not None
            for task in self._tasks.values()
        )

    def charge(self, task: Task, seconds: float, pieces: int = 1) -> None:
        """Notes what a slice of the task took; those that it was for, too, bear a part of it.
        `pieces`: after each of so many it could have been ended.
        """
        beside: Sequence[Task] = getattr(task, "beside", ())
        keys = [id(task), *(id(other) for other in beside if other is not task)]
        self._rules.charge(keys, seconds, self._clock(), pieces)
