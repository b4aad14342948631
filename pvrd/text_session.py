# SPDX-License-Identifier: Apache-2.0
"""Text sessions: what a client may ask of one, checked before anything is begun. What then writes
into the client's pipe is pvrd/text_job.py.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import struct
from collections.abc import Mapping
from typing import Any

from pvrd import fds, options, queries
from pvrd.bus import Call
from pvrd.core import Core, Session, report
from pvrd.errors import Busy, Cancelled, InvalidArgument
from pvrd.models import Model
from pvrd.objects import Answer, method
from pvrd.text_job import TextJob
from pvrd.worker import Worker

ROLES = ("system", "user", "assistant", "tool")
MAX_MESSAGES = 1024
INLINE_TEXT = 8 << 10  # bytes; longer texts go in a memfd (escaped, one takes up to six)


class TextSession(Session):
    """org.pvrd.Pvrd1.TextSession. One job at a time."""

    INTERFACE = "org.pvrd.Pvrd1.TextSession"

    def __init__(self, core: Core, owner: str, uid: int, model: Model, chosen: Any) -> None:
        super().__init__(core, owner, uid, model, chosen)
        self.context: int = chosen["context"]
        self.kv: str = chosen["kv"]
        self.job: TextJob | None = None
        self.questions: set[asyncio.Future[Any]] = set()  # under way (pvrd/queries.py)
        self._loading: asyncio.Task[None] | None = None

    def open(self) -> None:
        super().open()
        self._loading = self.core.task(self._load())

    def end(self) -> None:
        if self._loading is not None:
            self._loading.cancel()
        if self.job is not None:
            self.job.stop(Cancelled("the session was closed"))
        self._drop_questions()

    def _drop_questions(self) -> None:
        for question in list(self.questions):
            question.cancel()

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
        except Exception as e:  # who waits for the session waits for this
            error = report(e)
            self.set(error=f"{error.name}: {error}")

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
            async with core.peers.present(call.sender):
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
        counted = chosen.pop("count_tokens")
        asked = {"texts": queries.texts(texts), **chosen}
        told, result = await queries.ask(self, "embed", asked)
        try:
            if counted:
                queries.append(result, struct.pack("<Q", max(0, int(told.get("tokens", 0)))))
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
        """Ends the running job, and all questions; without any nothing happens."""
        if self.job is not None:
            self.job.stop(None)
        self._drop_questions()

    @method("Close")
    async def close_call(self, call: Call) -> None:
        """Ends the session."""
        self.close()
