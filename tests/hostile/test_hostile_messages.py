# SPDX-License-Identifier: Apache-2.0
"""Messages that no honest caller sends. The sender may be thrown out; nobody else notices."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import struct
from pathlib import Path
from typing import Any

import pytest
from dbus_next.constants import MessageType
from dbus_next.message import Message

from pvrd.bus import Variant
from pvrd.bus_values import V
from tests.hostile.raw import MANAGER, Raw

pytestmark = pytest.mark.bus
ERROR = 3


@pytest.fixture(scope="module")
def daemon(start: Any) -> Any:
    return start()


@pytest.fixture
def well(daemon: Any, callers: Any, until: Any) -> Any:
    """Afterwards the same daemon serves others, and holds no more files than before."""
    caller = callers()
    caller.state("gpu")
    before = daemon.fds()
    yield daemon
    assert caller.get("State") == "gpu"
    session = caller.open_text()
    os.close(caller.generate(session, "x", max_tokens=1))
    caller.call("Close", path=session, interface="org.pvrd.Pvrd1.TextSession")
    assert daemon.process.poll() is None
    # The job of above may still end.
    until(lambda: daemon.fds() <= before, "as few files as before")


def resident(daemon: Any) -> int:
    status = Path(f"/proc/{daemon.process.pid}/status").read_text()
    return int(re.search(r"VmRSS:\s+(\d+)", status)[1]) << 10  # type: ignore[index]


@pytest.mark.parametrize("size", [70_000, 900_000, 3 << 20, 30 << 20])
def test_paths_have_no_bound(well: Any, callers: Any, raw: Any, size: int) -> None:
    """The header of a message is as long as its path: it is no reason to leave the bus."""
    hostile: Raw = raw()
    hostile.sock.sendall(hostile.call("Ping", path="/" + "a" * size, silent=size > 1 << 20))
    if size < 1 << 20:
        assert hostile.answer() == ERROR
    # Where nobody can be told, the next call is answered.
    hostile.sock.sendall(hostile.call("GetConfig"))
    assert hostile.answer() == 2
    assert resident(well) < 100 << 20


@pytest.mark.parametrize("size", [2 << 20, 31 << 20])
def test_large_bodies(well: Any, raw: Any, size: int) -> None:
    hostile: Raw = raw()
    hostile.sock.sendall(hostile.call("OpenText", "ay", [bytes(size)]))
    assert hostile.answer() == ERROR
    assert resident(well) < 100 << 20


def test_a_body_that_the_bus_does_not_take(well: Any, raw: Any) -> None:
    hostile: Raw = raw()
    with contextlib.suppress(ConnectionError):
        hostile.sock.sendall(hostile.call("OpenText", "ay", [bytes(33 << 20)]))
    assert hostile.thrown_out()


def test_ten_thousand_calls_and_no_reply_read(well: Any, callers: Any, raw: Any) -> None:
    hostile: Raw = raw()
    everything = b"".join(
        hostile.call("GetAll", "s", [MANAGER], interface="org.freedesktop.DBus.Properties")
        for _ in range(10_000)
    )
    hostile.sock.sendall(everything)
    other = callers()
    for _ in range(20):
        assert other.get("State") == "gpu"
    kinds = {hostile.answer() for _ in range(10_000)}  # each has its answer, when it is read
    assert kinds <= {2, ERROR}
    assert resident(well) < 150 << 20


def nested(depth: int) -> Variant:
    value = V("s", "x")
    for _ in range(depth):
        value = V("v", value)
    return value


@pytest.mark.parametrize("depth", [1, 20, 55])
def test_variants_in_variants(well: Any, caller: Any, depth: int) -> None:
    options = {"model": nested(depth)}
    name, _ = caller.fails("OpenText", "a{sv}", [options])
    assert name in ("UnknownModel", "InvalidArgument")


def test_variants_beyond_what_the_bus_takes(well: Any, raw: Any) -> None:
    hostile: Raw = raw()
    hostile.sock.sendall(hostile.call("OpenText", "a{sv}", [{"model": nested(80)}]))
    assert hostile.thrown_out()


@pytest.mark.parametrize("bad", [b"a\0b", b"\xed\xa0\x80", b"\xff\xfe!", b"\xc0\x80"])
def test_strings_that_are_none(well: Any, raw: Any, bad: bytes) -> None:
    """NUL, a lone surrogate, no UTF-8: the bus throws out who sends them to us."""
    hostile: Raw = raw()
    good = "q" * len(bad)
    data = hostile.call("RemoveModel", "s", [good])
    hostile.sock.sendall(data.replace(struct.pack("<I", len(bad)) + good.encode(),
                                      struct.pack("<I", len(bad)) + bad))  # fmt: skip
    assert hostile.thrown_out()


def test_what_we_say_of_them_is_clean(well: Any, caller: Any) -> None:
    for text in ("a\u202eb", "\x1b[31m", "\r\n", "\ufffe", "🦊" * 100, "%s%n{}", "a" * 100_000):
        for member, signature, body in (
            ("RemoveModel", "s", [text]), ("OpenText", "a{sv}", [{"model": V("s", text)}]),
            ("OpenText", "a{sv}", [{text: V("s", "x")}]),
            ("SetConfig", "a{sv}", [{text: V("u", 1)}]),
        ):  # fmt: skip
            _, said = caller.fails(member, signature, body)
            assert len(said) < 2000
            assert "\x1b" not in said


def test_replies_of_somebody_else(daemon: Any, callers: Any) -> None:
    """pvrd asks the bus for UIDs. What others answer to that counts for nothing, on any bus."""
    one, other = callers(), callers()
    connection = one.connection

    async def asks() -> None:
        call = one.loop.create_task(connection.call(other.connection.unique_name, "/", "a.b", "C"))
        await asyncio.sleep(0)
        reply = Message(connection.unique_name, message_type=MessageType.METHOD_RETURN,
                        reply_serial=connection._serial, signature="u", body=[0])  # fmt: skip
        reply.sender = "org.pvrd.Somebody"
        connection._dispatch(reply)
        assert not call.done()
        reply.sender = ":1.99999"
        connection._dispatch(reply)
        await asyncio.sleep(0)
        assert not call.done()
        reply.sender = other.connection.unique_name
        connection._dispatch(reply)
        assert (await call).body == [0]

    one.run(asks())
