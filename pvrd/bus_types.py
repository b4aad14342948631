# SPDX-License-Identifier: Apache-2.0
"""What travels over D-Bus, without the wire: addresses, errors, file descriptors, calls, signals.

Users take these from pvrd/bus.py.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal
from urllib.parse import unquote

BUS = "org.freedesktop.DBus"


class BusError(Exception):
    """An error reply, a lost bus, or none at all. `name` is the D-Bus error name."""

    def __init__(self, name: str, message: str) -> None:
        super().__init__(message)
        self.name = name
        self.message = message


@dataclass(frozen=True)
class BusAddress:
    """Which bus: `user`, `system`, or a private one by its address."""

    kind: Literal["user", "system", "private"]
    address: str

    @classmethod
    def parse(cls, text: str) -> BusAddress:
        """`user`, `system`, or an address like unix:path=/run/some/bus.

        Raises:
            BusError: it is none of these, or the environment names no user bus.
        """
        if text == "system":
            default = "unix:path=/run/dbus/system_bus_socket"
            return cls("system", os.environ.get("DBUS_SYSTEM_BUS_ADDRESS") or default)
        if text in ("user", "session"):
            address = os.environ.get("DBUS_SESSION_BUS_ADDRESS")
            runtime = os.environ.get("XDG_RUNTIME_DIR")
            if not address and runtime:
                address = f"unix:path={runtime}/bus"
            if not address:
                raise BusError(
                    f"{BUS}.Error.NoServer",
                    "no user bus: neither DBUS_SESSION_BUS_ADDRESS nor XDG_RUNTIME_DIR is set",
                )
            return cls("user", address)
        if text.startswith("unix:"):
            return cls("private", text)
        raise BusError(
            f"{BUS}.Error.BadAddress", f"{text!r} is no bus: say user, system or an address unix:…"
        )

    def sockets(self) -> list[str]:
        """Names for connect(2), in the order to try; an abstract one begins with NUL."""
        names = []
        for part in self.address.split(";"):
            transport, _, rest = part.partition(":")
            if transport != "unix":
                continue
            for pair in rest.split(","):
                key, _, value = pair.partition("=")
                if key == "path":
                    names.append(unquote(value))
                elif key == "abstract":
                    names.append("\0" + unquote(value))
        return names


class Fds:
    """Received fds; what nobody takes is closed."""

    def __init__(self, fds: list[int]) -> None:
        self._fds: list[int | None] = list(fds)

    def __len__(self) -> int:
        return len(self._fds)

    def peek(self, index: int) -> int:
        """The fd, still ours.

        Raises:
            IndexError: there is none.
        """
        fd = self._fds[index] if 0 <= index < len(self._fds) else None
        if fd is None:
            raise IndexError("the message came without that file descriptor")
        return fd

    def take(self, index: int) -> int:
        """The fd, from now on the taker's to close."""
        fd = self.peek(index)
        self._fds[index] = None
        return fd

    def close(self) -> None:
        for i, fd in enumerate(self._fds):
            if fd is not None:
                os.close(fd)
                self._fds[i] = None


@dataclass
class Call:
    """A method call from `sender`, a unique name. Answer with Connection.reply or .error."""

    sender: str
    path: str
    interface: str
    member: str
    signature: str
    body: list[Any]
    fds: Fds
    interactive: bool
    message: Any  # as the codec has it


@dataclass
class Reply:
    """A method return. `h` values are indexes for fds.take(); close() closes the rest."""

    signature: str
    body: list[Any]
    fds: Fds

    def close(self) -> None:
        """Closes the fds that were not taken."""
        self.fds.close()


@dataclass(frozen=True)
class Signal:
    """A signal as it came."""

    sender: str
    path: str
    interface: str
    member: str
    body: list[Any]


@dataclass(eq=False)
class Subscription:
    """Signals that match go to `callback` until cancel()."""

    rule: str
    match: dict[str, str]
    callback: Callable[[Signal], None]
    forget: Callable[[Subscription], None]

    def takes(self, signal: Signal) -> bool:
        """Does the signal match? A well-known sender was matched by the bus already."""
        for key, wanted in self.match.items():
            if key == "arg0":
                got = signal.body[0] if signal.body else None
            else:
                got = getattr(signal, key)
            if key == "sender" and not wanted.startswith(":") and wanted != BUS:
                continue
            if got != wanted:
                return False
        return True

    def cancel(self) -> None:
        """No more signals from here on."""
        self.forget(self)
