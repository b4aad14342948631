# SPDX-License-Identifier: Apache-2.0
"""A blocking client of pvrd, for pvrctl and for programs: text, video and pictures in a few calls
each.

    with Client() as client, client.open_text({"device": "auto"}) as session:
        for event in session.chat([{"role": "user", "content": "Hello"}], {}):
            print(event.get("text", ""), end="")

Options are plain Python values; the types that D-Bus wants stand in OPTIONS. Every error of the API
is raised as its class in pvrd/errors.py. A client belongs to one thread. docs/api.md is the API,
docs/client.md says more of this; Vulkan is not needed, numpy only for frames as arrays. The same
for asyncio is pvrd/client_async.py; the calls themselves are described once, in pvrd/client_api.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Self

from pvrd import client_api as api
from pvrd.activate import NAME, activate
from pvrd.bus import BUS, BUS_PATH, BusAddress, BusError, Connection, Reply
from pvrd.client_api import MANAGER, PATH, TEXT, VIDEO, NoDaemon, T, translate
from pvrd.client_options import OPTIONS, options
from pvrd.client_stream import Progress, TextStream
from pvrd.client_video import VideoSession
from pvrd.errors import NoSuchSession, PvrdError, Timeout

__all__ = [
    "MANAGER",
    "NAME",
    "OPTIONS",
    "PATH",
    "TEXT",
    "VIDEO",
    "Client",
    "NoDaemon",
    "Progress",
    "Session",
    "TextSession",
    "TextStream",
    "VideoSession",
    "options",
    "translate",
]

RESTART_LOOK_S = 0.1  # between two looks for a daemon that is being restarted
_ABANDON_S = 0.2  # for a call that was broken off to let go of what it holds


def _in_a_loop() -> bool:
    """Does this thread run a loop already?"""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


class Client:
    """A connection to the daemon. Where a loop of asyncio runs, a call holds it up.

    Args:
        bus: user, system or an address; by default $PVRD_BUS, else the system bus if pvrd is there,
        else the user bus.
        wait: so many seconds a call waits for a daemon that is being restarted. Text sessions are
        opened again then; a video session ends, since its frames lie in memory of the old one.

    Raises:
        NoDaemon: there is no daemon there.
    """

    def __init__(self, bus: str | None = None, *, wait: float = 0.0) -> None:
        self._loop = asyncio.new_event_loop()
        self._connection: Connection | None = None
        self._restart_s = wait
        self.bus = ""
        try:
            self.bus, self._connection = self._wait(api.find(bus, _start))
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the connection, and with it all sessions. A second time is no error."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        if not self._loop.is_closed():
            self._loop.close()

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        if self._loop.is_closed():
            work.close()
            raise NoDaemon("The connection is closed.")
        task = self._loop.create_task(work)
        try:
            return self._run(task)
        except BusError as error:
            raise translate(error) from error
        except Exception:
            raise
        except BaseException:
            # Ctrl-C breaks the loop off anywhere: what was to wake the task may be lost, and half a
            # message read. The connection ends, and its sessions with it in the daemon.
            self._abandon(task)
            raise

    def _run(self, task: asyncio.Task[T]) -> T:
        """The task's result. A thread runs one loop: where the caller has its own (a notebook, a
        program that calls from a coroutine), another thread runs ours meanwhile."""
        if not _in_a_loop():
            return self._loop.run_until_complete(task)
        with ThreadPoolExecutor(1) as aside:
            job = aside.submit(self._loop.run_until_complete, task)
            try:
                return job.result()
            finally:
                if not job.done():
                    self._loop.call_soon_threadsafe(task.cancel)

    def _abandon(self, task: asyncio.Task[Any]) -> None:
        task.cancel()
        last = asyncio.wait({task}, timeout=_ABANDON_S)
        with contextlib.suppress(BaseException):
            self._loop.run_until_complete(last)
        last.close()
        self._loop.set_exception_handler(lambda _loop, _context: None)
        self.close()

    def call(
        self,
        path: str,
        interface: str,
        member: str,
        signature: str = "",
        body: Sequence[Any] = (),
        *,
        fds: Sequence[int] = (),
        timeout: float | None = 25.0,
        interactive: bool = False,
    ) -> Reply:
        """Calls a method of the daemon; `h` values in the body are indexes into `fds`, which stay
        the caller's.

        Raises:
            PvrdError: what the daemon or the bus answered.
        """
        if self._connection is None:
            raise NoDaemon("The connection is closed.")
        end = time.monotonic() + self._restart_s
        while True:
            try:
                if self._connection.closed.done() and self._restart_s:
                    self._connection = self._wait(Connection.connect(BusAddress.parse(self.bus)))
                return self._wait(
                    self._connection.call(
                        NAME, path, interface, member, signature, body, fds, timeout, interactive
                    )
                )
            except NoDaemon:
                if time.monotonic() >= end or self._loop.is_closed():
                    raise
            time.sleep(RESTART_LOOK_S)

    def owner(self) -> str:
        """The daemon's unique name on the bus, another one after a restart; empty while there is
        none."""
        if self._connection is None:
            raise NoDaemon("The connection is closed.")
        return self._wait(self._connection.name_owner(NAME)) or ""

    def ask(self, call: api.Call[T], path: str = PATH) -> T:
        """Makes a call of pvrd/client_api.py to the object at `path`. Raises as call()."""
        return call.read(self.call(path, call.interface, *call.what, **call.how))

    def properties(self, interface: str = MANAGER, path: str = PATH) -> dict[str, Any]:
        """All properties of an object, as plain values."""
        return self.ask(api.properties(interface), path)

    def models(self) -> list[dict[str, Any]]:
        """What ListModels says."""
        return self.ask(api.models())

    def add_model(self, fd: int, name: str, settings: Mapping[str, Any]) -> Progress:
        """Adds the model in the file `fd` under `name`; follow the progress to its end."""
        return Progress(self.ask(api.add_model(fd, name, settings)))

    def remove_model(self, name: str) -> None:
        """Removes a model that was added."""
        self.ask(api.remove_model(name))

    def config(self) -> dict[str, Any]:
        """The configuration in force, keys `section.key`."""
        return self.ask(api.config())

    def set_config(self, values: Mapping[str, tuple[str, Any]]) -> None:
        """Changes the configuration: key -> (D-Bus type, value)."""
        self.ask(api.set_config(values))

    def statistics(self) -> dict[str, Any]:
        """The counters."""
        return self.ask(api.statistics())

    def jobs(self, all_users: bool = False) -> list[dict[str, Any]]:
        """The caller's jobs, and its sessions without any; or those of all users."""
        return self.ask(api.jobs(all_users))

    def trace(self, seconds: float) -> int:
        """A memfd with the trace of so many seconds from now on (JSON); to close."""
        return self.ask(api.trace(seconds))

    def daemon_pid(self) -> int:
        """The daemon's process.

        Raises:
            PvrdError: it is gone.
        """
        if self._connection is None:
            raise NoDaemon("The connection is closed.")
        reply = self._wait(
            self._connection.call(BUS, BUS_PATH, BUS, "GetConnectionUnixProcessID", "s", [NAME])
        )
        return int(reply.body[0])

    def diagnostics(self) -> list[dict[str, Any]]:
        """What the daemon has to say to a doctor."""
        return self.ask(api.diagnostics())

    def hold(self, reason: str) -> int:
        """Keeps the GPU free of pvrd until the returned fd is closed or this client is."""
        return self.ask(api.hold(reason))

    def open_text(self, settings: Mapping[str, Any]) -> TextSession:
        """Opens a session for text; options of OpenText."""
        made = options(settings)
        path = self.ask(api.open_text(made))
        return TextSession(self, path, TEXT, made if self._restart_s else None)

    def open_video(self, settings: Mapping[str, Any]) -> VideoSession:
        """Opens a session for video; options of OpenVideo."""
        path, ring, sock, layout = self.ask(api.open_video(settings))
        return VideoSession(Session(self, path, VIDEO), ring, sock, layout)

    def upscale(self, fd: int, settings: Mapping[str, Any]) -> tuple[Progress, int]:
        """Enlarges the picture in the file or sealed memfd `fd`: the progress, and the memfd of the
        result (to close)."""
        progress, result = self.ask(api.upscale(fd, settings))
        return Progress(progress), result


