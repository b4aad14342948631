# SPDX-License-Identifier: Apache-2.0
"""Which job gets the next slice: frames with deadlines first, the rest by shares of time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

MAX_PRIORITY = 15
# So many slices in a row may go to deadlines while other jobs wait; then one of those gets a slice.
DEADLINE_RUN = 8


class Task(Protocol):
    """Something that runs in slices."""

    priority: int  # 0..15

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
    """Stride scheduling over measured slice times: a task of priority p gets a share of weight p +
    1.

    A task that was not ready does not save up time: when it comes back it starts level with the
    others.
    """

    def __init__(self) -> None:
        self._passes: dict[Task, float] = {}
        self._waiting: set[Task] = set()
        self._now = 0.0
        self._deadline_run = 0

    def __len__(self) -> int:
        return len(self._passes)

    def tasks(self) -> list[Task]:
        """All tasks, ready or not."""
        return list(self._passes)

    def add(self, task: Task) -> None:
        """Takes a task in; it starts level with the others."""
        self._passes[task] = self._now

    def remove(self, task: Task) -> None:
        """Takes a task out; one that is not there is no error."""
        self._passes.pop(task, None)
        self._waiting.discard(task)

    def pick(self) -> Task | None:
        """The task that should run next, None when none is ready."""
        ready: list[Task] = []
        for task in self._passes:
            if not task.ready():
                self._waiting.add(task)
                continue
            if task in self._waiting:
                self._waiting.discard(task)
                self._passes[task] = max(self._passes[task], self._now)
            ready.append(task)
        urgent = [(d, i) for i, t in enumerate(ready) if (d := t.deadline()) is not None]
        others = [t for t in ready if t.deadline() is None]
        if urgent and not (others and self._deadline_run >= DEADLINE_RUN):
            self._deadline_run += 1
            return ready[min(urgent)[1]]
        self._deadline_run = 0
        if not others:
            return None
        chosen = min(others, key=lambda t: self._passes[t])
        self._now = max(self._now, self._passes[chosen])
        return chosen

    def charge(self, task: Task, seconds: float) -> None:
        """Notes what a slice of the task took."""
        if task in self._passes:
            weight = 1 + min(max(task.priority, 0), MAX_PRIORITY)
            self._passes[task] += seconds / weight
