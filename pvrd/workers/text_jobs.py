# SPDX-License-Identifier: Apache-2.0
"""Text jobs: the journal is read, the prompt prefilled, the answer sent token by token.

A job belongs to a session. The session keeps its KV state from job to job and runs one job at a
time, in the order of arrival. A predecessor's job goes on where pvrd's record ends: its ids are
replayed, not sent again.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from engine.backends.base import Executable
from engine.backends.crosscheck import Suspect
from engine.errors import DeviceLost, InvalidArgument, OutOfMemory, PvrError
from engine.text import carry, journal, request
from engine.text.batch import MAX_LANES, Batch, Batches
from engine.text.generate import Generation
from engine.text.model import State
from engine.text.request import End, Event, Token
from pvrd.workers import protocol
from pvrd.workers.models import Models
from pvrd.workers.schedule import Scheduler, Task
from pvrd.workers.text_state import DEFAULT_PRIORITY, ReadyTask, Session
from pvrd.workers.timings import Spans

Send = Callable[[Mapping[str, Any]], None]
Company = Callable[["TextTask"], tuple["list[TextTask]", Batch | None]]
Room = Callable[[Callable[[], State]], State]
_T = TypeVar("_T")


class TextTask:
    """One job, from its journal to its `text.end`."""

    def __init__(
        self,
        models: Models,
        session: Session,
        message: Mapping[str, Any],
        fd: int,
        send: Send,
        company: Company,
        room: Room,
        carried: int = -1,
        soon: Send | None = None,
    ) -> None:
        """Reads the journal; `fd` stays the caller's, and so does `carried`: what another worker
        computed of this job (engine/text/carry.py). `company` knows whose tokens can come of the
        same slice, `room` how to find memory. `soon` sends what may wait for the next slice to
        begin, and `send` nothing before that.

        Raises:
            InvalidArgument: a damaged journal.
            UnknownModel, UnsupportedModel
        """
        self.job = str(message["job"])
        self.session = session
        self.model = str(message["model"])
        self._request, self._delivered = journal.read(fd, int(message.get("delivered", 0)))
        settings = self._request.settings
        self.priority = int(settings.get("priority", DEFAULT_PRIORITY))
        self.share = int(settings.get("share") or 0)
        self.account = str(message["session"])
        self.spans = Spans(models.meter)
        self.beside: list[TextTask] = []  # whom the last slice was for
        self._context = int(settings.get("context") or 0)
        self._kv = "q8" if settings.get("kv") == "q8" else "f16"
        self._send, self._soon = send, soon or send
        self._sent = self._acked = len(self._delivered)
        self._generation: Generation | None = None
        self._models = models
        # For each kernel how many tokens there were when it was last found right.
        self._right: dict[str, int] = {}
        self._company = company
        self._room = room
        self._failed: PvrError | None = None
        models.text(self.model)
        models.acquire(self.model)
        self._carried = os.dup(carried) if carried >= 0 else -1

    def subject(self) -> Mapping[str, str]:
        return {"job": self.job}

    def deadline(self) -> int | None:
        return None

    def ready(self) -> bool:
        """It is its turn in the session, and pvrd keeps up."""
        return self.session.jobs[0] is self and self._sent - self._acked < protocol.MAX_AHEAD

    @property
    def brisk(self) -> bool:
        """Does its next slice go to the device at once?"""
        return self.next_id() is not None

    def ack(self, n: int) -> None:
        """pvrd has forwarded the first n tokens."""
        self._acked = max(self._acked, n)

    def step(self) -> bool:
        """One slice; False after `text.end`. A slice that a check found wrong gives nothing but
        `text.suspect`, and the next one begins again with other kernels. Where others of the same
        model are as far, the slice is also theirs.

        Raises:
            ContextFull, InvalidArgument, BadModel, OutOfMemory, DeviceLost
            Quarantined: there are no other kernels.
        """
        if self._failed is not None:
            raise self._failed
        if self._generation is not None and (found := self.session.doubt()) is not None:
            self.suspect(*found)
        if self._generation is None:
            with self._models.pipelines(self.subject()):
                asked = self.model, self._context, self._kv
                state = self._room(lambda: self.session.state(*asked))
                notes = self._adopt(state)
            self._generation = Generation(state, self._request, self._delivered, notes)
        tasks, batch = self._company(self)
        self.beside = [] if batch is None else tasks
        if batch is None:
            self._alone(self._generation)
        else:
            now = time.monotonic()
            for other in tasks:
                other.spans.begins(now)
            _together(tasks, batch)
        return self._generation is None or not self._generation.finished

    def _adopt(self, state: State) -> dict[str, float]:
        """Takes in what another worker computed, and its notes; what cannot be taken is computed
        here.
        """
        if self._carried >= 0:
            try:
                return carry.adopt(state, self._carried) or {}
            except DeviceLost:
                raise
            except (PvrError, OSError):
                state.tokens.clear()
            finally:
                self._let_go()
        return {}

    def _let_go(self) -> None:
        if self._carried >= 0:
            os.close(self._carried)
            self._carried = -1

    def export(self, fd: int, limit: int) -> int:
        """Writes what was computed for another worker; bytes, 0 when there is nothing to give.

        Raises:
            DeviceLost
        """
        if self._generation is None or self.session.doubt() is not None:
            return 0
        try:
            with self._models.pipelines(self.subject()):
                made = self._generation
                return carry.export(made.state, fd, limit, made.notes)
        except (OSError, Suspect):
            return 0

    def next_id(self) -> tuple[State, int] | None:
        """Its state and the one token that its next slice feeds, when it is decoding."""
        if self._generation is None or self._failed is not None or self.session.doubt() is not None:
            return None
        token = self._generation.next_id
        return None if token is None else (self._generation.state, token)

    def _alone(self, generation: Generation) -> None:
        executable, sent = generation.state.executable, self._sent
        passed = _passed(executable)
        try:
            events = generation.step(protocol.MAX_AHEAD - (sent - self._acked))
        except Suspect as e:
            self.suspect(e.kernel, e.reason)
            return
        self._tell(events)
        # A check of a slice of several tokens may have been one of the first.
        self._note(passed, executable, min(self._sent, sent + 1))

    def fed(self, batch: Batch, took: float, passed: Mapping[str, int]) -> None:
        """A batch has fed its token. What goes wrong with it is its own: the next step says it."""
        assert self._generation is not None
        state = self._generation.state
        try:
            self._tell(self._generation.fed(batch.best(state), lambda: batch.logits(state), took))
        except DeviceLost:
            raise
        except PvrError as e:
            self._failed = e
        self._note(passed, batch.executable, self._sent)

    def _note(self, before: Mapping[str, int], executable: Executable, sent: int) -> None:
        """Kernels that the slice just run was checked for were right up to token `sent`."""
        for name, count in _passed(executable).items():
            if count != before.get(name):
                self._right[name] = sent

    def suspect(self, kernel: str, reason: str) -> None:
        """Tells from which token on the answer is in doubt, and gives up what was computed."""
        assert self._generation is not None
        since = min(self._right.get(kernel, 0), self._sent)
        self._send(
            {"t": "text.suspect", "job": self.job, "since": since, "kernel": kernel,
             "reason": reason}
        )  # fmt: skip
        self._delivered = self._generation.answer
        self._generation = None
        self.session.forget()

    def cancel(self) -> None:
        """Says `text.end` with the reason `cancelled`; the task is over."""
        if self._generation is None:
            stats = {"prefill_s": 0.0, "prefill_tokens": 0, "decode_s": 0.0, "decode_tokens": 0}
            self._tell([End("cancelled", "", stats)])
        else:
            self._tell(self._generation.cancel())

    def close(self) -> None:
        self._let_go()
        self._models.release(self.model)

    def _tell(self, events: list[Event]) -> None:
        for event in events:
            told = {**request.message(event), "job": self.job}
            if isinstance(event, End):
                told["stats"] = {**event.stats, **self.spans.sums()}
            (self._soon if isinstance(event, Token) else self._send)(told)
            if isinstance(event, Token):
                self._sent = event.n + 1
                self.spans.take()


def _passed(executable: Executable) -> dict[str, int]:
    return dict(getattr(executable, "passed", {}))


def _together(tasks: Sequence[TextTask], batch: Batch) -> None:
    """One slice for all of them."""
    passed = _passed(batch.executable)
    began = time.perf_counter()
    try:
        batch.run(dict(filter(None, (task.next_id() for task in tasks))))
    except Suspect as e:
        for task in tasks:
            task.suspect(e.kernel, e.reason)
        return
    took = time.perf_counter() - began
    for task in tasks:
        task.fed(batch, took, passed)


class TextJobs:
    """All text sessions and jobs of the worker."""

    def __init__(
        self, models: Models, scheduler: Scheduler, send: Send, soon: Send | None = None
    ) -> None:
        self._models = models
        self._scheduler = scheduler
        self._send, self._soon = send, soon
        self._sessions: dict[str, Session] = {}
        self._tasks: dict[str, TextTask] = {}
        self._batches = Batches()

    def start(self, message: Mapping[str, Any], fd: int, carried: int = -1) -> None:
        """Takes a job in; `fd`, its journal, and `carried` stay the caller's.

        Raises:
            InvalidArgument, UnknownModel, UnsupportedModel
        """
        job, name = str(message["job"]), str(message["session"])
        if job in self._tasks:
            raise InvalidArgument(f"There is a job {job} already.")
        session = self._sessions.get(name) or Session(self._models, self._batches)
        task = TextTask(
            self._models, session, message, fd, self._send, self._company, self.roomy, carried,
            self._soon,
        )  # fmt: skip
        self._sessions[name] = session
        session.jobs.append(task)
        self._tasks[job] = task
        session.begun = True
        self._scheduler.add(task)

    def prepare(self, message: Mapping[str, Any]) -> None:
        """A session was opened: its caches and recordings are made when nobody else has work."""
        name = str(message["session"])
        session = self._sessions.setdefault(name, Session(self._models, self._batches))
        self._scheduler.add(ReadyTask(self._models, self._scheduler, session, message))

    def give_back(self) -> bool:
        """Frees what was made for prompts that have not come; False when there is nothing."""
        idle = [s for s in self._sessions.values() if s.kept and not s.begun]
        for session in idle:
            session.forget()
        return bool(idle)

    def roomy(self, action: Callable[[], _T]) -> _T:
        """Does something that takes memory; once more with what was made ahead given back.

        Raises:
            OutOfMemory: as the action, as all else.
        """
        try:
            return action()
        except OutOfMemory:
            if not self.give_back():
                raise
        return action()

    def _company(self, task: TextTask) -> tuple[list[TextTask], Batch | None]:
        """Tasks whose next tokens can come of one slice with this one's, and what computes them."""
        own = task.next_id()
        if own is None:
            return [task], None
        found = [
            other
            for other in self._tasks.values()
            if other is task
            or (other.ready() and (at := other.next_id()) and at[0].model is own[0].model)
        ]
        first = found.index(task) // MAX_LANES * MAX_LANES
        tasks = found[first : first + MAX_LANES]
        if len(tasks) == 1:
            return tasks, None
        states = [at[0] for t in tasks if (at := t.next_id())]
        return tasks, self._batches.of(states, lambda: self._models.pipelines(task.subject()))

    def ack(self, job: str, n: int) -> None:
        """pvrd has forwarded n tokens of a job; one that is over is no error."""
        if (task := self._tasks.get(job)) is not None:
            task.ack(n)

    def cancel(self, job: str) -> None:
        """Ends a job; one that is over is no error."""
        if (task := self._tasks.get(job)) is not None:
            task.cancel()
            self._scheduler.remove(task)
            self.dropped(task)
            task.close()

    def export(self, job: str, fd: int, limit: int) -> None:
        """The job goes on in another worker: it is over here, and says `text.exported` as its last
        word. What was computed of it is in the file then, which stays the caller's, unless that
        would have above `limit` bytes. A job that is over is no error.
        """
        if (task := self._tasks.get(job)) is None:
            return
        nbytes = task.export(fd, limit)
        self._scheduler.remove(task)
        self.dropped(task)
        task.close()
        if not task.session.jobs:
            task.session.forget()
        self._send({"t": "text.exported", "job": job, "bytes": nbytes})

    def dropped(self, task: Task) -> None:
        """A task is over: the session's next job has its turn."""
        if isinstance(task, TextTask) and self._tasks.pop(task.job, None) is not None:
            task.session.jobs.remove(task)
            if task.session.closing and not task.session.jobs:
                task.session.forget()

    def close_session(self, name: str) -> None:
        """Ends a session: its jobs are cancelled and its memory is free."""
        if (session := self._sessions.pop(name, None)) is not None:
            session.closing = True
            for task in list(session.jobs):
                self.cancel(task.job)
            session.forget()

    def forget(self, model: str) -> None:
        """Gives back what idle sessions keep for a model that pvrd wants unloaded."""
        for session in self._sessions.values():
            if session.model == model and not session.jobs:
                session.forget()
