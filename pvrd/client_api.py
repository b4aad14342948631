# SPDX-License-Identifier: Apache-2.0
"""What both clients know of the daemon: its calls and their errors, and where it is.

A Call describes one method, with its arguments and what its answer means; pvrd/client.py makes it
and waits, pvrd/client_async.py awaits it. What a call does stands in docs/api.md and at the methods
of the clients.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from pvrd.activate import NAME
from pvrd.bus import BUS, BUS_PATH, PROPERTIES, BusAddress, BusError, Connection, Reply
from pvrd.bus_values import V, plain
from pvrd.client_options import options
from pvrd.client_stream import counted_rows, floats, vectors
from pvrd.errors import (
    NAMES,
    PREFIX,
    Internal,
    InvalidArgument,
    NotAuthorized,
    OutOfMemory,
    PvrdError,
    Timeout,
    from_name,
)

PATH = "/org/pvrd/Pvrd1"
MANAGER = f"{NAME}.Manager"
TEXT = f"{NAME}.TextSession"
VIDEO = f"{NAME}.VideoSession"

_GONE = ("ServiceUnknown", "NameHasNoOwner", "NoServer", "Disconnected", "BadAddress", "Spawn")
T = TypeVar("T")


class NoDaemon(PvrdError):
    """There is no bus, or no pvrd on it."""


def translate(error: BusError) -> PvrdError:
    """The error class for an error that came over the bus."""
    if error.name.startswith(PREFIX) and error.name.removeprefix(PREFIX) in NAMES:
        return from_name(error.name.removeprefix(PREFIX), error.message)
    short = error.name.removeprefix(f"{BUS}.Error.")
    if short.startswith(_GONE):
        return NoDaemon(f"pvrd does not answer: {error.message}")
    if short == "NoReply":
        return Timeout(
            error.message if "within" in error.message else "The daemon ended before it answered."
        )
    if short in ("AccessDenied", "AuthFailed"):
        return NotAuthorized(f"The bus does not let you: {error.message}")
    if short in ("LimitsExceeded", "InvalidArgs"):
        return InvalidArgument(error.message)
    return Internal(error.message)


async def find(bus: str | None, start: Callable[[str], Awaitable[None]]) -> tuple[str, Connection]:
    """The bus that pvrd is on, and a connection to it. `bus`: user, system or an address; by
    default $PVRD_BUS, else the system bus if pvrd is there, else the user bus. `start` is called
    with the bus where pvrd is to be started by it (pvrd.activate).

    Raises:
        NoDaemon: there is no bus, or no pvrd on it.
    """
    bus = bus or os.environ.get("PVRD_BUS") or None
    sentences = []
    for choice in [bus] if bus else ["system", "user"]:
        try:
            address = BusAddress.parse(choice)
            connection = await Connection.connect(address)
        except BusError as error:
            sentences.append(str(error))
            continue
        try:
            if await connection.name_owner(NAME):
                return choice, connection
            names = await connection.call(BUS, BUS_PATH, BUS, "ListActivatableNames")
            if NAME in names.body[0]:
                await start(choice)
                return choice, connection
            sentences.append(f"no pvrd on the {address.kind} bus")
        except BusError as error:
            sentences.append(str(error))
        except BaseException:
            connection.close()
            raise
        connection.close()
    raise NoDaemon(f"There is no daemon to talk to: {'; '.join(sentences)}.")


# --- calls


@dataclass(frozen=True)
class Call(Generic[T]):
    """A method of one of the daemon's objects. `h` values in the body are indexes into `fds`, which
    stay the caller's; `timeout` in seconds; `read` makes the result of the answer.
    """

    interface: str
    member: str
    signature: str
    body: Sequence[Any]
    read: Callable[[Reply], T]
    fds: Sequence[int] = ()
    timeout: float | None = 25.0
    interactive: bool = False

    @property
    def what(self) -> tuple[str, str, Sequence[Any]]:
        """As Client.call and Session.call take them."""
        return self.member, self.signature, self.body

    @property
    def how(self) -> dict[str, Any]:
        """As Client.call takes them."""
        return {"fds": self.fds, "timeout": self.timeout, "interactive": self.interactive}


def _value(reply: Reply) -> Any:
    return plain(reply.body[0])


def _nothing(_reply: Reply) -> None:
    return None


def _taken(reply: Reply, *indexes: int) -> list[int]:
    """Fds of a reply, which are the caller's from now on: all, or none.

    Raises:
        OutOfMemory: the kernel left one out, since this process has as many files open as it may.
    """
    taken: list[int] = []
    try:
        for index in indexes:
            taken.append(reply.fds.take(index))
    except IndexError:
        for fd in taken:
            os.close(fd)
        reply.close()
        text = "the answer lost its file descriptor: this program has too many files open"
        raise OutOfMemory(text) from None
    return taken


def _fd(reply: Reply) -> int:
    return _taken(reply, reply.body[0])[0]


def properties(interface: str) -> Call[dict[str, Any]]:
    return Call(PROPERTIES, "GetAll", "s", [interface], _value)


def close(interface: str) -> Call[None]:
    return Call(interface, "Close", "", [], _nothing)


# Of the manager.


def models() -> Call[list[dict[str, Any]]]:
    return Call(MANAGER, "ListModels", "", [], _value)


def add_model(fd: int, name: str, settings: Mapping[str, Any]) -> Call[int]:
    """Its result is the pipe of the progress."""
    body = [0, name, options({**settings, "stream": True})]
    asked = bool(settings.get("interactive"))
    return Call(
        MANAGER, "AddModel", "hsa{sv}", body, _progress, [fd], timeout=120.0, interactive=asked
    )


def _progress(reply: Reply) -> int:
    return _taken(reply, reply.body[0]["progress"].value)[0]


def remove_model(name: str) -> Call[None]:
    return Call(MANAGER, "RemoveModel", "s", [name], _nothing)


def config() -> Call[dict[str, Any]]:
    return Call(MANAGER, "GetConfig", "", [], _value)


def set_config(values: Mapping[str, tuple[str, Any]]) -> Call[None]:
    """`values`: key -> (D-Bus type, value)."""
    made = {key: V(kind, value) for key, (kind, value) in values.items()}
    return Call(MANAGER, "SetConfig", "a{sv}", [made], _nothing)


def statistics() -> Call[dict[str, Any]]:
    return Call(MANAGER, "GetStatistics", "", [], _value)


def jobs(all_users: bool) -> Call[list[dict[str, Any]]]:
    body = [{"all": V("b", True)} if all_users else {}]
    return Call(MANAGER, "ListJobs", "a{sv}", body, _value, interactive=all_users)


def trace(seconds: float) -> Call[int]:
    """Its result is a memfd."""
    body, wait = [{"seconds": V("d", seconds)}], seconds + 300.0
    return Call(MANAGER, "Trace", "a{sv}", body, _fd, timeout=wait, interactive=True)


def diagnostics() -> Call[list[dict[str, Any]]]:
    return Call(MANAGER, "GetDiagnostics", "", [], _value)


def hold(reason: str) -> Call[int]:
    """Its result is the fd that holds."""
    return Call(MANAGER, "Hold", "sa{sv}", [reason, {}], _fd, timeout=300.0, interactive=True)


def upscale(fd: int, settings: Mapping[str, Any]) -> Call[tuple[int, int]]:
    """Its result is the pipe of the progress and the memfd of the picture."""

    def read(reply: Reply) -> tuple[int, int]:
        progress, result = _taken(reply, reply.body[0], reply.body[1]["result"].value)
        return progress, result

    made = options({**settings, "stream": True})
    return Call(MANAGER, "Upscale", "ha{sv}", [0, made], read, [fd])


def open_text(made: Mapping[str, Any]) -> Call[str]:
    """`made`: what options() made. Its result is the session's path."""
    return Call(MANAGER, "OpenText", "a{sv}", [made], lambda reply: str(reply.body[0]))


