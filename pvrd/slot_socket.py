# SPDX-License-Identifier: Apache-2.0
"""The slot socket: 64-byte messages with a client, who is a stranger and may send anything."""

from __future__ import annotations

import array
import asyncio
import contextlib
import os
import socket
import struct
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from pvrd import systemd

MAGIC = 0x53525650
VERSION = 1
SUBMIT, DONE, CREDIT, DROP, ERROR = 1, 2, 3, 4, 5
BAD_MESSAGE, BEYOND_CREDITS, BAD_SEQ, BAD_SLOT, FAILED, ENDING = 1, 2, 3, 4, 5, 6
DEVICES = {"gpu": 1, "cpu": 2}

_FORM = struct.Struct("<IHHQIIqQIIQII")
SIZE = _FORM.size  # 64
_INT = array.array("i").itemsize
_CONTROL = socket.CMSG_SPACE(253 * _INT)
MESSAGES_A_TURN = 64


@dataclass(frozen=True)
class SlotMessage:
    """One message; fields that its type does not use are 0."""

    type: int
    seq: int = 0
    slot: int = 0
    status: int = 0
    pts: int = 0
    deadline: int = 0
    tiles: int = 0
    tiles_fallback: int = 0
    work_ns: int = 0
    device: int = 0
    credits: int = 0

    def pack(self) -> bytes:
        """The 64 bytes."""
        return _FORM.pack(
            MAGIC, VERSION, self.type, self.seq, self.slot, self.status, self.pts, self.deadline,
            self.tiles, self.tiles_fallback, self.work_ns, self.device, self.credits,
        )  # fmt: skip

    @classmethod
    def unpack(cls, data: bytes) -> SlotMessage:
        """The message in 64 bytes.

        Raises:
            ValueError: another length, magic or version.
        """
        if len(data) != SIZE:
            raise ValueError(f"a message has {SIZE} bytes, not {len(data)}")
        magic, version, *fields = _FORM.unpack(data)
        if magic != MAGIC or version != VERSION:
            raise ValueError("no message of this protocol")
        return cls(*fields)


class SlotSocket:
    """pvrd's end. `client` is the other one, the caller's to hand over and close.

    Args:
        on_submit: gets each SUBMIT; raises SlotError to end the session.
        on_sent: called for each message that went out, in order.
        on_end: called once when the client closed, or after an error was sent.
    """

    def __init__(
        self,
        on_submit: Callable[[SlotMessage], None],
        on_sent: Callable[[SlotMessage], None],
        on_end: Callable[[], None],
    ) -> None:
        self._sock, self.client = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._sock.setblocking(False)
        self._on_submit = on_submit
        self._on_sent = on_sent
        self._on_end = on_end
        self._queue: deque[SlotMessage] = deque()
        self._loop = asyncio.get_running_loop()
        self._open = True
        self._loop.add_reader(self._sock, self._readable)

    def send(self, message: SlotMessage) -> None:
        """Sends now, or when the client reads again."""
        if self._open:
            self._queue.append(message)
            if len(self._queue) == 1:
                self._flush()

    def fail(self, status: int, tell: bool = True) -> None:
        """ERROR, if it fits, and the end; with `tell` also on_end."""
        if self._open:
            with contextlib.suppress(OSError):
                self._sock.send(SlotMessage(ERROR, status=status).pack(), socket.MSG_NOSIGNAL)
            self.close()
            if tell:
                systemd.log(
                    systemd.NOTICE,
                    f"a client broke the rules of the slot socket (error {status}); it was closed",
                    PVRD_REASON="slot socket",
                )
                self._on_end()

    def close(self) -> None:
        """Closes; no on_end. A second time is no error."""
        if self._open:
            self._open = False
            self._loop.remove_reader(self._sock)
            self._loop.remove_writer(self._sock)
            self._sock.close()
            self.client.close()  # where it was not handed over
            self._queue.clear()

    def _flush(self) -> None:
        while self._queue and self._open:
            try:
                self._sock.send(self._queue[0].pack(), socket.MSG_NOSIGNAL)
            except (BlockingIOError, InterruptedError):
                self._loop.add_writer(self._sock, self._flush)
                return
            except OSError:
                return  # the reader sees the end of file
            self._on_sent(self._queue.popleft())
        if self._open:
            self._loop.remove_writer(self._sock)

    def _readable(self) -> None:
        for _ in range(MESSAGES_A_TURN):
            try:
                data, control, flags, _ = self._sock.recvmsg(
                    SIZE, _CONTROL, socket.MSG_CMSG_CLOEXEC
                )
            except (BlockingIOError, InterruptedError):
                return
            except OSError:
                data, control, flags = b"", [], 0
            carried = _close_fds(control)
            if not data:
                # An empty datagram looks the same; no client of ours has one to send.
                self.close()
                self._on_end()
                return
            try:
                if carried or flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
                    raise ValueError("too long, or with file descriptors")
                message = SlotMessage.unpack(data)
                if message.type != SUBMIT:
                    raise ValueError("a client sends SUBMIT alone")
                self._on_submit(message)
            except SlotError as e:
                self.fail(e.status)
            except ValueError:
                self.fail(BAD_MESSAGE)
            if not self._open:
                return


class SlotError(Exception):
    """The client broke the rules; `status` of ERROR."""

    def __init__(self, status: int) -> None:
        super().__init__(status)
        self.status = status


def _close_fds(control: list[tuple[int, int, bytes]]) -> bool:
    found = False
    for level, kind, payload in control:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            numbers = array.array("i")
            numbers.frombytes(payload[: len(payload) - len(payload) % _INT])
            for fd in numbers:
                os.close(fd)
                found = True
    return found
