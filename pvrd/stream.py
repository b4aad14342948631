# SPDX-License-Identifier: Apache-2.0
"""A pipe of JSON lines to a client: text streams and progress. One write a line, whole or none.

The reader is a stranger: it may read slowly (we park), not at all (SlowReader), or go away.
"""

from __future__ import annotations

import array
import asyncio
import contextlib
import fcntl
import json
import os
import termios
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from pvrd.errors import PvrdError, SlowReader

LINE = 4096  # PIPE_BUF: a write up to this is whole
PIECE = 500  # characters of text in a line; a character takes at most 6 bytes
POLL_S = 0.05
VERSION = 1
Last = tuple[str, Mapping[str, Any]]  # what a stream ends with: its line's type and fields
_REASON = 400  # characters of an error in a line


class LineStream:
    """The writing end. `reader` is the other one, the caller's to hand over and close.

    Args:
        slow_s: how long a reader may not read while we wait for it.
        on_gone: called once when the reader closed its end.
        clock, pause: for tests.
    """

    def __init__(
        self,
        slow_s: float,
        on_gone: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
        pause: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self.reader, self._fd = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self._fd, False)
        self._slow_s = slow_s
        self._on_gone = on_gone
        self._clock = clock
        self._pause = pause
        self._seq = 0
        self._pending: deque[bytes] = deque()
        self.gone = False
        # A write takes a new page when it does not fit the last: two neighbours hold more than one
        # page together. Three pages stay free, for a half-read page and the last lines.
        pages = fcntl.fcntl(self._fd, fcntl.F_GETPIPE_SZ) // LINE
        self._limit = max(0, (pages - 3) * (LINE // 2))
        self._loop = asyncio.get_running_loop()
        # The writing end becomes "readable" (an error) when the reader is gone.
        self._loop.add_reader(self._fd, self._lost)

    def write(self, kind: str, fields: Mapping[str, Any]) -> None:
        """One line, now or as soon as there is room."""
        line = {"v": VERSION, "seq": self._seq, "type": kind, **fields}
        text = json.dumps(line, ensure_ascii=False, separators=(",", ":"))
        data = text.encode("utf-8", "replace") + b"\n"
        if len(data) > LINE:
            raise ValueError(f"a line of {len(data)} bytes")
        self._seq += 1
        if not self.gone:
            self._pending.append(data)
            self._flush()

    def write_if_room(self, kind: str, fields: Mapping[str, Any]) -> None:
        """A line that may be left out."""
        if self._has_room():
            self.write(kind, fields)

    def _flush(self) -> None:
        while self._pending:
            try:
                os.write(self._fd, self._pending[0])
            except BlockingIOError:
                return
            except OSError:
                self._lost()
                return
            self._pending.popleft()

    def _lost(self) -> None:
        if not self.gone:
            self.gone = True
            self._pending.clear()
            self._loop.remove_reader(self._fd)
            self._on_gone()

    def _unread(self) -> int:
        count = array.array("i", [0])
        fcntl.ioctl(self._fd, termios.FIONREAD, count)
        return count[0]

    def _has_room(self) -> bool:
        self._flush()
        return self.gone or (not self._pending and self._unread() <= self._limit)

    async def room(self) -> None:
        """Waits until the next line and the last ones fit.

        Raises:
            SlowReader: the reader has not read anything for slow_s.
        """
        await self._wait(self._has_room)

    async def finish(self, last: Last) -> None:
        """Writes the last line, waits until all are in the pipe, as long as the reader reads, and
        closes it, whatever happens.
        """
        try:
            self.write(*last)
            with contextlib.suppress(SlowReader):
                await self._wait(lambda: self.gone or not self._pending)
        finally:
            self.close()

    async def _wait(self, done: Callable[[], bool]) -> None:
        if done():
            return
        since, least = self._clock(), self._unread()
        while not done():
            unread = self._unread()
            if unread < least:
                since = self._clock()
            least = unread
            if self._clock() - since >= self._slow_s:
                raise SlowReader(f"nobody read the stream for {self._slow_s:g} s")
            await self._pause(POLL_S)
            self._flush()

    def close(self) -> None:
        """Closes the writing end, and the other if nobody took it. A second time is no error."""
        if self.reader >= 0:
            os.close(self.reader)
            self.reader = -1
        if self._fd >= 0:
            if not self.gone:
                self._loop.remove_reader(self._fd)
            self.gone = True
            os.close(self._fd)
            self._fd = -1


def failure(error: PvrdError) -> Last:
    """What a stream ends with that failed."""
    return "error", {"error": error.name, "message": str(error)[:_REASON]}


def pieces(text: str) -> list[str]:
    """Text cut so that each piece fits a line; at least one piece."""
    return [text[i : i + PIECE] for i in range(0, len(text), PIECE)] or [""]