async def _start(bus: str) -> None:
    activate(bus)  # nothing else runs on a client's loop


class Session:
    """A session object; closing it ends what it does. `loading` follows the model's loading."""

    def __init__(
        self, client: Client, path: str, interface: str, again: Mapping[str, Any] | None = None
    ) -> None:
        self._client = client
        self._path = path
        self._interface = interface
        self._open = True
        self._again = again  # options to open it with in the daemon that comes after this one
        self._owner = client.owner() if again is not None else ""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def call(self, member: str, signature: str = "", body: Sequence[Any] = ()) -> Reply:
        """Calls a method of the session."""
        self._follow()
        try:
            return self._client.call(self._path, self._interface, member, signature, body)
        except (NoSuchSession, Timeout, NoDaemon):
            if not self._follow():
                raise
        return self._client.call(self._path, self._interface, member, signature, body)

    def _follow(self) -> bool:
        """Opens the session anew where the daemon was restarted; was it?

        Its path may be another session's in the new daemon, so this goes before each call.
        """
        if self._again is None or self._client.owner() == self._owner:
            return False
        self._path = self._client.ask(api.open_text(self._again))
        self._owner = self._client.owner()
        return True

    def properties(self) -> dict[str, Any]:
        """The session's properties."""
        self._follow()
        return self._client.properties(self._interface, self._path)

    def loading(self, interval: float = 0.1) -> Iterator[float]:
        """Yields how much is loaded, 0..1, until the session is ready or has failed."""
        while True:
            state = self.properties()
            if state.get("Ready") or state.get("Error"):
                return
            yield float(state.get("Progress", 0.0))
            time.sleep(interval)

    def close(self) -> None:
        """Closes the session in the daemon; never raises, the daemon does it by itself when the
        client goes."""
        if self._open:
            self._open = False
            with contextlib.suppress(PvrdError):
                if self._again is None or self._client.owner() == self._owner:
                    self._client.ask(api.close(self._interface), self._path)


