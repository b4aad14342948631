# SPDX-License-Identifier: Apache-2.0
"""The jobs of text sessions, which write into a client's pipe.

A token is recorded in the journal, then forwarded, then acknowledged. When the worker dies, another
one goes on from the record, so that the client sees every token once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pvrd import systemd
from pvrd.core import report
from pvrd.errors import Cancelled, PvrdError, ShuttingDown
from pvrd.jobs import Job
from pvrd.journal import Journal
from pvrd.stream import Last, LineStream, failure, pieces
from pvrd.text_move import Moved, Mover
from pvrd.worker import Inbox, Worker

if TYPE_CHECKING:
    from pvrd.text_session import TextSession

TEXT_FDS = 3  # of a job: the journal's two and the stream's
WORKER_END = {"stop", "length", "cancelled"}
WAKE = "pvrd.wake"  # our own message in an inbox


class TextJob:
    """One answer, from its journal to the last line of its stream."""

    def __init__(self, session: TextSession, header: dict[str, Any]) -> None:
        self.session = session
        self.id = f"j{session.core.next_number()}"
        self.settings: dict[str, Any] = header["settings"]
        self.model = session.model  # or its low form, from the beginning to the end
        self._low = ""  # why
        self.task: asyncio.Task[None] | None = None
        self.restarts = 0
        self._journal = Journal(header)
        slow_s = session.core.config.number("limits.slow_reader_s")
        try:
            self.stream = LineStream(slow_s, lambda: self.stop(Cancelled("the reader went away")))
        except BaseException:
            self._journal.close()
            raise
        self._started = False
        self._mover = Mover(session.core, session.uid, session.model, session.choice, self.news)
        self._inbox: Inbox | None = None
        self._worker: Worker | None = None
        self._why = ""  # of the last move
        self._begun = False
        self._stopped = False
        self._error: PvrdError | None = None

    def stop(self, error: PvrdError | None) -> None:
        """Ends the job: with this error, or as `cancelled` for None. The first reason counts."""
        if not self._stopped and self.task is not None and not self.task.done():
            self._stopped = True
            self._error = error
            if self._begun:  # a task that is cancelled before its first step does nothing at all
                self.task.cancel()

    def news(self) -> None:
        """A worker, or the governor's decision, changed."""
        inbox = self._inbox
        if inbox is not None and self._mover.target(inbox.worker) is not None:
            inbox.put({"t": WAKE})

    async def run(self) -> None:
        """Writes the whole stream; handles every error."""
        core = self.session.core
        last: Last
        self._begun = True
        try:
            if self._stopped:
                raise asyncio.CancelledError
            self._low = core.precision.why
            open_fds = core.peers.job(self.session.uid, TEXT_FDS)
            with open_fds, core.jobs.of(self._listed()) as job:
                self.model = await core.precision.fitting(self.model)
                self._mover.model = self.model
                message = await core.supervisor.attempt(
                    self.session.choice, self.model, self.session.priority,
                    self._write, self._moved, job,
                )  # fmt: skip
            last = ("end", self._end(message))
            core.stats.jobs_done += 1
        except asyncio.CancelledError:
            if not self._stopped:
                self._error = ShuttingDown("pvrd is ending")
            last = self._last_of_stop()
        except Exception as e:
            last = failure(report(e))
            core.stats.jobs_failed += 1
            systemd.log(
                systemd.NOTICE, f"text job {self.id} failed: {last[1]['error']}",
                MESSAGE_ID=systemd.MESSAGE_JOB_FAILED, PVRD_SESSION=self.session.id,
                PVRD_JOB=self.id, PVRD_REASON=str(last[1]["error"]),
            )  # fmt: skip
        # The session is free before the client can know that the job is over.
        self.session.job = None
        self._journal.close()
        self._mover.close()
        await self.stream.finish(last)

    def _listed(self) -> Job:
        session = self.session
        return Job(
            self.id, "text", session.model.name, session.uid, session.priority, session.share,
            session.path, tokens=lambda: self._journal.count,
        )  # fmt: skip

    def _last_of_stop(self) -> Last:
        if isinstance(self._error, ShuttingDown):
            self.session.core.stats.jobs_failed += 1
        else:
            self.session.core.stats.jobs_cancelled += 1
        if self._error is not None:
            return failure(self._error)
        return "end", self._end({"reason": "cancelled"})

    def _moved(self, why: str) -> None:
        self.restarts += 1
        self._why = why
        # A GPU that could not do this job is not asked again.
        self._mover.stay = self._mover.stay or why.startswith(("OutOfMemory: ", "DeviceLost: "))

    async def _write(self, worker: Worker) -> dict[str, Any]:
        """Has this worker write, from where the record ends; its text.end."""
        ended = False
        with worker.route("job", self.id) as inbox:
            if self._started:
                self.stream.write("device", {**self._device(worker), "reason": self._why[:300],
                                             "restarts": self.restarts})  # fmt: skip
            self._worker = worker
            worker.counters.jobs += 1
            self.session.arrived(worker)
            self._mover.arrived(worker)
            carried = self._mover.carried
            worker.send(
                {
                    "t": "text", "job": self.id, "session": self.session.id,
                    "carried": bool(carried),
                    "model": self.model.key, "header_bytes": self._journal.header_bytes,
                    "delivered": self._journal.count,
                },
                [self._journal.reader, *carried],
            )  # fmt: skip
            self._inbox = inbox
            self.news()
            try:
                message = await self._follow(worker, inbox)
                ended = True
                return message
            finally:
                self._inbox = None
                if not ended:
                    worker.send({"t": "cancel", "job": self.id})

    async def _follow(self, worker: Worker, inbox: Inbox) -> dict[str, Any]:
        leaving = False
        while True:
            message = await inbox.get()
            kind = message["t"]
            if kind == "text.start" and not leaving:  # what it may be writing is the next one's
                self._mover.taken()
            if kind == WAKE and not leaving and self._mover.due(worker):
                leaving = True
                self._mover.leave(worker, self.id)
            elif kind == "text.exported" and leaving:
                self._mover.exported(message)
                self._why = self._mover.reason
                raise Moved(self._why)
            elif kind == "text.start" and not self._started:
                self._started = True
                self._start(worker, message)
            elif kind == "text.token":
                await self._token(worker, message)
            elif kind == "text.suspect" and self._started:  # else there is nothing to doubt
                await self._suspect(worker, message)
            elif kind == "text.end":
                # The rest of the text may need lines of its own.
                await self.stream.room()
                return message

    def _start(self, worker: Worker, message: Mapping[str, Any]) -> None:
        """The stream's first line."""
        low = self.model.key != self.session.model.key
        start: dict[str, Any] = {
            "model": self.model.name,
            "precision": "low" if low else "full",
            "prompt_tokens": int(message.get("prompt_tokens", 0)),
            "context": int(message.get("context", 0)),
        }
        # A worker that died since it said this has no models, or loads them anew.
        loading = worker.models.get(self.model.key)
        loaded = loading and loading.future.done() and not loading.future.exception()
        info = loading.future.result() if loading and loaded else {}
        if parameters := info.get("parameters"):
            start["parameters"] = int(parameters)
        if low:
            start["precision_reason"] = self._low[:300]
        if self._why:  # it was to begin elsewhere
            start["reason"] = self._why[:300]
        self.stream.write("start", {**start, **self._device(worker), "seed": self.settings["seed"]})

    async def _token(self, worker: Worker, message: Mapping[str, Any]) -> None:
        n, token = int(message["n"]), int(message["id"])
        if n != self._journal.count:
            if n > self._journal.count:
                raise ValueError("the worker left a token out")
            return  # a token that a predecessor wrote already
        self._journal.append(token)
        worker.counters.tokens += 1
        self.session.core.stats.tokens += 1
        await self.stream.room()
        fields: dict[str, Any] = {"id": token}
        if self.settings["top5"] and isinstance(message.get("top5"), list):
            fields["top5"] = message["top5"][:5]
        if self.settings["logprobs"] and isinstance(message.get("logprobs"), list):
            fields["logprob"] = message.get("logprob")
            fields["logprobs"] = message["logprobs"][: self.settings["logprobs"]]
        for piece in pieces(str(message.get("text", ""))):
            self.stream.write("token", {"n": n, **fields, "text": piece})
            fields = {}
        worker.send({"t": "ack", "job": self.id, "n": self._journal.count})

    async def _suspect(self, worker: Worker, message: Mapping[str, Any]) -> None:
        since = min(max(int(message.get("since", 0)), 0), self._journal.count)
        await self.stream.room()
        fields = {key: str(message.get(key, ""))[:300] for key in ("kernel", "reason")}
        self.stream.write("suspect", {"since": since, **fields, **self._device(worker)})

    def _device(self, worker: Worker | None) -> dict[str, str]:
        if worker is None:
            return {"device": "", "device_name": ""}
        return {"device": worker.kind, "device_name": worker.name}

    def _end(self, message: Mapping[str, Any]) -> dict[str, Any]:
        *before, rest = pieces(str(message.get("text", "")))
        for piece in before:
            self.stream.write("token", {"n": max(0, self._journal.count - 1), "text": piece})
        reason = message.get("reason")
        given = message.get("stats")
        stats = {
            str(k)[:40]: v
            for k, v in (given.items() if isinstance(given, dict) else ())
            if isinstance(v, (int, float))
        }
        return {
            "reason": reason if reason in WORKER_END else "stop", "text": rest,
            "tokens": self._journal.count, **self._device(self._worker),
            "restarts": self.restarts, "stats": dict(list(stats.items())[:20]),
        }  # fmt: skip
