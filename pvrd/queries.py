# SPDX-License-Identifier: Apache-2.0
"""Calls on a text session that have one answer: vectors, labels, JSON by a schema."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pvrd import fds
from pvrd.errors import (
    Cancelled,
    Internal,
    InvalidArgument,
    OutOfMemory,
    PvrdError,
    Timeout,
    from_name,
)
from pvrd.jobs import Job
from pvrd.objects import METHOD_S

if TYPE_CHECKING:
    from pvrd.text_session import TextSession
    from pvrd.worker import Worker

MAX_TEXTS = 1024
MAX_LABELS = 64


async def ask(
    session: TextSession, kind: str, asked: Mapping[str, Any]
) -> tuple[dict[str, Any], int]:
    """Has a worker answer a question of this kind; what it told, and a memfd with the answer, which
    is the caller's.

    Raises:
        Cancelled: by Cancel, or with the session.
        Timeout: it takes longer than a method may.
        PvrdError: what the worker said.
    """
    core = session.core
    core.check_open()
    core.supervisor.places.admit(core.peers.usage(session.uid).jobs)
    core.supervisor.check_device(session.choice)
    job = f"j{core.next_number()}"
    data = json.dumps(asked).encode()
    message = {"t": "query", "job": job, "kind": kind, "model": session.model.key,
               "context": session.context, "priority": session.priority,
               "share": session.share, "session": session.id}  # fmt: skip
    request = fds.memfd("pvrd-question")
    try:
        result = fds.memfd("pvrd-answer")
    except PvrdError:
        os.close(request)
        raise

    async def answer(worker: Worker) -> dict[str, Any]:
        ended = False
        with worker.route("job", job) as inbox:
            worker.counters.jobs += 1
            worker.send(message, [request, result])
            try:
                told = await inbox.expect("query.done")
                ended = True
                return told
            except PvrdError:
                ended = True
                raise
            finally:
                if not ended:
                    worker.send({"t": "cancel", "job": job})

    try:
        try:
            os.pwrite(request, data, 0)
        except OSError as e:
            raise OutOfMemory(
                f"a question of {len(data)} bytes has no room: {e.strerror}"
            ) from None
        listed = Job(job, kind, session.model.name, session.uid, session.priority, session.share,
                     session.path)  # fmt: skip
        with core.peers.job(session.uid), core.jobs.of(listed):
            work = asyncio.ensure_future(
                core.supervisor.attempt(
                    session.choice, session.model, session.priority, answer, lambda _: None,
                    listed,
                )
            )  # fmt: skip
            session.questions.add(work)
            work.add_done_callback(session.questions.discard)
            async with asyncio.timeout(METHOD_S - 1):
                told = await work
        core.stats.jobs_done += 1
        return told, os.dup(result)
    except asyncio.CancelledError:
        core.stats.jobs_cancelled += 1
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        raise Cancelled(
            "the session was closed" if session.closed else "the job was cancelled"
        ) from None
    except PvrdError:
        core.stats.jobs_failed += 1
        raise
    except TimeoutError:
        core.stats.jobs_failed += 1
        raise Timeout(
            f"the answer takes longer than {METHOD_S:g} s; ask for less at a time"
        ) from None
    finally:
        os.close(request)
        os.close(result)


def append(result: int, data: bytes) -> None:
    """Puts something behind the answer in a memfd.

    Raises:
        OutOfMemory
    """
    try:
        os.pwrite(result, data, os.fstat(result).st_size)
    except OSError as e:
        raise OutOfMemory(f"an answer has no room: {e.strerror}") from None


def texts(given: list[str]) -> list[str]:
    """Texts to embed, checked.

    Raises:
        InvalidArgument
    """
    if not 1 <= len(given) <= MAX_TEXTS or not all(given):
        raise InvalidArgument(f"there are 1 to {MAX_TEXTS} texts to embed, none of them empty")
    return given


def labels(given: list[str]) -> list[str]:
    """Labels to choose from, checked.

    Raises:
        InvalidArgument
    """
    if not 2 <= len(given) <= MAX_LABELS or len(set(given)) != len(given):
        raise InvalidArgument(f"there are 2 to {MAX_LABELS} labels, each once")
    if not all(label.strip() for label in given):
        raise InvalidArgument("a label is empty")
    return given


def extraction(text: str, schema: str, instruction: str) -> list[dict[str, str]]:
    """The talk that asks for JSON: small models follow names of keys better than a schema.

    Raises:
        InvalidArgument: the schema is no JSON object.
    """
    try:
        parsed = json.loads(schema)
    except (ValueError, RecursionError):
        parsed = None
    if not isinstance(parsed, dict):
        raise InvalidArgument("the schema is no JSON object")
    if not instruction:
        keys = parsed.get("properties")
        if isinstance(keys, dict) and keys:
            instruction = f"Write JSON with the keys {', '.join(keys)}, with values from the text."
        else:
            instruction = f"Write JSON with values from the text that fits this schema: {schema}"
    return [{"role": "user", "content": f"Text: {text}\n{instruction}"}]


async def collected(reader: int) -> str:
    """The text of a stream that has to end complete; `reader` becomes ours.

    Raises:
        Timeout: it takes longer than a method may.
        Cancelled: by Cancel.
        InvalidArgument: the answer was cut off at max_tokens.
        PvrdError: what the stream said.
    """
    loop = asyncio.get_running_loop()
    stream = asyncio.StreamReader(limit=1 << 16)
    transport, _ = await loop.connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(stream), os.fdopen(reader, "rb", 0)
    )
    parts: list[str] = []
    try:
        async with asyncio.timeout(METHOD_S - 1):
            async for line in stream:
                event = json.loads(line)
                if event["type"] == "error":
                    raise from_name(event["error"], event["message"])
                parts.append(str(event.get("text", "")))
                if event["type"] == "end":
                    if event["reason"] == "cancelled":
                        raise Cancelled("the job was cancelled")
                    if event["reason"] != "stop":
                        raise InvalidArgument(
                            "the answer was not complete within max_tokens; raise it, or bound the"
                            " schema's texts and arrays"
                        )
                    return "".join(parts)
    except TimeoutError:
        text = f"the answer takes longer than {METHOD_S:g} s; use Chat with the option schema"
        raise Timeout(text) from None
    finally:
        transport.close()
    raise Internal("the stream ended without an end")