class TextSession(Session):
    """A session for text: one job at a time."""

    def ask(self, call: api.Call[T]) -> T:
        """Makes a call of pvrd/client_api.py to the session."""
        return call.read(self.call(*call.what))

    def generate(self, prompt: str, settings: Mapping[str, Any]) -> TextStream:
        """Goes on with the prompt as it stands."""
        return TextStream(self.ask(api.generate(prompt, settings)))

    def chat(
        self, messages: Sequence[Mapping[str, str]], settings: Mapping[str, Any]
    ) -> TextStream:
        """Answers a talk, through the model's chat template; messages are {role, content}."""
        return TextStream(self.ask(api.chat(messages, settings)))

    def count_tokens(self, text: str) -> int:
        """Tokens of the text as it stands."""
        return self.ask(api.count_tokens(text))

    def embed(self, texts: Sequence[str], settings: Mapping[str, Any]) -> list[list[float]]:
        """A vector of length 1 for each text."""
        return self.ask(api.embed(texts, settings))

    def classify(
        self, text: str, labels: Sequence[str], settings: Mapping[str, Any]
    ) -> tuple[str, dict[str, float]]:
        """The label that fits a text best, and the share of each."""
        return self.ask(api.classify(text, labels, settings))

    def extract(self, text: str, schema: str, settings: Mapping[str, Any]) -> str:
        """JSON that fits the schema, of what the text says."""
        return self.ask(api.extract(text, schema, settings))

    def cancel(self) -> None:
        """Ends the running job."""
        self.ask(api.cancel())

    def cancel_quietly(self) -> None:
        """As cancel, where nobody listens for errors any more."""
        with contextlib.suppress(PvrdError):
            self.cancel()
