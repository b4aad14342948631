# SPDX-License-Identifier: Apache-2.0
"""What a text job and a video session do when a check of a slice fails."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.backends.base import NOTHING
from engine.backends.crosscheck import CheckedBackend
from engine.pace import LIMIT
from engine.text.generate import Generation
from engine.text.model import TextModel
from engine.text.request import Request
from engine.video import frames
from pvrd.workers import protocol
from pvrd.workers.models import Models
from pvrd.workers.schedule import Scheduler
from pvrd.workers.text_jobs import TextJobs
from pvrd.workers.video_jobs import VideoTask
from tests.engine.backends.test_backends_crosscheck import Apart, Numpy
from tests.workers.conftest import journal
from tests.workers.rings import Ring, ring, same

__all__ = ["ring"]  # a fixture

WRONG = "swiglu.base"
PROMPT = "Once upon a time"
FAST = Path(frames.__file__).with_name("models") / "nsr-fast.pvrm"


class Sick(Numpy):
    """A device that computes a kernel wrongly from a slice on, and has another one for it."""

    kernel, begin = WRONG, 0

    def executable(self, program: Any, weights: Any, lent: Any = NOTHING) -> Apart:
        made: Any = super().executable(program, weights, lent)
        run_apart, aside = made.run_apart, self.aside

        def sick(*args: Any) -> Any:
            bad = self._counters["submissions"] >= self.begin and not aside
            made.off = self.kernel if bad else ""
            self._counters["submissions"] += 1
            return run_apart(*args)

        made.run_apart = sick
        return made

    def quarantined(self) -> dict[str, str]:
        return dict(self.aside)


class Checked(CheckedBackend):
    """Names the other kernel otherwise, as a device with several variants does."""

    def executable(self, program: Any, weights: Any, lent: Any = NOTHING) -> Any:
        made = super().executable(program, weights, lent)
        made.kernels -= set(getattr(self.inner, "aside"))  # noqa: B009
        return made


class Worker:
    """The parts of a worker that serve text."""

    def __init__(self, inner: Sick, path: Path) -> None:
        self.said: list[dict[str, Any]] = []
        self.scheduler = Scheduler()
        backend = Checked(inner, 1.0, np.random.default_rng(5))
        self.models = Models(backend, {}, lambda m: self.said.append(dict(m)), lambda: None)
        self.text = TextJobs(self.models, self.scheduler, lambda m: self.said.append(dict(m)))
        fd = os.open(path, os.O_RDONLY)
        self.models.load({"model": "m", "kind": "text"}, fd)
        os.close(fd)

    def start(self, job: str, n: int) -> None:
        header = {"kind": "generate", "prompt": PROMPT, "settings": {"max_tokens": n}}
        fd = journal(header, ())
        size = len(protocol.read_all(fd))
        message = {"job": job, "session": f"s{job}", "model": "m", "header_bytes": size}
        self.text.start({**message, "delivered": 0, "settings": {"context": 64}}, fd)
        os.close(fd)

    def run(self) -> None:
        while (task := self.scheduler.pick()) is not None:
            going_on = task.step()
            self.scheduler.charge(task, 1.0)
            if not going_on:
                self.scheduler.remove(task)
                self.text.dropped(task)
                task.close()
            for message in self.said:
                if message["t"] == "text.token":
                    self.text.ack(message["job"], message["n"] + 1)

    def of(self, job: str, kind: str) -> list[dict[str, Any]]:
        return [m for m in self.said if m.get("job") == job and m["t"] == kind]


@pytest.fixture
def right(tiny: Path) -> Iterator[Any]:
    """right(ids, n): the answer that goes on from ids, of a sound device."""
    model = TextModel.load(tiny, "", Numpy())

    def generate(ids: list[int], n: int) -> list[int]:
        state = model.state(64)
        settings = {"max_tokens": n, "context": 64}
        run = Generation(state, Request("generate", PROMPT, settings=settings), ids)
        while not run.finished:
            run.step()
        state.close()
        return run.answer

    yield generate
    model.close()


def test_a_sick_device_from_the_beginning(tiny: Path, right: Any) -> None:
    worker = Worker(Sick(), tiny)
    worker.start("1", 12)
    worker.run()
    (suspect,) = worker.of("1", "text.suspect")
    assert (suspect["since"], suspect["kernel"]) == (0, WRONG)
    assert "of h was wrong" in suspect["reason"]
    assert worker.said.index(suspect) < worker.said.index(worker.of("1", "text.token")[0])
    assert [m["id"] for m in worker.of("1", "text.token")] == right([], 12)


def test_a_device_that_falls_sick(tiny: Path, right: Any) -> None:
    sick = Sick()
    sick.begin = 20
    worker = Worker(sick, tiny)
    worker.start("1", 40)
    worker.start("2", 40)
    worker.run()
    for job in ("1", "2"):  # both have used the kernel
        (suspect,) = worker.of(job, "text.suspect")
        sent = worker.of(job, "text.token")
        ids = [m["id"] for m in sent]
        before = [m for m in sent if worker.said.index(m) < worker.said.index(suspect)]
        since = suspect["since"]
        assert 1 <= since <= len(before) < 40
        assert ids[:since] == right([], 40)[:since]
        # Nothing is taken back, and the rest follows from what was said, with KV made anew.
        assert [m["n"] for m in sent] == list(range(40))
        assert ids == right(ids[: len(before)], 40)


def test_a_frame_is_begun_again(ring: Ring) -> None:
    said: list[dict[str, Any]] = []
    inner = Sick()
    inner.kernel = "conv3x3.oc8"
    checked = Checked(inner, 1.0, np.random.default_rng(5))
    models = Models(checked, {}, lambda m: said.append(dict(m)), lambda: None)
    fd = os.open(FAST, os.O_RDONLY)
    models.load({"model": "m", "kind": "video"}, fd)
    os.close(fd)
    streams = LIMIT.streams
    task = VideoTask(models, ring.message(), ring.fd, lambda m: said.append(dict(m)))
    assert LIMIT.streams == streams + 1
    ring.put(0, 0)
    task.submit({"seq": 0, "slot": 0})
    while task.ready():
        task.step()
    (done,) = [m for m in said if m["t"] == "frame.done"]
    assert (done["status"], done["tiles_fallback"]) == (0, 0)
    assert done["aside_ms"] > 0
    assert list(inner.aside) == ["conv3x3.oc8"]
    assert same(ring.get(0), ring.expected(0))
    task.close()
    assert LIMIT.streams == streams
