# SPDX-License-Identifier: Apache-2.0
"""pvrd's client for asyncio: the same calls as pvrd/client.py, as coroutines and async iterators.

    async with await AsyncClient.connect() as client:
        async with await client.open_text({"device": "auto"}) as session:
            async for token in session.chat([{"role": "user", "content": "Hello"}]).tokens():
                print(token, end="")

A client belongs to one event loop. Leaving an iterator early, or being cancelled in it, cancels the
job. When pvrd is restarted, calls find the new one: a text session is opened again by itself, a
video session ends (`Internal`), since its frames lay in memory of the old one. docs/client.md.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any, Self

from pvrd import client_api as api
from pvrd.activate import NAME, activate
from pvrd.bus import BUS, BusAddress, BusError, Connection, Reply, Signal
from pvrd.client_api import MANAGER, PATH, TEXT, NoDaemon, T, translate
from pvrd.client_async_video import AsyncVideoSession
from pvrd.client_options import options
from pvrd.client_stream import PIECE, Pipe
from pvrd.errors import NoSuchSession, PvrdError, Timeout, from_name


class AsyncClient:
    """A connection to the daemon; make it with connect(). `wait`: so many seconds a call waits for
    a daemon that is not there (it is being restarted)."""

    def __init__(self, address: BusAddress, wait: float = 0.0) -> None:
        self._address = address
        self._wait = wait
        self._connection: Connection | None = None
        self._open = True
        self._changed = asyncio.Condition()
        self._tasks: set[asyncio.Task[None]] = set()
        self.owner = ""  # the daemon's unique name: another one after a restart, empty without one

    @classmethod
    async def connect(cls, bus: str | None = None, *, wait: float = 0.0) -> Self:
        """Connects to the daemon on `bus`: user, system or an address; by default $PVRD_BUS, else
        the system bus if pvrd is there, else the user bus.

        Raises:
            NoDaemon: there is no bus, or no pvrd on it.
        """
        choice, connection = await api.find(bus, _start)
        client = cls(BusAddress.parse(choice), wait)
        try:
            await client._take(connection)
        except BaseException as error:
            client.close()
            if isinstance(error, BusError):
                raise translate(error) from error
            raise
        return client

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the connection, and with it all sessions. A second time is no error."""
        self._open = False
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    async def _bus(self) -> Connection:
        """The connection, made anew where the bus was lost."""
        if not self._open:
            raise NoDaemon("The connection is closed.")
        if self._connection is None or self._connection.closed.done():
            try:
                connection = await Connection.connect(self._address)
            except BusError as error:
                raise translate(error) from error
            await self._take(connection)
            return connection
        return self._connection

    async def _take(self, connection: Connection) -> None:
        """Makes it the client's connection, and learns from it who the daemon is.

        Raises:
            BusError: it is lost already.
        """
        self._connection = connection
        await connection.subscribe(
            self._owner_changed, sender=BUS, member="NameOwnerChanged", arg0=NAME
        )
        await self._has_owner(await connection.name_owner(NAME) or "")
        connection.closed.add_done_callback(lambda _: self._spawn_owner(""))

    def _owner_changed(self, signal: Signal) -> None:
        self._spawn_owner(str(signal.body[2]))

    def _spawn_owner(self, owner: str) -> None:
        self.owner = owner
        task = asyncio.ensure_future(self._has_owner(owner))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _has_owner(self, owner: str) -> None:
        async with self._changed:
            self.owner = owner
            self._changed.notify_all()

    async def present(self) -> None:
        """Returns as soon as there is a daemon.

        Raises:
            NoDaemon: the bus is lost, too.
        """
        await self._bus()
        async with self._changed:
            await self._changed.wait_for(lambda: self.owner)

    async def restarts(self) -> AsyncGenerator[str, None]:
        """Yields the daemon's unique name now and each time that another one has come."""
        seen = ""
        while True:
            await self._bus()
            async with self._changed:
                while self.owner in ("", seen):
                    await self._changed.wait()
                seen = self.owner
            yield seen

    async def call(
        self,
        path: str,
        interface: str,
        member: str,
        signature: str = "",
        body: Sequence[Any] = (),
        *,
        fds: Sequence[int] = (),
        timeout: float | None = 25.0,
        interactive: bool = False,
    ) -> Reply:
        """Calls a method of the daemon; `h` values in the body are indexes into `fds`, which stay
        the caller's.

        Raises:
            PvrdError: what the daemon or the bus answered.
        """
        loop = asyncio.get_running_loop()
        end = loop.time() + self._wait
        while True:
            try:
                connection = await self._bus()
                return await connection.call(
                    NAME, path, interface, member, signature, body, fds, timeout, interactive
                )
            except (BusError, NoDaemon) as error:
                found = translate(error) if isinstance(error, BusError) else error
                left = end - loop.time()
                if not isinstance(found, NoDaemon) or left <= 0 or not self._open:
                    raise found from error
            with contextlib.suppress(TimeoutError, NoDaemon):
                await asyncio.wait_for(self.present(), left)
            await asyncio.sleep(0.05)

    async def ask(self, call: api.Call[T], path: str = PATH) -> T:
        """Makes a call of pvrd/client_api.py to the object at `path`. Raises as call()."""
        return call.read(await self.call(path, call.interface, *call.what, **call.how))

    async def properties(self, interface: str = MANAGER, path: str = PATH) -> dict[str, Any]:
        """All properties of an object, as plain values."""
        return await self.ask(api.properties(interface), path)

    async def models(self) -> list[dict[str, Any]]:
        """What ListModels says."""
        return await self.ask(api.models())

    async def statistics(self) -> dict[str, Any]:
        """The counters."""
        return await self.ask(api.statistics())

    async def hold(self, reason: str) -> int:
        """Keeps the GPU free of pvrd until the returned fd is closed or this client is."""
        return await self.ask(api.hold(reason))

    async def open_text(self, settings: Mapping[str, Any] | None = None) -> AsyncTextSession:
        """Opens a session for text; options of OpenText."""
        session = AsyncTextSession(self, TEXT, options(settings or {}))
        await session.open()
        return session

    async def open_video(self, settings: Mapping[str, Any]) -> AsyncVideoSession:
        """Opens a session for video; options of OpenVideo."""
        return AsyncVideoSession(self, *await self.ask(api.open_video(settings)))

    async def upscale(self, fd: int, settings: Mapping[str, Any]) -> tuple[AsyncStream, int]:
        """Enlarges the picture in the file or sealed memfd `fd`: the progress, and the memfd of the
        result (to close), complete when the progress is at its end."""
        progress, result = await self.ask(api.upscale(fd, settings))
        return AsyncStream(progress), result


