# SPDX-License-Identifier: Apache-2.0
"""Caches and recordings of a text session, made before its first prompt comes."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from engine.backends.base import Backend
from engine.backends.cpu import CpuBackend
from engine.errors import OutOfMemory
from pvrd.workers.models import Models
from pvrd.workers.schedule import Scheduler
from pvrd.workers.text_jobs import TextJobs
from pvrd.workers.text_state import ReadyTask
from pvrd.workers.timings import Spans
from tests.workers.conftest import Peer, journal

PREPARE = {"session": "s", "model": "m", "context": 64, "kv": "f16"}


class Counting:
    """A backend that counts what is recorded."""

    def __init__(self, real: Backend) -> None:
        self._real, self.recorded = real, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def executable(self, *given: Any, **named: Any) -> Any:
        self.recorded += 1
        return self._real.executable(*given, **named)


class Other:
    """A task of somebody else that never has anything to do."""

    priority, share, account = 5, 0, "other"

    def __init__(self, models: Models) -> None:
        self.spans = Spans(models.meter)

    def subject(self) -> Mapping[str, str]:
        return {}

    def deadline(self) -> int | None:
        return None

    def ready(self) -> bool:
        return False

    def step(self) -> bool:
        raise AssertionError

    def close(self) -> None:
        pass


class Bench:
    """A worker's text jobs without a worker."""

    def __init__(self, tiny: Path) -> None:
        self.backend: Any = Counting(CpuBackend(1))
        self.said: list[Mapping[str, Any]] = []
        self.models = Models(self.backend, {}, self.said.append, lambda: None)
        self.scheduler = Scheduler()
        self.jobs = TextJobs(self.models, self.scheduler, self.said.append)
        with tiny.open("rb") as file:
            self.models.load({"model": "m", "kind": "text"}, file.fileno())

    def turns(self) -> None:
        """All that can be done now."""
        while (task := self.scheduler.pick()) is not None:
            if not task.step():
                self.scheduler.remove(task)
                self.jobs.dropped(task)
                task.close()

    def prompt(self, session: str, context: int = 64) -> None:
        header = {
            "kind": "generate", "prompt": "Once", "settings": {"max_tokens": 2, "context": context}
        }  # fmt: skip
        fd = journal(header, [])
        self.jobs.start({"job": f"j{session}", "session": session, "model": "m"}, fd)
        os.close(fd)


@pytest.fixture
def bench(tiny: Path) -> Iterator[Bench]:
    made = Bench(tiny)
    yield made
    for session in list(made.jobs._sessions):
        made.jobs.close_session(session)
    made.models.unload("m")


def test_a_prompt_finds_what_was_made_for_it(bench: Bench) -> None:
    bench.jobs.prepare(PREPARE)
    bench.turns()
    assert bench.backend.recorded == 1
    bench.prompt("s")
    bench.turns()
    assert bench.backend.recorded == 1
    assert bench.said[-1]["t"] == "text.end"


def test_a_prompt_that_came_first_makes_it_itself(bench: Bench) -> None:
    bench.jobs.prepare(PREPARE)
    bench.prompt("s")
    bench.turns()
    assert bench.backend.recorded == 1


def test_another_context_than_was_thought_is_made_anew(bench: Bench) -> None:
    bench.jobs.prepare(PREPARE)
    bench.turns()
    bench.prompt("s", context=32)
    bench.turns()
    assert bench.backend.recorded == 2
    assert bench.said[-1]["t"] == "text.end"


def test_it_waits_until_nobody_else_has_work(bench: Bench) -> None:
    other = Other(bench.models)
    bench.scheduler.add(other)
    bench.jobs.prepare(PREPARE)
    bench.turns()
    assert bench.backend.recorded == 0
    bench.scheduler.remove(other)
    bench.turns()
    assert bench.backend.recorded == 1


def test_a_session_that_was_closed_gets_none(bench: Bench) -> None:
    bench.jobs.prepare(PREPARE)
    bench.jobs.close_session("s")
    bench.turns()
    assert bench.backend.recorded == 0


def test_who_needs_the_memory_gets_it(bench: Bench) -> None:
    bench.jobs.prepare(PREPARE)
    bench.turns()
    tries = []

    def action() -> str:
        tries.append(bench.jobs._sessions["s"].kept)
        if tries[-1]:
            raise OutOfMemory("It needs 9 of 8 bytes.")
        return "done"

    assert bench.jobs.roomy(action) == "done"
    assert tries == [True, False]
    bench.prompt("s")
    bench.turns()
    assert not bench.jobs.give_back(), "a session that is in use keeps what it has"
    with pytest.raises(OutOfMemory):
        bench.jobs.roomy(action)


def test_what_cannot_be_made_is_no_error(bench: Bench) -> None:
    bench.jobs.prepare({**PREPARE, "model": "none"})
    bench.jobs.prepare({**PREPARE, "context": 1 << 30, "session": "t"})
    bench.turns()
    assert [m for m in bench.said if m["t"] == "error"] == []
    assert not any(isinstance(task, ReadyTask) for task in bench.scheduler.tasks())


def test_the_worker_makes_it_and_answers_the_same(peer: Callable[..., Peer], tiny: Path) -> None:
    worker = peer(threads=1)
    worker.load(tiny)
    worker.text("1", "Once", session="a", max_tokens=8)
    plain = [m for m in worker.answer("1") if m["t"] == "text.token"]
    worker.send("prepare", session="b", model="m", context=0, kv="f16")
    assert worker.expect("busy", session="b", on=True)
    assert worker.expect("busy", session="b", on=False)
    worker.text("2", "Once", session="b", max_tokens=8)
    again = [m for m in worker.answer("2") if m["t"] == "text.token"]
    assert [m["id"] for m in again] == [m["id"] for m in plain]
