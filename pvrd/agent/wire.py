# SPDX-License-Identifier: Apache-2.0
"""A Wayland client's end of the wire on asyncio: requests out, events in, no more.

Our own, because none of the kept packages fits the boards that pvrd is for: pywayland has wheels
for x86-64 alone (elsewhere it wants a compiler and libwayland's headers), knows no layer shell and
blocks while it reads; the pure one, python-wayland, had a single release. The wire is small:
https://wayland.freedesktop.org/docs/html/ch04.html#sect-Protocol-Wire-Format
"""

from __future__ import annotations

import array
import asyncio
import contextlib
import os
import socket
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pvrd.agent import protocol
from pvrd.agent.protocol import Interface

MOST_BYTES = 1 << 16  # a message has a length of 16 bits
_UINT = struct.Struct("=I")
_INT = struct.Struct("=i")


class WaylandError(Exception):
    """The compositor is not there, is gone, or says that we broke a rule; one sentence."""


def socket_path(environment: Mapping[str, str] | None = None) -> Path:
    """Where the compositor of this session listens.

    Raises:
        WaylandError: the environment names none, as in a session of X11.
    """
    env = os.environ if environment is None else environment
    name = env.get("WAYLAND_DISPLAY", "")
    if not name:
        x11 = " (it is one of X11)" if env.get("DISPLAY") else ""
        raise WaylandError(f"WAYLAND_DISPLAY is not set: this session has no Wayland{x11}")
    path = Path(name)
    if not path.is_absolute():
        folder = env.get("XDG_RUNTIME_DIR", "")
        if not folder:
            raise WaylandError("XDG_RUNTIME_DIR is not set, so the compositor cannot be found")
        path = Path(folder) / name
    return path


class Proxy:
    """One object of the compositor's. `on` maps names of events to what is called with their
    values; events without an entry are ignored."""

    def __init__(self, wire: Wire, interface: Interface, number: int) -> None:
        self._wire = wire
        self.interface = interface
        self.number = number
        self.on: dict[str, Callable[..., None]] = {}

    def __call__(self, request: str, *values: Any) -> None:
        """Sends a request; objects are Proxies or None (no object), `h` values stay ours."""
        self._wire.send(self, request, values)

    def make(self, request: str, interface: Interface, *values: Any) -> Proxy:
        """Sends a request that makes an object: it stands in `values` where NEW does."""
        made = self._wire.proxy(interface)
        self(request, *(made if value is NEW else value for value in values))
        return made


NEW = object()


