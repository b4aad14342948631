# SPDX-License-Identifier: Apache-2.0
"""The client's end of a video session: the mapped ring of frames and the slot socket
(docs/api.md)."""

from __future__ import annotations

import contextlib
import mmap
import os
import socket
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from pvrd.errors import NAMES, Internal, InvalidArgument, PvrdError, ShuttingDown, from_name
from pvrd.y4m import plane_views

if TYPE_CHECKING:
    from pvrd.client import Session

MESSAGE = struct.Struct("<IHHQIIqQIIQII")
MAGIC = 0x53525650
SUBMIT, DONE, CREDIT, DROP, ERROR = 1, 2, 3, 4, 5
_DEVICES = {1: "gpu", 2: "cpu"}


@dataclass(frozen=True)
class Done:
    """A frame that came back: done, or dropped because its deadline was over."""

    seq: int
    slot: int
    pts: int
    dropped: bool
    degraded: bool
    tiles: int
    tiles_fallback: int
    ms: float
    device: str
    level: int = 0  # of the property Levels: what made it


class VideoSession:
    """Write a frame into `input(slot)`, submit it, receive it, read `output(slot)`.

    `layout` is the daemon's (docs/api.md); `credits` says how many more frames may be submitted. A
    context manager.
    """

    def __init__(self, session: Session, ring: int, sock: int, layout: Mapping[str, Any]) -> None:
        self.session = session
        self.layout = layout
        self.slots = int(layout["slots"])
        self.credits = 0
        self._socket = socket.socket(fileno=sock)
        try:
            self._map = mmap.mmap(ring, int(layout["ring_bytes"]))
        finally:
            os.close(ring)
        self._memory = memoryview(self._map)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends the session. The memory goes with the last view of it."""
        self._socket.close()
        self.session.close()

    def fileno(self) -> int:
        """The slot socket, to poll: readable when receive() will not block."""
        return self._socket.fileno()

    def _planes(self, slot: int, planes: str) -> list[list[memoryview]]:
        base = slot * int(self.layout["slot_bytes"])
        size = 1 if int(self.layout.get("depth", 8)) == 8 else 2
        return [
            plane_views(self._memory, base + offset, stride, samples * size, rows)
            for offset, stride, samples, rows in self.layout[planes]
        ]

    def input(self, slot: int) -> list[list[memoryview]]:
        """The planes of the slot's input; each as one piece, or as one a row where rows have
        gaps."""
        return self._planes(slot, "in_planes")

    def output(self, slot: int) -> list[list[memoryview]]:
        """The planes of the slot's output, likewise."""
        return self._planes(slot, "out_planes")

    def pause(self) -> None:
        """The surface is not shown: waiting frames with deadlines are dropped, others stay; after a
        while the session's memory and share are free for others."""
        self.session.call("Pause", "b", [True])

    def resume(self) -> None:
        """It is shown again."""
        self.session.call("Pause", "b", [False])

    def submit(self, seq: int, slot: int, pts: int = 0, deadline: int = 0) -> None:
        """Hands a frame over; seq rises from call to call, deadline is CLOCK_MONOTONIC in ns.

        Raises:
            PvrdError: the session has ended.
        """
        message = MESSAGE.pack(MAGIC, 1, SUBMIT, seq, slot, 0, pts, deadline, 0, 0, 0, 0, 0)
        try:
            self._socket.send(message)
        except OSError:
            # Why it ended lies unread in the socket: receive() raises it.
            while True:
                self.receive()
        self.credits -= 1

    def receive(self) -> Done | None:
        """Waits for one message; None when it was none about a frame.

        Raises:
            PvrdError: the session failed, or the daemon died.
        """
        data = b""
        for _ in range(2):
            # A reset is told once, before what the daemon said last: it closed with messages of
            # ours unread, its own are still to be read.
            with contextlib.suppress(ConnectionResetError):
                data = self._socket.recv(MESSAGE.size)
                break
        if len(data) != MESSAGE.size:
            raise Internal("The daemon ended before the work was done.")
        (
            _magic,
            _version,
            kind,
            seq,
            slot,
            status,
            pts,
            level,
            tiles,
            fallback,
            work,
            device,
            granted,
        ) = MESSAGE.unpack(data)
        if kind == CREDIT:
            self.credits = granted
        elif kind in (DONE, DROP):
            self.credits += 1
            return Done(
                seq,
                slot,
                pts,
                kind == DROP,
                status == 1,
                tiles,
                fallback,
                work / 1e6,
                _DEVICES.get(device, ""),
                level if kind == DONE else 0,
            )
        elif kind == ERROR:
            raise self._failure(status)
        return None

    def _failure(self, status: int) -> PvrdError:
        if status == 6:
            return ShuttingDown("The daemon is ending.")
        if status == 5:
            try:
                reason = str(self.session.properties().get("Error", ""))
            except PvrdError:
                reason = ""
            name, _, sentence = reason.partition(": ")
            if name in NAMES:
                return from_name(name, sentence)
            return Internal(reason or "The session failed in the daemon.")
        return InvalidArgument(
            f"The daemon refused a message of the slot socket (number {status})."
        )
