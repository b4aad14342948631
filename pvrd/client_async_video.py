# SPDX-License-Identifier: Apache-2.0
"""A video session for asyncio."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

from pvrd.client_api import VIDEO
from pvrd.client_video import CREDIT, ERROR, FAILED, Done, Ring, decode, failure, submit_message
from pvrd.errors import PvrdError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from pvrd.client_async import AsyncClient
    from pvrd.client_video import Planes


class AsyncVideoSession(Ring):
    """Frames through a ring, as pvrd.client_video.VideoSession. Made by AsyncClient.open_video."""

    def __init__(
        self, client: AsyncClient, path: str, ring: int, sock: int, layout: Mapping[str, Any]
    ) -> None:
        self._client, self._path = client, path
        self._owner = client.owner
        self.credits = 0
        self._socket = socket.socket(fileno=sock)
        self._socket.setblocking(False)
        super().__init__(ring, layout)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Ends the session. The memory goes with the last view of it."""
        self._socket.close()
        if self._path and self._owner == self._client.owner:
            path, self._path = self._path, ""
            with contextlib.suppress(PvrdError):
                await self._client.call(path, VIDEO, "Close")

    async def properties(self) -> dict[str, Any]:
        """The session's properties."""
        return await self._client.properties(VIDEO, self._path)

    async def pause(self, paused: bool = True) -> None:
        """The surface is not shown (or is again): see docs/api.md."""
        await self._client.call(self._path, VIDEO, "Pause", "b", [paused])

    async def submit(self, seq: int, slot: int, pts: int = 0, deadline: int = 0) -> None:
        """Hands a frame over; seq rises from call to call, deadline is CLOCK_MONOTONIC in ns.

        Raises:
            PvrdError: the session has ended.
        """
        loop = asyncio.get_running_loop()
        try:
            await loop.sock_sendall(self._socket, submit_message(seq, slot, pts, deadline))
        except OSError:
            while True:  # why it ended lies unread in the socket: receive() raises it
                await self.receive()
        self.credits -= 1

    async def receive(self) -> Done | None:
        """Waits for one message; None when it was none about a frame.

        Raises:
            PvrdError: the session failed, or the daemon died.
        """
        data = b""
        for _ in range(2):  # a reset is told once, before what the daemon said last
            with contextlib.suppress(ConnectionResetError):
                data = await asyncio.get_running_loop().sock_recv(self._socket, 64)
                break
        kind, value, done = decode(data)
        if kind == CREDIT:
            self.credits = value
        elif kind == ERROR:
            reason = ""
            if value == FAILED:
                with contextlib.suppress(PvrdError):
                    reason = str((await self.properties()).get("Error", ""))
            raise failure(value, reason)
        elif done is not None:
            self.credits += 1
        return done

    async def enlarge(
        self, frames: AsyncIterator[Sequence[NDArray[Any]]]
    ) -> AsyncGenerator[tuple[Done, Planes], None]:
        """Enlarges frames as they come, as many under way at once as the session takes: yields each
        with the planes of its result, which are the frame's until the next one is asked for.

        Raises:
            InvalidArgument: a frame of another shape.
            PvrdError: the session failed, or the daemon died.
        """
        free, seq, under_way = list(range(self.slots)), 0, 0
        coming: asyncio.Task[Sequence[NDArray[Any]] | None] | None = None
        got: asyncio.Task[Done | None] | None = None
        more = True

        async def next_frame() -> Sequence[NDArray[Any]] | None:
            return await anext(frames, None)

        try:
            while more or under_way:
                if more and coming is None and free and self.credits > 0:
                    coming = asyncio.ensure_future(next_frame())
                if got is None and (under_way or self.credits < 1):
                    got = asyncio.ensure_future(self.receive())
                waiting: set[asyncio.Task[Any]] = {task for task in (coming, got) if task}
                await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                if got is not None and got.done():
                    done, got = got.result(), None
                    if done is not None:
                        under_way -= 1
                        yield done, self.results(done.slot)
                        free.append(done.slot)
                if coming is not None and coming.done():
                    frame, coming = coming.result(), None
                    if frame is None:
                        more = False
                        continue
                    slot, seq = free.pop(0), seq + 1
                    self.fill(slot, frame)
                    await self.submit(seq, slot, pts=seq)
                    under_way += 1
        finally:
            left = [task for task in (coming, got) if task is not None]
            for task in left:
                task.cancel()
            await asyncio.gather(*left, return_exceptions=True)