async def _start(bus: str) -> None:
    await asyncio.to_thread(activate, bus)


class AsyncTextSession:
    """A session for text: one job at a time. Made by AsyncClient.open_text."""

    def __init__(self, client: AsyncClient, interface: str, made: Mapping[str, Any]) -> None:
        self._client = client
        self._interface = interface
        self._made = made
        self._path = ""
        self._owner = ""
        self._lock = asyncio.Lock()

    async def open(self) -> None:
        """Opens it, again where the daemon was restarted."""
        self._path = await self._client.ask(api.open_text(self._made))
        self._owner = self._client.owner

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Closes the session in the daemon; never raises, the daemon does it by itself when the
        client goes."""
        path, self._path = self._path, ""
        if path and self._owner == self._client.owner:
            with contextlib.suppress(PvrdError):
                await self._client.ask(api.close(self._interface), path)

    async def _follow(self) -> bool:
        async with self._lock:
            if not self._path:
                raise NoSuchSession("The session is closed.")
            await self._client._bus()
            if self._owner == self._client.owner:
                return False
            await self.open()
            return True

    async def call(self, member: str, signature: str = "", body: Sequence[Any] = ()) -> Reply:
        """Calls a method of the session, opened again first where the daemon was restarted."""
        await self._follow()
        try:
            return await self._client.call(self._path, self._interface, member, signature, body)
        except (NoSuchSession, Timeout, NoDaemon):
            if not await self._follow():
                raise
        return await self._client.call(self._path, self._interface, member, signature, body)

    async def properties(self) -> dict[str, Any]:
        """The session's properties."""
        await self._follow()
        return await self._client.properties(self._interface, self._path)

    async def ask(self, call: api.Call[T]) -> T:
        """Makes a call of pvrd/client_api.py to the session."""
        return call.read(await self.call(*call.what))

    def generate(self, prompt: str, settings: Mapping[str, Any] | None = None) -> AsyncText:
        """Goes on with the prompt as it stands, once the result is iterated over."""
        return AsyncText(self, api.generate(prompt, settings or {}))

    def chat(
        self, messages: Sequence[Mapping[str, str]], settings: Mapping[str, Any] | None = None
    ) -> AsyncText:
        """Answers a talk, through the model's chat template; messages are {role, content}."""
        return AsyncText(self, api.chat(messages, settings or {}))

    async def count_tokens(self, text: str) -> int:
        """Tokens of the text as it stands."""
        return await self.ask(api.count_tokens(text))

    async def embed(
        self, texts: Sequence[str], settings: Mapping[str, Any] | None = None
    ) -> list[list[float]]:
        """A vector of length 1 for each text."""
        return await self.ask(api.embed(texts, settings or {}))

    async def classify(
        self, text: str, labels: Sequence[str], settings: Mapping[str, Any] | None = None
    ) -> tuple[str, dict[str, float]]:
        """The label that fits a text best, and the share of each."""
        return await self.ask(api.classify(text, labels, settings or {}))

    async def extract(
        self, text: str, schema: str, settings: Mapping[str, Any] | None = None
    ) -> str:
        """JSON that fits the schema, of what the text says."""
        return await self.ask(api.extract(text, schema, settings or {}))

    async def cancel(self) -> None:
        """Ends the running job."""
        await self.ask(api.cancel())


