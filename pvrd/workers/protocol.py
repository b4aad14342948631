# SPDX-License-Identifier: Apache-2.0
"""Messages between pvrd and a worker: JSON objects over SOCK_SEQPACKET, fds beside them.

Both ends use this module, so it imports neither numpy nor the engine. The list of messages is in
docs/architecture.md, "The worker protocol".
"""

from __future__ import annotations

import array
import json
import os
import socket
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

PROTOCOL = 1
MAX_MESSAGE = 64 << 10
MAX_FDS = 4
# Tokens that a worker may send beyond the last `ack`.
MAX_AHEAD = 16
# The header of a text job's journal is padded to a multiple of this.
JOURNAL_ALIGN = 4096

_INT = array.array("i").itemsize
_UCRED = struct.Struct("iII")
# Room for the fds and for credentials: a control buffer that is too small would lose fds.
_CONTROL = socket.CMSG_SPACE(MAX_FDS * _INT) + socket.CMSG_SPACE(_UCRED.size)


class ProtocolError(Exception):
    """The peer sent something that is no message of this protocol; the connection is useless."""


@dataclass
class Received:
    """One message and its fds, which `close()` closes unless somebody took them with `take()`."""

    message: dict[str, Any]
    fds: list[int] = field(default_factory=list)
    pid: int = 0  # the sender's, only when SO_PASSCRED is set on the receiving socket

    def take(self) -> int:
        """The next fd, from now on the caller's to close.

        Raises:
            ProtocolError: the message came with fewer fds.
        """
        if not self.fds:
            raise ProtocolError(f"message {self.message.get('t')!r} lacks a file descriptor")
        return self.fds.pop(0)

    def fd(self, index: int = 0) -> int:
        """An fd that stays this message's.

        Raises:
            ProtocolError: the message came with fewer fds.
        """
        if index >= len(self.fds):
            raise ProtocolError(f"message {self.message.get('t')!r} lacks a file descriptor")
        return self.fds[index]

    def close(self) -> None:
        """Closes the fds that nobody took."""
        while self.fds:
            os.close(self.fds.pop())


def read_all(fd: int, limit: int = 64 << 20) -> bytes:
    """What is in a memfd, by pread (its sender may still write it or have sealed it).

    Raises:
        ProtocolError: more than `limit` bytes.
    """
    size = os.fstat(fd).st_size
    if size > limit:
        raise ProtocolError(f"{size} bytes in a file of at most {limit}")
    return read_range(fd, 0, size)


def write_all(fd: int, data: bytes) -> None:
    """Makes these bytes all that is in a memfd.

    Raises:
        OSError: there is no room for them.
    """
    os.ftruncate(fd, 0)
    view, offset = memoryview(data), 0
    while view:
        written = os.pwrite(fd, view, offset)
        view, offset = view[written:], offset + written


def read_range(fd: int, offset: int, size: int) -> bytes:
    """`size` bytes at `offset`.

    Raises:
        ProtocolError: the file is shorter.
    """
    parts: list[bytes] = []
    while size > 0:
        part = os.pread(fd, min(size, 16 << 20), offset)
        if not part:
            raise ProtocolError("a file is shorter than it should be")
        parts.append(part)
        offset += len(part)
        size -= len(part)
    return b"".join(parts)


def pair() -> tuple[socket.socket, socket.socket]:
    """Two connected sockets, close-on-exec."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def encode(message: Mapping[str, Any]) -> bytes:
    """The bytes of a message.

    Raises:
        ProtocolError: longer than MAX_MESSAGE.
    """
    # "replace": a file name that is no UTF-8 may stand in a message for people.
    data = json.dumps(message, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")
    if len(data) > MAX_MESSAGE:
        raise ProtocolError(f"message {message.get('t')!r} has {len(data)} bytes")
    return data


def decode(data: bytes) -> dict[str, Any]:
    """The message in these bytes.

    Raises:
        ProtocolError: no JSON object with a string `t`.
    """
    try:
        message = json.loads(data.decode())
    except (ValueError, RecursionError) as e:
        raise ProtocolError(f"not JSON: {e}") from None
    if not isinstance(message, dict) or not isinstance(message.get("t"), str):
        raise ProtocolError("not an object with the key 't'")
    return message


def send(sock: socket.socket, message: Mapping[str, Any], fds: Sequence[int] = ()) -> None:
    """Sends one message whole.

    Raises:
        BlockingIOError: the socket is non-blocking and full; nothing was sent.
        BrokenPipeError, ConnectionResetError: the peer is gone.
        ProtocolError: too long, or too many fds.
    """
    send_raw(sock, encode(message), fds)


def send_raw(sock: socket.socket, data: bytes, fds: Sequence[int] = ()) -> None:
    """`send` of bytes that `encode` made, for senders that queue."""
    if len(fds) > MAX_FDS:
        raise ProtocolError(f"{len(fds)} file descriptors in one message")
    control = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    sock.sendmsg([data], control, socket.MSG_NOSIGNAL)


def recv(sock: socket.socket, flags: int = 0) -> Received | None:
    """Receives one message; None at end of file.

    Raises:
        BlockingIOError: nothing there, on a non-blocking socket or with MSG_DONTWAIT.
        ProtocolError: no message of this protocol. Its fds are closed.
    """
    try:
        data, control, got, _ = sock.recvmsg(
            MAX_MESSAGE + 1, _CONTROL, flags | socket.MSG_CMSG_CLOEXEC
        )
    except ConnectionResetError:
        return None
    received = Received({})
    for level, kind, payload in control:
        if level != socket.SOL_SOCKET:
            continue
        if kind == socket.SCM_RIGHTS:
            numbers = array.array("i")
            numbers.frombytes(payload[: len(payload) - len(payload) % _INT])
            received.fds.extend(numbers)
        elif kind == socket.SCM_CREDENTIALS and len(payload) >= _UCRED.size:
            received.pid = _UCRED.unpack_from(payload)[0]
    if not data:
        received.close()
        return None
    try:
        if got & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
            raise ProtocolError("message or its file descriptors cut off")
        received.message = decode(data)
    except ProtocolError:
        received.close()
        raise
    return received
