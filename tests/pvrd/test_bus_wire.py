# SPDX-License-Identifier: Apache-2.0
"""Messages over a socket to a bus: cut together, thrown away where they are too long, with the fds
that came with them.
"""

from __future__ import annotations

import asyncio
import os
import socket
import struct
from collections.abc import Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from pvrd import bus_wire
from pvrd.bus import BusAddress, BusError, Connection
from pvrd.bus_wire import MAX_MESSAGE, MAX_ON_THE_WIRE, MAX_REPLY, Received, Wire

CALL, REPLY = 1, 2


def message(body: bytes = b"", fields: bytes = b"", kind: int = CALL, order: str = "<") -> bytes:
    """As much of a message as the wire looks at."""
    padded = fields + bytes(-len(fields) % 8)
    first = bytes([ord("l" if order == "<" else "B"), kind, 0, 1])
    return first + struct.pack(order + "III", len(body), 7, len(fields)) + padded + body


class End:
    """A wire, and the bus's end of its socket."""

    def __init__(self) -> None:
        ours, self.bus = socket.socketpair()
        ours.setblocking(False)
        self.came: list[Received] = []
        self.ended: list[str] = []
        self.wire = Wire(ours, self.came.append, self.ended.append)

    def feed(self, data: bytes, fds: list[int] | None = None) -> None:
        """Sends it, and reads until nothing is left of it."""
        sent = socket.send_fds(self.bus, [data[:1]], fds) if fds else 0
        self.wire.readable()
        while sent < len(data):
            sent += self.bus.send(data[sent : sent + 60000])
            self.wire.readable()


def run(work: Coroutine[Any, Any, None]) -> None:
    """Runs it; no descriptor may be left of it."""
    before = len(os.listdir("/proc/self/fd"))
    asyncio.run(work)
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("order", ["<", ">"])
@pytest.mark.parametrize("piece", [1, 7, 1000])
def test_messages_are_cut_together(order: str, piece: int) -> None:
    async def work() -> None:
        end = End()
        sent = [message(b"a" * n, b"f" * (3 * n), order=order) for n in range(5)]
        whole = b"".join(sent)
        for at in range(0, len(whole), piece):
            end.feed(whole[at : at + piece])
        assert [bytes(r.data) for r in end.came] == sent
        end.wire.close()
        end.bus.close()

    run(work())


def test_what_is_too_long_is_thrown_away_and_the_next_one_read() -> None:
    async def work() -> None:
        end = End()
        body, header = bytes(MAX_MESSAGE), bytes(MAX_MESSAGE)
        end.feed(message(body, b"12345678") + message(b"x"))
        assert [r.overlong for r in end.came] == [True, False]
        assert end.came[0].data == message(body, b"12345678")[:24]  # who sent it
        end.feed(message(b"y", header) + message(b"z"))
        assert end.came[2].data[-1:] == b"z"
        assert len(end.came) == 3
        end.feed(message(body, kind=REPLY))  # a reply may be longer
        assert not end.came[3].overlong
        end.feed(message(bytes(MAX_REPLY), kind=REPLY))
        assert end.came[4].overlong
        assert not end.ended
        end.feed(struct.pack("<BBBBIII", ord("l"), CALL, 0, 1, MAX_ON_THE_WIRE, 7, 0))
        assert end.ended == ["the bus is gone: it sends nonsense"]
        end.wire.close()
        end.bus.close()

    run(work())


def test_descriptors_belong_to_their_message() -> None:
    async def work() -> None:
        end = End()
        fds = [os.memfd_create("x") for _ in range(3)]
        end.feed(message(b"one"), fds[:2])
        end.feed(message(b"two"))
        end.feed(message(b"three"), fds[2:])
        assert [len(r.fds) for r in end.came] == [2, 0, 1]
        end.feed(message(b"", bytes(MAX_MESSAGE)), fds)  # thrown away, with its fds
        end.feed(message(b"half")[:-1], fds)
        for one in end.came:
            one.close()
        for fd in fds:
            os.close(fd)
        end.wire.close()
        end.bus.close()

    run(work())


def test_what_the_bus_does_not_take_waits_up_to_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bus_wire, "MAX_QUEUE", 4 << 20)

    async def work() -> None:
        end = End()
        fd = os.memfd_create("x")
        sent = bytes(range(256)) * 4096
        for _ in range(4):
            end.wire.send(sent, [fd])
        with pytest.raises(BusError, match="does not take"):
            end.wire.send(sent, [])
        end.bus.setblocking(False)
        got = bytearray()
        while len(got) < 4 * len(sent):
            with suppress(BlockingIOError):
                piece, taken, _, _ = socket.recv_fds(end.bus, 1 << 20, 4)
                got += piece
                for one in taken:
                    os.close(one)
            await asyncio.sleep(0)
        assert got == 4 * sent
        end.wire.send(sent, [fd])  # what is still to be sent when it is closed
        end.bus.close()
        end.wire.close()
        os.close(fd)

    run(work())


def test_the_end_of_the_bus_is_told_once() -> None:
    async def work() -> None:
        end = End()
        end.bus.close()
        end.wire.readable()
        assert end.ended == ["the bus is gone: it closed the connection"]
        end.wire.close()
        end.wire.close()

    run(work())


@pytest.mark.parametrize("logs_in", [False, True])
def test_connecting_can_be_cancelled(logs_in: bool, tmp_path: Path) -> None:
    """A bus that does not answer: to the authentication, or to Hello."""

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if logs_in:
            for answer in (b"DATA\r\n", b"OK\r\n", b"AGREE_UNIX_FD\r\n"):
                await reader.readline()
                writer.write(answer)
        await reader.read(1)
        heard.set()
        await reader.read()
        writer.close()

    heard = asyncio.Event()

    async def work() -> None:
        async with await asyncio.start_unix_server(silent, tmp_path / "bus"):
            address = BusAddress.parse(f"unix:path={tmp_path}/bus")
            connecting = asyncio.ensure_future(Connection.connect(address))
            await heard.wait()
            connecting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await connecting

    run(work())
