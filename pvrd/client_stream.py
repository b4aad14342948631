# SPDX-License-Identifier: Apache-2.0
"""What clients read from fds that a method answered with: events and vectors. Lines and vectors are
both clients', the streams the blocking one's.
"""

from __future__ import annotations

import array
import json
import os
import sys
from collections.abc import Iterator
from typing import Any

from pvrd.errors import Internal, from_name

PIECE = 65536  # bytes to read at once
_LONGEST_LINE = 1 << 16


class Lines:
    """Cuts what comes through a pipe into events, one JSON object a line."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def add(self, piece: bytes) -> None:
        """Takes what was read; nothing is the pipe's end.

        Raises:
            Internal: it ended without the last event, or a line is too long.
        """
        if not piece:
            raise Internal("The daemon ended before the work was done.")
        self._buffer += piece
        if len(self._buffer) > _LONGEST_LINE and b"\n" not in self._buffer:
            raise Internal("The daemon sends a line that is too long.")

    def event(self) -> dict[str, Any] | None:
        """The next event, None while its line is not whole.

        Raises:
            Internal: the line is none.
        """
        end = self._buffer.find(b"\n")
        if end < 0:
            return None
        line = bytes(self._buffer[:end])
        del self._buffer[: end + 1]
        try:
            event = json.loads(line)
        except ValueError as error:
            raise Internal("The daemon sends a line that is no JSON.") from error
        if not isinstance(event, dict):
            raise Internal("The daemon sends a line that is no object.")
        return event


class Pipe:
    """A pipe of events, one JSON object a line; it owns the fd."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._lines = Lines()

    def close(self) -> None:
        """Closes the pipe. A second time is no error."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class TextStream(Pipe):
    """The events of a text stream, one dict a line. It owns the pipe; closing it cancels the
    job."""

    last = ("end",)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Yields each event, the one that ends it included.

        Raises:
            PvrdError: the stream ended with `error`, or broke off because the daemon died.
        """
        try:
            while True:
                event = self._event()
                if event.get("type") == "error":
                    raise from_name(event.get("error"), event.get("message"))
                yield event
                if event.get("type") in self.last:
                    return
        finally:
            self.close()

    def _event(self) -> dict[str, Any]:
        while (event := self._lines.event()) is None:
            self._lines.add(os.read(self._fd, PIECE) if self._fd >= 0 else b"")
        return event


class Progress(TextStream):
    """The lines of a progress pipe: {type: progress, done, total}, then {type: end, …}."""


def _whole(fd: int) -> bytes:
    """All of a memfd, which is closed."""
    try:
        return os.pread(fd, os.fstat(fd).st_size, 0)
    finally:
        os.close(fd)


def _rows(data: bytes, count: int) -> list[bytes]:
    size = len(data) // count
    return [data[at : at + size] for at in range(0, len(data), size)]


def floats(row: bytes) -> list[float]:
    """The numbers of a vector (float32, little-endian)."""
    data = array.array("f", row)
    if sys.byteorder == "big":
        data.byteswap()
    return data.tolist()


def vectors(fd: int, count: int) -> list[list[float]]:
    """The `count` vectors (float32, little-endian) that Embed answered with; closes the fd."""
    return [floats(row) for row in _rows(_whole(fd), count)]


def counted_rows(fd: int, count: int) -> tuple[list[bytes], int]:
    """The same as they lie there, and the number of tokens that Embed was asked to put behind."""
    data = _whole(fd)
    return _rows(data[:-8], count), int.from_bytes(data[-8:], "little")