class Wire:
    """A connection to a compositor.

    `lost` is a future that gets the WaylandError when the connection ends by itself.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._loop = asyncio.get_running_loop()
        self._objects: dict[int, Proxy] = {}
        self._free: list[int] = []  # numbers that the compositor gave back
        self._next = 1
        self._in = bytearray()
        self._closed = False
        self.lost: asyncio.Future[WaylandError] = self._loop.create_future()
        self.display = self.proxy(protocol.DISPLAY)
        self.display.on["error"] = self._on_error
        self.display.on["delete_id"] = self._on_delete
        self._loop.add_reader(sock, self._readable)

    @classmethod
    async def connect(cls, path: Path, timeout: float = 5.0) -> Wire:
        """Connects.

        Raises:
            WaylandError: nobody listens there.
        """
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            async with asyncio.timeout(timeout):
                await asyncio.get_running_loop().sock_connect(sock, str(path))
        except (OSError, TimeoutError) as e:
            sock.close()
            why = getattr(e, "strerror", None) or "it does not answer"
            raise WaylandError(f"no compositor at {path}: {why}") from None
        return cls(sock)

    def close(self) -> None:
        """Ends the connection. A second time is no error."""
        if not self._closed:
            self._closed = True
            self._loop.remove_reader(self._sock)
            self._sock.close()

    def lose(self, why: str) -> None:
        """Ends the connection for a reason, which those who wait get."""
        self.close()
        if not self.lost.done():
            self.lost.set_result(WaylandError(why))

    # -- objects

    def proxy(self, interface: Interface) -> Proxy:
        """An object with a number of its own; a request has to tell the compositor of it."""
        number = self._free.pop() if self._free else self._next
        self._next = max(self._next, number + 1)
        made = self._objects[number] = Proxy(self, interface, number)
        return made

    def _on_error(self, number: int, code: int, text: str) -> None:
        thing = self._objects.get(number)
        name = thing.interface.name if thing else f"object {number}"
        said = "".join(c if c.isprintable() else " " for c in text)[:200]
        self.lose(f"the compositor refuses {name}: {said} ({code})")

    def _on_delete(self, number: int) -> None:
        if number > 1 and self._objects.pop(number, None) is not None:
            self._free.append(number)

    async def roundtrip(self, timeout: float) -> None:
        """Waits until the compositor has answered all that was sent.

        Raises:
            WaylandError: it is gone. TimeoutError: it did not in time.
        """
        done: asyncio.Future[None] = self._loop.create_future()
        callback = self.display.make("sync", protocol.CALLBACK, NEW)

        def answered(_: int) -> None:
            if not done.done():
                done.set_result(None)

        callback.on["done"] = answered
        await self.first(done, timeout)

    async def first(self, future: asyncio.Future[Any], timeout: float) -> None:
        """Waits for the future, which has to be done by an event.

        Raises:
            WaylandError: the connection ended before. TimeoutError: nothing came in time.
        """
        both = {future, self.lost}
        await asyncio.wait(both, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        if future.done():
            return
        if self.lost.done():
            raise self.lost.result()
        raise TimeoutError

    # -- the wire

    def send(self, thing: Proxy, request: str, values: tuple[Any, ...]) -> None:
        """Sends a request.

        Raises:
            WaylandError: the connection has ended, or the compositor reads nothing.
        """
        rows = thing.interface.requests
        opcode = next(i for i, (name, _) in enumerate(rows) if name == request)
        body, fds = bytearray(), array.array("i")
        for kind, value in zip(rows[opcode][1], values, strict=True):
            if kind == "i":
                body += _INT.pack(value)
            elif kind == "u":
                body += _UINT.pack(value)
            elif kind in "on":
                body += _UINT.pack(0 if value is None else value.number)
            elif kind == "s":
                text = value.encode() + b"\0"
                body += _UINT.pack(len(text)) + text + bytes(-len(text) % 4)
            elif kind == "h":
                fds.append(value)
            else:
                raise TypeError(f"{thing.interface.name}.{request} has an argument of type {kind}")
        data = _UINT.pack(thing.number) + _UINT.pack(len(body) + 8 << 16 | opcode) + body
        if self._closed:
            raise self.lost.result() if self.lost.done() else WaylandError("it is closed")
        control = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fds)] if fds else []
        try:
            # We ask so little that a socket without room means a compositor that reads nothing.
            sent = self._sock.sendmsg([data], control, socket.MSG_NOSIGNAL)
        except BlockingIOError:
            sent = 0
        except OSError as e:
            self.lose(f"the compositor is gone: {e.strerror}")
            raise self.lost.result() from None
        if sent != len(data):
            self.lose("the compositor reads nothing any more")
            raise self.lost.result()

    def _readable(self) -> None:
        try:
            data = self._sock.recv(MOST_BYTES)
        except (BlockingIOError, InterruptedError):
            return
        except OSError as e:
            self.lose(f"the compositor is gone: {e.strerror}")
            return
        if not data:
            self.lose("the compositor ended the connection")
            return
        self._in += data
        while len(self._in) >= 8 and not self._closed:
            number, word = struct.unpack_from("=II", self._in)
            size, opcode = word >> 16, word & 0xFFFF
            if size < 8:
                self.lose("the compositor sends what is no message")
                return
            if len(self._in) < size:
                return
            body = bytes(self._in[8:size])
            del self._in[:size]
            self._event(number, opcode, body)

    def _event(self, number: int, opcode: int, body: bytes) -> None:
        thing = self._objects.get(number)
        if thing is None:  # one that we gave up while this was under way
            return
        if opcode >= len(thing.interface.events):
            return  # of a later version, that we did not ask for
        name, types = thing.interface.events[opcode]
        handler = thing.on.get(name)
        if handler is None:
            return
        try:
            values = _decode(types, body)
        except (struct.error, UnicodeDecodeError):
            self.lose(f"the compositor sends a damaged {thing.interface.name}.{name}")
            return
        with contextlib.suppress(WaylandError):  # it answers at once, and the compositor is gone
            handler(*values)


def _decode(types: str, body: bytes) -> list[Any]:
    values: list[Any] = []
    at = 0
    for kind in types:
        (word,) = (_INT if kind == "i" else _UINT).unpack_from(body, at)
        at += 4
        if kind in "sa":
            piece = body[at : at + word]
            if len(piece) != word:
                raise struct.error("too short")
            at += word + -word % 4
            values.append(piece.rstrip(b"\0").decode() if kind == "s" else piece)
        else:
            values.append(word)
    return values
