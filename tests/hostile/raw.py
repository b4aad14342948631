# SPDX-License-Identifier: Apache-2.0
"""A connection to a bus that sends what it is told, byte for byte, and reads only when asked."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from typing import Any

from dbus_next.constants import MessageFlag, MessageType
from dbus_next.message import Message

from pvrd.bus import BUS, BUS_PATH, BusAddress

NAME, PATH, MANAGER = "org.pvrd.Pvrd1", "/org/pvrd/Pvrd1", "org.pvrd.Pvrd1.Manager"
LONG = 30.0


class Raw:
    """Logged in and named; `name` is the unique name."""

    def __init__(self, address: str) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(LONG)
        self.sock.connect(BusAddress.parse(address).sockets()[0])
        self.serial = 0
        self._in = b""
        uid = str(os.getuid()).encode().hex().encode()
        self.sock.sendall(b"\0AUTH EXTERNAL " + uid + b"\r\nNEGOTIATE_UNIX_FD\r\nBEGIN\r\n")
        while self._in.count(b"\r\n") < 2:
            self._in += self.sock.recv(4096)
        self._in = self._in.split(b"\r\n", 2)[2]
        self.sock.sendall(self.call("Hello", destination=BUS, path=BUS_PATH, interface=BUS))
        self.name = ""
        head = self.answer()  # to Hello; the signal NameAcquired may come with it
        assert head == MessageType.METHOD_RETURN.value

    def call(
        self, member: str, signature: str = "", body: Any = (), destination: str = NAME,
        path: str = PATH, interface: str = MANAGER, silent: bool = False,
    ) -> bytes:  # fmt: skip
        """The bytes of a call."""
        self.serial += 1
        flags = MessageFlag.NO_REPLY_EXPECTED if silent else MessageFlag.NONE
        message = Message(destination, path, interface, member, signature=signature,
                          body=list(body), flags=flags, serial=self.serial)  # fmt: skip
        return bytes(message._marshall(False))

    def answer(self) -> int:
        """The type of the next message that is no signal."""
        while True:
            while len(self._in) < 16:
                self._more()
            body, _, fields = struct.unpack_from("<III", self._in, 4)
            whole = 16 + (fields + 7) // 8 * 8 + body
            while len(self._in) < whole:
                self._more()
            kind = self._in[1]
            self._in = self._in[whole:]
            if kind != MessageType.SIGNAL.value:
                return kind

    def _more(self) -> None:
        piece = self.sock.recv(1 << 20)
        if not piece:
            raise ConnectionResetError("the bus closed the connection")
        self._in += piece

    def thrown_out(self) -> bool:
        """Does the bus end this connection?"""
        with contextlib.suppress(ConnectionResetError, BrokenPipeError):
            while self.sock.recv(1 << 20):
                pass
        return True

    def close(self) -> None:
        self.sock.close()
