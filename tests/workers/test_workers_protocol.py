# SPDX-License-Identifier: Apache-2.0
"""Messages, their limits and the fds beside them."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest

from pvrd.workers import protocol

Pair = tuple[socket.socket, socket.socket]


@pytest.fixture
def sockets() -> Iterator[Pair]:
    a, b = protocol.pair()
    with a, b:
        yield a, b


def test_message_arrives_as_sent(sockets: Pair) -> None:
    message = {"t": "text.token", "job": "7", "n": 0, "text": "é\n\0 日"}
    protocol.send(sockets[0], message)
    received = protocol.recv(sockets[1])
    assert received is not None
    assert received.message == message
    assert received.fds == []


def test_fds_arrive_close_on_exec_and_in_order(sockets: Pair) -> None:
    files = [os.memfd_create(f"f{i}") for i in range(protocol.MAX_FDS)]
    for i, fd in enumerate(files):
        os.write(fd, bytes([i]))
    protocol.send(sockets[0], {"t": "x"}, files)
    received = protocol.recv(sockets[1])
    for fd in files:
        os.close(fd)
    assert received is not None
    for i in range(len(files)):
        fd = received.take()
        assert os.pread(fd, 2, 0) == bytes([i])
        assert not os.get_inheritable(fd)
        os.close(fd)
    with pytest.raises(protocol.ProtocolError, match="lacks"):
        received.take()


def test_fds_not_taken_are_closed(sockets: Pair) -> None:
    fd = os.memfd_create("f")
    protocol.send(sockets[0], {"t": "x"}, [fd])
    os.close(fd)
    received = protocol.recv(sockets[1])
    assert received is not None
    (kept,) = received.fds
    received.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(kept)


def test_credentials_and_fds_together(sockets: Pair) -> None:
    sockets[1].setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
    fd = os.memfd_create("f")
    protocol.send(sockets[0], {"t": "hello"}, [fd] * protocol.MAX_FDS)
    os.close(fd)
    received = protocol.recv(sockets[1])
    assert received is not None
    assert received.pid == os.getpid()
    assert len(received.fds) == protocol.MAX_FDS
    received.close()


def test_end_of_file(sockets: Pair) -> None:
    sockets[0].close()
    assert protocol.recv(sockets[1]) is None


def test_empty_socket_does_not_block(sockets: Pair) -> None:
    with pytest.raises(BlockingIOError):
        protocol.recv(sockets[1], socket.MSG_DONTWAIT)


def test_largest_message_passes_and_a_larger_one_is_refused(sockets: Pair) -> None:
    room = protocol.MAX_MESSAGE - len(protocol.encode({"t": "x", "text": ""}))
    protocol.send(sockets[0], {"t": "x", "text": "a" * room})
    received = protocol.recv(sockets[1])
    assert received is not None
    assert len(received.message["text"]) == room
    with pytest.raises(protocol.ProtocolError):
        protocol.send(sockets[0], {"t": "x", "text": "a" * (room + 1)})


@pytest.mark.parametrize("data", [b"{", b"[]", b"{}", b'{"t":1}', b"\xff", b"a" * 70000])
def test_nonsense_is_refused_and_its_fds_closed(sockets: Pair, data: bytes) -> None:
    fd = os.memfd_create("f")
    before = len(os.listdir("/proc/self/fd"))
    protocol.send_raw(sockets[0], data, [fd])
    with pytest.raises(protocol.ProtocolError):
        protocol.recv(sockets[1])
    assert len(os.listdir("/proc/self/fd")) == before
    os.close(fd)


def test_file_name_that_is_no_utf8_passes(sockets: Pair) -> None:
    protocol.send(sockets[0], {"t": "error", "message": os.fsdecode(b"a\xff")})
    received = protocol.recv(sockets[1])
    assert received is not None
    assert received.message["message"] == "a?"


def test_read_range_of_a_short_file() -> None:
    fd = os.memfd_create("f")
    os.write(fd, b"abc")
    assert protocol.read_all(fd) == b"abc"
    assert protocol.read_range(fd, 1, 2) == b"bc"
    with pytest.raises(protocol.ProtocolError):
        protocol.read_range(fd, 1, 3)
    with pytest.raises(protocol.ProtocolError):
        protocol.read_all(fd, 2)
    os.close(fd)


def test_imports_neither_numpy_nor_the_engine() -> None:
    code = (
        "import sys, pvrd.workers.protocol;"
        "print([m for m in sys.modules if m.split('.')[0] in ('numpy', 'engine', 'kernels')])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


def test_a_message_nested_too_deeply_is_none() -> None:
    with pytest.raises(protocol.ProtocolError, match="not JSON"):
        protocol.decode(b'{"t":' + b"[" * 60_000)
