# SPDX-License-Identifier: Apache-2.0
"""Whole D-Bus messages over a socket, with their file descriptors, in both directions. What they
say is for pvrd/bus.py.
"""

from __future__ import annotations

import array
import asyncio
import errno
import os
import socket
import struct
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from pvrd.bus_types import BUS, BusError

MAX_MESSAGE = 1 << 20  # of a call to us, header and body
MAX_REPLY = 16 << 20  # of a reply that we asked for
MAX_QUEUE = 32 << 20  # bytes that wait for the bus
MAX_ON_THE_WIRE = (128 << 20) + 64  # the protocol's own bound
MESSAGES_A_TURN = 64  # so that one sender cannot keep the loop to itself

_FIXED = 16  # bytes at the beginning that say how long a message is
_REPLIES = (2, 3)  # types of message: method return, error
_AT_ONCE = 256 << 10  # bytes to read
_ETOOMANYREFS_S = 0.05  # until fds may be sent again
_INT = array.array("i").itemsize
_CONTROL = socket.CMSG_SPACE(253 * _INT)  # all that the kernel passes at once: none is lost unseen


@dataclass
class Received:
    """A message as it came; `fds` are the receiver's. `overlong`: its body was thrown away."""

    data: bytearray
    fds: list[int]
    overlong: bool

    def close(self) -> None:
        """Closes the fds."""
        _close_all(self.fds)


@dataclass
class _Outgoing:
    data: memoryview
    fds: list[int] = field(default_factory=list)