def open_video(settings: Mapping[str, Any]) -> Call[tuple[str, int, int, dict[str, Any]]]:
    """Its result is the session's path, the ring's memfd, the slot socket and the layout."""

    def read(reply: Reply) -> tuple[str, int, int, dict[str, Any]]:
        path, ring, sock, layout = reply.body
        memory, slots = _taken(reply, ring, sock)
        return str(path), memory, slots, plain(layout)

    return Call(MANAGER, "OpenVideo", "a{sv}", [options(settings)], read)


# Of a text session.


def generate(prompt: str, settings: Mapping[str, Any]) -> Call[int]:
    """Its result is the pipe of the text stream, as that of chat()."""
    return Call(TEXT, "Generate", "sa{sv}", [prompt, options(settings)], _fd)


def chat(messages: Sequence[Mapping[str, str]], settings: Mapping[str, Any]) -> Call[int]:
    body = [[dict(message) for message in messages], options(settings)]
    return Call(TEXT, "Chat", "aa{ss}a{sv}", body, _fd)


def count_tokens(text: str) -> Call[int]:
    return Call(TEXT, "CountTokens", "s", [text], lambda reply: int(reply.body[0]))


def embed(texts: Sequence[str], settings: Mapping[str, Any]) -> Call[list[list[float]]]:
    counted = bool(settings.get("count_tokens"))  # it tells vectors alone

    def read(reply: Reply) -> list[list[float]]:
        if counted:
            return [floats(row) for row in counted_rows(_fd(reply), len(texts))[0]]
        return vectors(_fd(reply), len(texts))

    return Call(TEXT, "Embed", "asa{sv}", [list(texts), options(settings)], read)


def embed_counted(texts: Sequence[str]) -> Call[tuple[list[bytes], int]]:
    """Each vector as float32 (little-endian), and how many tokens all texts have together."""

    def read(reply: Reply) -> tuple[list[bytes], int]:
        return counted_rows(_fd(reply), len(texts))

    body = [list(texts), options({"count_tokens": True})]
    return Call(TEXT, "Embed", "asa{sv}", body, read)


def classify(
    text: str, labels: Sequence[str], settings: Mapping[str, Any]
) -> Call[tuple[str, dict[str, float]]]:
    def read(reply: Reply) -> tuple[str, dict[str, float]]:
        label, scores = reply.body
        return str(label), dict(scores)

    return Call(TEXT, "Classify", "sasa{sv}", [text, list(labels), options(settings)], read)


def extract(text: str, schema: str, settings: Mapping[str, Any]) -> Call[str]:
    body = [text, schema, options(settings)]
    return Call(TEXT, "Extract", "ssa{sv}", body, lambda reply: str(reply.body[0]))


def cancel() -> Call[None]:
    return Call(TEXT, "Cancel", "", [], _nothing)