class AsyncStream(Pipe):
    """The events of a text stream or a progress pipe, one dict a line, the last included. It owns
    the pipe; closing it, or leaving the iteration, cancels the job."""

    def __init__(self, fd: int) -> None:
        os.set_blocking(fd, False)
        super().__init__(fd)

    async def __aiter__(self) -> AsyncGenerator[dict[str, Any], None]:
        """Yields each event.

        Raises:
            PvrdError: the stream ended with `error`, or broke off because the daemon died.
        """
        try:
            while True:
                event = await self._event()
                if event.get("type") == "error":
                    raise from_name(event.get("error"), event.get("message"))
                yield event
                if event.get("type") == "end":
                    return
        finally:
            self.close()

    async def _event(self) -> dict[str, Any]:
        while (event := self._lines.event()) is None:
            self._lines.add(await self._read())
        return event

    async def _read(self) -> bytes:
        if self._fd < 0:
            return b""
        loop = asyncio.get_running_loop()
        while True:
            with contextlib.suppress(BlockingIOError):
                return os.read(self._fd, PIECE)
            ready: asyncio.Future[None] = loop.create_future()
            loop.add_reader(self._fd, _set, ready)
            try:
                await ready
            finally:
                loop.remove_reader(self._fd)


def _set(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


class AsyncText:
    """A text job that begins when it is iterated over: events, or tokens() alone."""

    def __init__(self, session: AsyncTextSession, call: api.Call[int]) -> None:
        self._session = session
        self._call = call
        self.end: dict[str, Any] = {}  # the event `end`, as soon as it came

    async def __aiter__(self) -> AsyncGenerator[dict[str, Any], None]:
        """Yields each event. Raises as AsyncStream."""
        stream = AsyncStream(await self._session.ask(self._call))
        async with contextlib.aclosing(aiter(stream)) as events:
            async for event in events:
                if event.get("type") == "end":
                    self.end = event
                yield event

    async def tokens(self) -> AsyncGenerator[str, None]:
        """Yields the pieces of the answer. Raises as AsyncStream."""
        async with contextlib.aclosing(aiter(self)) as events:
            async for event in events:
                if event.get("text"):
                    yield str(event["text"])

    async def text(self) -> str:
        """The whole answer."""
        return "".join([piece async for piece in self.tokens()])
