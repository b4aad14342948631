# SPDX-License-Identifier: Apache-2.0
"""Connections that do not say what they want are not held for ever, nor without number."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import pytest
import uvicorn

from pvrd.http import connection
from pvrd.http.app import application
from pvrd.http.connection import BoundedConnection
from pvrd.http.server import Server

LONG = 60.0  # a bound on waiting; a test that meets it has failed
SHORT = 0.2
TOKEN = "pvr-test"
GET = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"
POST = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 50\r\n"
MINE = f"Authorization: Bearer {TOKEN}\r\n\r\n".encode()


class Client:
    """One connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    def say(self, data: bytes) -> None:
        self.writer.write(data)

    async def drip(self) -> None:
        """Says a little, again and again, until it is cut off."""
        while not self.reader.at_eof() and not self.writer.is_closing():
            self.say(b"x")
            await asyncio.sleep(SHORT / 20)

    async def all(self) -> bytes:
        """What is heard until the connection is closed."""
        try:
            return await asyncio.wait_for(self.reader.read(), LONG)
        except ConnectionResetError:  # it said more than was read
            return b""

    async def answer(self) -> bytes:
        """The head of the next answer, which has no body."""
        return await asyncio.wait_for(self.reader.readuntil(b"\r\n\r\n"), LONG)


class Place:
    """A server on a free port."""

    def __init__(self, place: tuple[str, int]) -> None:
        self._place = place
        self.clients: list[Client] = []

    async def client(self) -> Client:
        made = Client(*await asyncio.open_connection(*self._place))
        self.clients.append(made)
        return made


@asynccontextmanager
async def serving(app: Any) -> AsyncIterator[Place]:
    config = uvicorn.Config(
        app, log_config=None, lifespan="off", ws="none", http=BoundedConnection,
        timeout_keep_alive=int(LONG),
    )  # fmt: skip
    server = Server(config, grace=SHORT)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        task = asyncio.create_task(server.serve(sockets=[listening]))
        place = Place(listening.getsockname())
        try:
            yield place
        finally:
            for client in place.clients:
                client.writer.close()
            server.should_exit = True
            await asyncio.wait_for(task, LONG)


class Slow:
    """An application whose answers wait for `go`."""

    def __init__(self) -> None:
        self.go = asyncio.Event()
        self.asked = asyncio.Semaphore(0)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.asked.release()
        await self.go.wait()
        headers = [(b"content-length", b"0")]
        await send({"type": "http.response.start", "status": 204, "headers": headers})
        await send({"type": "http.response.body", "body": b""})


@pytest.fixture
def bounded(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    def bound(**bounds: float) -> None:
        for name, value in bounds.items():
            monkeypatch.setattr(connection, name, value)

    return bound


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(work, 2 * LONG))


def test_a_body_that_does_not_come_is_refused(bounded: Any) -> None:
    bounded(BODY_S=SHORT)
    app = application(TOKEN, client=None)  # type: ignore[arg-type]

    async def main() -> None:
        async with serving(app) as place:
            client = await place.client()
            client.say(POST + MINE + b"{")
            head, _, body = (await client.all()).partition(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 408 ")
            assert b"connection: close" in head.lower()
            error = json.loads(body)["error"]
            assert error["message"] == f"the request was not whole within {SHORT} s"
            assert error["code"] == "request_timeout"

    run(main())


def test_a_body_that_nobody_reads_holds_no_connection(bounded: Any) -> None:
    """It is refused by its head; what goes on to come in small pieces is cut off."""
    bounded(BODY_S=SHORT / 2, LEAVE_S=SHORT / 2)
    app = application(TOKEN, client=None)  # type: ignore[arg-type]

    async def main() -> None:
        async with serving(app) as place:
            client = await place.client()
            client.say(POST + b"\r\n")
            assert (await client.answer()).startswith(b"HTTP/1.1 401 ")
            dripping = asyncio.create_task(client.drip())
            await client.all()
            client.writer.close()
            await asyncio.wait_for(dripping, LONG)

    run(main())


@pytest.mark.parametrize("before", [b"", GET], ids=["first", "second"])
def test_a_head_that_comes_slowly_is_cut_off(bounded: Any, before: bytes) -> None:
    bounded(HEAD_S=SHORT)

    async def main() -> None:
        app = Slow()
        app.go.set()
        async with serving(app) as place:
            client = await place.client()
            if before:
                client.say(before)
                assert (await client.answer()).startswith(b"HTTP/1.1 204 ")
            client.say(b"GET /")
            dripping = asyncio.create_task(client.drip())
            said = await client.all()
            client.writer.close()
            await asyncio.wait_for(dripping, LONG)
            assert said.startswith(b"HTTP/1.1 408 ") or not said  # it may say while it is cut off

    run(main())


def test_who_says_nothing_is_left_and_answers_are_waited_for(bounded: Any) -> None:
    """The bound for the one passes while the other's answer is still being made."""
    bounded(HEAD_S=SHORT, BODY_S=SHORT / 4, LEAVE_S=SHORT / 4)

    async def main() -> None:
        app = Slow()
        async with serving(app) as place:
            asking = await place.client()
            asking.say(GET)
            await app.asked.acquire()
            assert await (await place.client()).all() == b""
            half = await place.client()
            half.say(b"GET / HTTP/1.1\r\n")
            assert (await half.all()).startswith(b"HTTP/1.1 408 ")
            app.go.set()
            assert (await asking.answer()).startswith(b"HTTP/1.1 204 ")

    run(main())


def test_there_are_so_many_connections_and_no_more(bounded: Any) -> None:
    bounded(MOST=3, HEAD_S=LONG)

    async def main() -> None:
        app = Slow()
        async with serving(app) as place:
            asking = await place.client()
            asking.say(GET)
            await app.asked.acquire()
            for _ in range(4):  # each takes the place of one that wants nothing
                client = await place.client()
                client.say(b"GET")
            late = [await place.client(), await place.client()]
            assert [await each.all() for each in place.clients[1:5]] == [b""] * 4
            for each in late:
                each.say(GET)
                await app.asked.acquire()
            refused = await (await place.client()).all()
            assert refused.startswith(b"HTTP/1.1 503 ")
            app.go.set()
            for each in (asking, *late):
                assert (await each.answer()).startswith(b"HTTP/1.1 204 ")

    run(main())
