# SPDX-License-Identifier: Apache-2.0
"""The client's end of a video session: the mapped ring of frames and the slot socket
(docs/api.md)."""

from __future__ import annotations

import contextlib
import mmap
import os
import socket
import struct
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from pvrd.errors import NAMES, Internal, InvalidArgument, PvrdError, ShuttingDown, from_name
from pvrd.y4m import plane_views

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from pvrd.client import Session

    Planes = list[NDArray[np.uint8] | NDArray[np.uint16]]

MESSAGE = struct.Struct("<IHHQIIqQIIQII")
MAGIC = 0x53525650
SUBMIT, DONE, CREDIT, DROP, ERROR = 1, 2, 3, 4, 5
_DEVICES = {1: "gpu", 2: "cpu"}
FAILED, ENDING = 5, 6


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


# Mapped memory needs its descriptor no more; before Python 3.13 it goes with the memory.
_NO_FD: dict[str, Any] = {"trackfd": False} if sys.version_info >= (3, 13) else {}


class Ring:
    """The frames of a session in memory. `layout` is the daemon's (docs/api.md)."""

    def __init__(self, fd: int, layout: Mapping[str, Any]) -> None:
        self.layout = layout
        self.slots = int(layout["slots"])
        try:
            self._map = mmap.mmap(fd, int(layout["ring_bytes"]), **_NO_FD)
        finally:
            os.close(fd)
        self._memory = memoryview(self._map)
        self._sample = 1 if int(layout.get("depth", 8)) == 8 else 2

    def _planes(self, slot: int, planes: str) -> list[list[memoryview]]:
        base = slot * int(self.layout["slot_bytes"])
        return [
            plane_views(self._memory, base + offset, stride, samples * self._sample, rows)
            for offset, stride, samples, rows in self.layout[planes]
        ]

    def input(self, slot: int) -> list[list[memoryview]]:
        """The planes of the slot's input; each as one piece, or as one a row where rows have
        gaps."""
        return self._planes(slot, "in_planes")

    def output(self, slot: int) -> list[list[memoryview]]:
        """The planes of the slot's output, likewise."""
        return self._planes(slot, "out_planes")

    def arrays(self, slot: int) -> Planes:
        """The planes of the slot's input as arrays on the ring itself, not copies: (rows, samples)
        of uint8 or uint16; NV12's second plane has Cb and Cr in turn. Needs numpy."""
        return self._arrays(slot, "in_planes")

    def results(self, slot: int) -> Planes:
        """The planes of the slot's output, likewise; they are the frame's until the slot is
        submitted again. Not to be written to: the daemon takes unchanged tiles of the next frame
        from there."""
        planes = self._arrays(slot, "out_planes")
        for plane in planes:
            plane.flags.writeable = False
        return planes

    def _arrays(self, slot: int, planes: str) -> Planes:
        import numpy as np

        base = slot * int(self.layout["slot_bytes"])
        kind: Any = np.uint8 if self._sample == 1 else np.dtype("<u2")
        return [
            np.ndarray((rows, samples), kind, self._map, base + offset, (stride, self._sample))
            for offset, stride, samples, rows in self.layout[planes]
        ]

    def fill(self, slot: int, planes: Sequence[NDArray[Any]]) -> None:
        """Copies a frame into the slot's input.

        Raises:
            InvalidArgument: the planes are not those of the layout.
        """
        targets = self.arrays(slot)
        shapes = [target.shape for target in targets]
        if [plane.shape for plane in planes] != shapes:
            raise InvalidArgument(f"the planes of a frame are {shapes} here")
        for target, plane in zip(targets, planes, strict=True):
            target[:] = plane


class VideoSession(Ring):
    """Write a frame into `input(slot)`, submit it, receive it, read `output(slot)`.

    `credits` says how many more frames may be submitted. A context manager.
    """

    def __init__(self, session: Session, ring: int, sock: int, layout: Mapping[str, Any]) -> None:
        self.session = session
        self.credits = 0
        self._socket = socket.socket(fileno=sock)
        super().__init__(ring, layout)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the session. The memory goes with the last view of it."""
        self._socket.close()
        self.session.close()

    def shut(self) -> None:
        """Ends a receive() of another thread, and the session; close() is still to be called."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def fileno(self) -> int:
        """The slot socket, to poll: readable when receive() will not block."""
        return self._socket.fileno()

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
        try:
            self._socket.send(submit_message(seq, slot, pts, deadline))
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
        kind, value, done = decode(data)
        if kind == CREDIT:
            self.credits = value
        elif kind == ERROR:
            reason = ""
            if value == FAILED:
                with contextlib.suppress(PvrdError):
                    reason = str(self.session.properties().get("Error", ""))
            raise failure(value, reason)
        elif done is not None:
            self.credits += 1
        return done

    def enlarge(self, frames: Iterable[Sequence[NDArray[Any]]]) -> Iterator[tuple[Done, Planes]]:
        """Enlarges frames, as many under way at once as the session takes: yields each with the
        planes of its result, which are the frame's until the next one is asked for.

        Raises:
            InvalidArgument: a frame of another shape.
            PvrdError: the session failed, or the daemon died.
        """
        free, under_way, seq = list(range(self.slots)), 0, 0
        coming = iter(frames)
        more = True
        while more or under_way:
            if more and free and self.credits > 0:
                frame = next(coming, None)
                if frame is None:
                    more = False
                    continue
                slot = free.pop(0)
                self.fill(slot, frame)
                seq += 1
                self.submit(seq, slot, pts=seq)
                under_way += 1
                continue
            done = self.receive()
            if done is not None:
                under_way -= 1
                yield done, self.results(done.slot)
                free.append(done.slot)


def submit_message(seq: int, slot: int, pts: int, deadline: int) -> bytes:
    """A SUBMIT."""
    return MESSAGE.pack(MAGIC, 1, SUBMIT, seq, slot, 0, pts, deadline, 0, 0, 0, 0, 0)


def decode(data: bytes) -> tuple[int, int, Done | None]:
    """A message of the daemon: its type, the credits (CREDIT) or the status, and the frame (DONE,
    DROP).

    Raises:
        Internal: it is none, as when the daemon died.
    """
    if len(data) != MESSAGE.size:
        raise Internal("The daemon ended before the work was done.")
    (
        _magic, _version, kind, seq, slot, status, pts,
        level, tiles, fallback, work, device, granted,
    ) = MESSAGE.unpack(data)  # fmt: skip
    if kind == CREDIT:
        return kind, int(granted), None
    if kind in (DONE, DROP):
        done = Done(
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
        return kind, int(status), done
    return kind, int(status), None


def failure(status: int, reason: str) -> PvrdError:
    """The error behind an ERROR; `reason` is the session's property Error."""
    if status == ENDING:
        return ShuttingDown("The daemon is ending.")
    if status == FAILED:
        name, _, sentence = reason.partition(": ")
        if name in NAMES:
            return from_name(name, sentence)
        return Internal(reason or "The session failed in the daemon.")
    return InvalidArgument(f"The daemon refused a message of the slot socket (number {status}).")
