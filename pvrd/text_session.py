# SPDX-License-Identifier: Apache-2.0
"""Text: sessions, and the jobs that write into a client's pipe.

A token is recorded in the journal, then forwarded, then acknowledged. When the worker dies, another
one goes on from the record, so that the client sees every token once.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
from collections.abc import Mapping
from typing import Any

from pvrd import fds, options, queries, systemd
from pvrd.bus import Call
from pvrd.core import Core, Session, report
from pvrd.errors import Busy, Cancelled, InvalidArgument, PvrdError, ShuttingDown
from pvrd.jobs import Job
from pvrd.journal import Journal
from pvrd.models import Model
from pvrd.objects import Answer, method
from pvrd.stream import Last, LineStream, failure, pieces
from pvrd.text_move import Moved, Mover
from pvrd.worker import Inbox, Worker

ROLES = ("system", "user", "assistant", "tool")
MAX_MESSAGES = 1024
INLINE_TEXT = 8 << 10  # bytes; longer texts go in a memfd (escaped, one takes up to six)
TEXT_FDS = 3  # of a job: the journal's two and the stream's
WORKER_END = {"stop", "length", "cancelled"}
WAKE = "pvrd.wake"  # our own message in an inbox


class TextSession(Session):
    """org.pvrd.Pvrd1.TextSession. One job at a time."""

    INTERFACE = "org.pvrd.Pvrd1.TextSession"

    def __init__(self, core: Core, owner: str, uid: int, model: Model, chosen: Any) -> None:
        super().__init__(core, owner, uid, model, chosen)
        self.context: int = chosen["context"]
        self.kv: str = chosen["kv"]
        self.job: TextJob | None = None
        self._loading: asyncio.Task[None] | None = None

    def open(self) -> None:
        super().open()
        self._loading = self.core.task(self._load())

    def end(self) -> None:
        if self._loading is not None:
            self._loading.cancel()
        if self.job is not None:
            self.job.stop(Cancelled("the session was closed"))

    def news(self) -> None:
        super().news()
        if self.job is not None:
            self.job.news()

    async def _load(self) -> None:
        """Has the model loaded, and what the first prompt needs made ready before it comes."""

        async def loaded(worker: Worker) -> None:
            self.arrived(worker)
            if self.job is None:
                worker.send(
                    {
                        "t": "prepare", "session": self.id, "model": model.key,
                        "context": self.context, "kv": self.kv, "priority": self.priority,
                    }
                )  # fmt: skip

        def moved(_: str) -> None:
            self.set(progress=0.0)

        try:
            model = await self.core.precision.fitting(self.model)
            await self.core.supervisor.attempt(self.choice, model, self.priority, loaded, moved)
        except PvrdError as e:
            self.set(error=f"{e.name}: {e}")

    @method("Generate", "prompt:s options:a{sv}", "stream:h")
    async def generate(self, call: Call, prompt: str, given: dict[str, Any]) -> Answer:
        """Goes on with the prompt as it stands."""
        if not prompt:
            raise InvalidArgument("the prompt is empty")
        return self._begin({"kind": "generate", "prompt": prompt}, given)

    @method("Chat", "messages:aa{ss} options:a{sv}", "stream:h")
    async def chat(
        self, call: Call, messages: list[dict[str, str]], given: dict[str, Any]
    ) -> Answer:
        """Answers a talk through the model's chat template."""
        if not 1 <= len(messages) <= MAX_MESSAGES:
            raise InvalidArgument(f"a talk has 1 to {MAX_MESSAGES} messages")
        for i, message in enumerate(messages):
            if set(message) != {"role", "content"}:
                raise InvalidArgument(f"message {i} has the keys role and content, and no other")
            if message["role"] not in ROLES:
                raise InvalidArgument(f"the role of message {i} is one of {', '.join(ROLES)}")
        return self._begin({"kind": "chat", "messages": messages}, given)

    def _begin(self, header: dict[str, Any], given: Mapping[str, Any]) -> Answer:
        return self._start(header, options.parse(given, options.TEXT_JOB))

    def _start(self, header: dict[str, Any], settings: dict[str, Any]) -> Answer:
        core = self.core
        core.check_open()
        if settings["seed"] is None:
            settings["seed"] = secrets.randbits(32)
        if self.job is not None:
            raise Busy("this session writes already; one job at a time, position 1 in its queue")
        core.supervisor.places.admit(core.peers.usage(self.uid).jobs)
        core.supervisor.check_device(self.choice)
        settings.update(priority=self.priority, share=self.share)
        settings.update(context=self.context, kv=self.kv)
        job = TextJob(self, {**header, "settings": settings})
        self.job = job
        job.task = core.task(job.run())
        reader, job.stream.reader = job.stream.reader, -1
        return Answer([0], [reader])

    @method("CountTokens", "text:s", "count:u")
    async def count_tokens(self, call: Call, text: str) -> int:
        """Tokens of the text as it stands."""
        core = self.core
        core.check_open()
        core.supervisor.places.admit(core.peers.usage(self.uid).jobs)
        data = text.encode("utf-8", "replace")
        job = f"j{core.next_number()}"
        message: dict[str, Any] = {"t": "count", "job": job, "model": self.model.key}
        files: list[int] = []
        if len(data) <= INLINE_TEXT:
            message["text"] = text
        else:
            files.append(fds.memfd("pvrd-text"))

        async def count(worker: Worker) -> int:
            with worker.route("job", job) as inbox:
                worker.send(message, files)
                return int((await inbox.expect("count"))["tokens"])

        try:
            for fd in files:
                os.pwrite(fd, data, 0)
            with core.peers.job(self.uid):
                return await core.supervisor.attempt(
                    self.choice, self.model, self.priority, count, lambda _: None
                )
        finally:
            for fd in files:
                os.close(fd)

    @method("Embed", "texts:as options:a{sv}", "vectors:h")
    async def embed(self, call: Call, texts: list[str], given: dict[str, Any]) -> Answer:
        """A memfd with a row of float32 (little-endian, length 1) for each text."""
        chosen = options.parse(given, options.EMBED)
        asked = {"texts": queries.texts(texts), **chosen}
        _, result = await queries.ask(self, "embed", asked)
        try:
            fds.seal(result, fds.SEAL_SHRINK | fds.SEAL_GROW | fds.SEAL_WRITE)
            return Answer([0], [fds.read_only(result)])
        finally:
            os.close(result)

    @method("Classify", "text:s labels:as options:a{sv}", "label:s scores:a{sd}")
    async def classify(
        self, call: Call, text: str, labels: list[str], given: dict[str, Any]
    ) -> Answer:
        """The label that fits a text best, and the share of each."""
        chosen = options.parse(given, options.CLASSIFY)
        if not text.strip():
            raise InvalidArgument("the text is empty")
        asked = {"text": text, "labels": queries.labels(labels), **chosen}
        told, result = await queries.ask(self, "classify", asked)
        try:
            scores = json.loads(os.pread(result, int(told["bytes"]), 0))
        finally:
            os.close(result)
        return Answer([str(told["best"]), {str(k): float(v) for k, v in scores.items()}])

    @method("Extract", "text:s schema:s options:a{sv}", "json:s")
    async def extract(self, call: Call, text: str, schema: str, given: dict[str, Any]) -> str:
        """JSON that fits the schema, of what the text says."""
        chosen = options.parse(given, options.EXTRACT)
        if not text.strip() or not schema.strip():
            raise InvalidArgument("the text or the schema is empty")
        if len(schema) > options.TEXT_JOB["schema"].length:
            raise InvalidArgument("a schema has at most 65536 characters")
        talk = queries.extraction(text, schema, chosen.pop("instruction"))
        settings = {**options.parse({}, options.TEXT_JOB), **chosen, "schema": schema}
        stream = self._start({"kind": "chat", "messages": talk}, settings)
        return await queries.collected(stream.fds.pop())

    @method("Cancel")
    async def cancel(self, call: Call) -> None:
        """Ends the running job; without one nothing happens."""
        if self.job is not None:
            self.job.stop(None)

    @method("Close")
    async def close_call(self, call: Call) -> None:
        """Ends the session."""
        self.close()


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
        self._stopped = False
        self._error: PvrdError | None = None

    def stop(self, error: PvrdError | None) -> None:
        """Ends the job: with this error, or as `cancelled` for None. The first reason counts."""
        if not self._stopped and self.task is not None and not self.task.done():
            self._stopped = True
            self._error = error
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
        try:
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
                    "model": self.model.key, "settings": self.settings,
                    "header_bytes": self._journal.header_bytes, "delivered": self._journal.count,
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