class Wire:
    """A socket on which a bus is, logged in to. `on_message` gets each message, `on_end` once a
    sentence when the bus is lost; the socket is closed by close() alone.
    """

    def __init__(
        self,
        sock: socket.socket,
        on_message: Callable[[Received], None],
        on_end: Callable[[str], None],
    ) -> None:
        self._sock = sock
        self._loop = asyncio.get_running_loop()
        self._on_message, self._on_end = on_message, on_end
        self._closed = False
        self._queue: deque[_Outgoing] = deque()
        self._queued = 0
        self._writing = False
        self._in = bytearray()
        self._in_fds: list[int] = []
        self._skip = 0  # bytes of an overlong body still to be thrown away
        self._overlong = False

    def start(self) -> None:
        """Begins to read."""
        self._loop.add_reader(self._sock, self.readable)

    def close(self) -> None:
        """What was not sent is lost."""
        if self._closed:
            return
        self._closed = True
        self._loop.remove_reader(self._sock)
        self._loop.remove_writer(self._sock)
        self._sock.close()
        for out in self._queue:
            _close_all(out.fds)
        self._queue.clear()
        _close_all(self._in_fds)

    # -- sending

    def send(self, data: bytes, fds: Sequence[int]) -> None:
        """Sends a message, later where the bus does not take it now. The fds are duplicated at once
        and stay the caller's.

        Raises:
            BusError: too much waits already.
            OSError: there are no more fds.
        """
        if self._queued + len(data) > MAX_QUEUE:
            raise BusError(f"{BUS}.Error.LimitsExceeded", "the bus does not take what we send")
        out = _Outgoing(memoryview(data))
        try:
            for fd in fds:
                out.fds.append(os.dup(fd))
        except OSError:
            _close_all(out.fds)
            raise
        self._queue.append(out)
        self._queued += len(data)
        if not self._writing:
            self._writable()

    def _writable(self) -> None:
        while self._queue:
            out = self._queue[0]
            control = []
            if out.fds:
                control = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", out.fds))]
            try:
                sent = self._sock.sendmsg([out.data], control, socket.MSG_NOSIGNAL)
            except (BlockingIOError, InterruptedError):
                if not self._writing:
                    self._writing = True
                    self._loop.add_writer(self._sock, self._writable)
                return
            except OSError as e:
                if e.errno == errno.ETOOMANYREFS:  # fds that nobody has read yet; the bus will
                    self._loop.remove_writer(self._sock)
                    self._writing = True
                    self._loop.call_later(_ETOOMANYREFS_S, self._retry)
                    return
                self._on_end(f"the bus is gone: {e.strerror}")
                return
            _close_all(out.fds)  # they went with the first byte
            self._queued -= sent
            out.data = out.data[sent:]
            if not out.data:
                self._queue.popleft()
        if self._writing:
            self._writing = False
            self._loop.remove_writer(self._sock)

    def _retry(self) -> None:
        if not self._closed:
            self._loop.add_writer(self._sock, self._writable)

    # -- receiving

    def readable(self) -> None:
        """Reads what is there and hands over the messages that are whole."""
        for _ in range(MESSAGES_A_TURN):
            try:
                received = self._read()
            except (BlockingIOError, InterruptedError):
                return
            except (OSError, EOFError) as e:
                self._on_end(f"the bus is gone: {e}")
                return
            if received is not None:
                self._on_message(received)
            if self._closed:
                return

    def _read(self) -> Received | None:
        """The next message, None when it was none; BlockingIOError when more has to come."""
        while len(self._in) < _FIXED:
            self._in += self._recv(_FIXED - len(self._in))
        order = "<" if self._in[0] == ord("l") else ">"
        body, _, fields = struct.unpack_from(order + "III", self._in, 4)
        header = _FIXED + (fields + 7) // 8 * 8
        if header + body > MAX_ON_THE_WIRE:  # the bus passes nothing of the kind
            raise EOFError("it sends nonsense")
        # A reply may be longer: we asked for it.
        limit = MAX_REPLY if self._in[1] in _REPLIES else MAX_MESSAGE
        self._overlong = header + body > limit
        if header > limit:
            # An object path has no bound. Who sent it would stand behind it: nobody is told.
            if not self._skip:
                self._skip = header + body - len(self._in)
            self._skip_rest()
            self._in = bytearray()
            _close_all(self._in_fds)
            return None
        wanted = header if self._overlong else header + body
        while len(self._in) < wanted:
            self._in += self._recv(min(wanted - len(self._in), _AT_ONCE))
        if self._overlong:
            if not self._skip:
                self._skip = body
            self._skip_rest()
        data, self._in = self._in, bytearray()
        fds, self._in_fds = self._in_fds, []
        return Received(data, fds, self._overlong)

    def _skip_rest(self) -> None:
        while self._skip:
            self._skip -= len(self._recv(min(self._skip, _AT_ONCE)))

    def _recv(self, count: int) -> bytes:
        data, control, _, _ = self._sock.recvmsg(count, _CONTROL, socket.MSG_CMSG_CLOEXEC)
        for level, kind, payload in control:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                numbers = array.array("i")
                numbers.frombytes(payload[: len(payload) - len(payload) % _INT])
                self._in_fds.extend(numbers)
        if not data:
            raise EOFError("it closed the connection")
        return data


async def log_in(sock: socket.socket, name: str) -> None:
    """Connects a socket that does not block to a bus, and authenticates by UID.

    Raises:
        OSError: nobody is there.
        ValueError: the bus refuses us; it says how.
    """
    loop = asyncio.get_running_loop()
    await loop.sock_connect(sock, name)

    async def say(line: bytes, expected: bytes) -> None:
        await loop.sock_sendall(sock, line)
        answer = b""
        while not answer.endswith(b"\r\n"):
            got = await loop.sock_recv(sock, 512)
            if not got or len(answer) > 4096:
                raise ValueError("it ends the connection while we log in")
            answer += got
        if not answer.startswith(expected):
            raise ValueError("it refuses our user or file descriptors")

    # Without a UID: the bus sees it. In a container the one that we know may be another.
    await say(b"\0AUTH EXTERNAL\r\n", b"DATA")
    await say(b"DATA\r\n", b"OK")
    await say(b"NEGOTIATE_UNIX_FD\r\n", b"AGREE_UNIX_FD")
    await loop.sock_sendall(sock, b"BEGIN\r\n")


def _close_all(fds: list[int]) -> None:
    while fds:
        os.close(fds.pop())
