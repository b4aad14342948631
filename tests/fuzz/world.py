# SPDX-License-Identifier: Apache-2.0
"""What is around a session: pvrd's supervisor and worker links in this process, without a bus, and
two workers that a target plays.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import os
import socket
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROUNDS = 400  # of the loop, for what is under way to come to its end
KINDS = ("gpu", "cpu")


class Finding(Exception):
    """What a session must not do."""


class Process:
    """A worker's, which ends when it is told to."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def kill(self) -> None:
        if not self.ended.done():
            self.ended.set_result("it was killed by signal 9")

    def forget(self) -> None:
        pass


@functools.cache
def settings() -> tuple[Any, Any]:
    """Configuration, and paths at which there is nothing."""
    from pvrd.config import Paths, load

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        file = folder / "c.toml"
        file.write_text(
            "[workers]\nbackoff_s = 0.01\nbackoff_max_s = 0.01\n[limits]\nslow_reader_s = 0.2\n"
        )
        paths = Paths(folder, folder, folder)
        return load(paths, file), paths


class World:
    """The control process without a bus, and both workers."""

    def __init__(self) -> None:
        from pvrd.bus import Connection
        from pvrd.core import Core
        from pvrd.governor import Governor
        from pvrd.models import Model, ModelStore
        from pvrd.objects import ObjectTree
        from pvrd.peers import Peers
        from pvrd.supervisor import Supervisor

        config, paths = settings()
        ours, self._bus = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        for sock in (ours, self._bus):
            sock.setblocking(False)
        self._connection = Connection(ours)
        self._connection.unique_name = ":1.1"
        self.ends: dict[str, socket.socket] = {}
        self._processes: dict[str, Process] = {}
        self.frames: dict[str, list[dict[str, Any]]] = {kind: [] for kind in KINDS}
        self.jobs: dict[str, dict[str, Any]] = {}  # of text, by worker
        tree, store = ObjectTree(self._connection), ModelStore(paths, config)
        absent: Any = None
        self.core = Core(
            config, paths, self._connection, tree, store, Supervisor(config, "", self._news),
            Peers(self._connection, config, lambda name: None), absent, absent, Governor(config),
        )  # fmt: skip
        nothing = Path("/dev/null")  # no worker reads it
        self.model = Model("m", "text", nothing, 0, "file", "k")
        self.film = Model("v", "video", nothing, 0, "file", "w")

    def _news(self) -> None:
        for session in list(self.core.sessions.values()):
            session.news()

    async def spawn(self, kind: str, program: Any) -> tuple[socket.socket, Any]:
        """In the place of link.spawn."""
        from pvrd.workers import protocol

        ours, theirs = protocol.pair()
        theirs.setblocking(False)
        self._drop(kind)
        self.ends[kind], self._processes[kind] = theirs, Process()
        return ours, self._processes[kind]

    def _drop(self, kind: str) -> None:
        if (end := self.ends.pop(kind, None)) is not None:
            end.close()
            self._processes.pop(kind).kill()
        self.frames[kind].clear()
        self.jobs.pop(kind, None)

    def say(self, kind: str, message: Any) -> None:
        """A worker's word, if it has one."""
        if isinstance(message, dict) and kind in self.ends:
            with contextlib.suppress(OSError):
                self.ends[kind].send(json.dumps(message).encode("utf-8", "surrogatepass"))

    async def turns(self, count: int = 8) -> None:
        """The loop goes on; workers answer what needs no thought."""
        for _ in range(count):
            await asyncio.sleep(0)
            for kind in KINDS:
                self._listen(kind)
            with contextlib.suppress(BlockingIOError):
                self._bus.recv(1 << 16)

    def _listen(self, kind: str) -> None:
        from pvrd.workers import protocol

        while kind in self.ends:
            try:
                received = protocol.recv(self.ends[kind])
            except BlockingIOError:
                return
            except (OSError, protocol.ProtocolError):
                received = None
            if received is None:
                self._drop(kind)
                return
            received.close()
            self._hear(kind, received.message)

    def _hear(self, kind: str, m: dict[str, Any]) -> None:
        what = m["t"]
        if what == "hello":
            device = {"kind": kind, "name": kind, "driver": "none", "software": True}
            self.say(kind, {"t": "hello", "protocol": 1, "pid": 1, "device": device})
        elif what == "ping":
            self.say(kind, {"t": "pong", "n": m["n"]})
        elif what == "load":
            self.say(kind, {"t": "loaded", "model": m["model"], "info": {}})
        elif what == "video.open":
            takes = [0.01] * (1 + len(m["levels"]))
            self.say(kind, {"t": "video.ready", "session": m["session"], "takes": takes})
        elif what == "frame":
            self.frames[kind].append(m)
        elif what == "text":
            self.jobs[kind] = {"job": m["job"], "n": m["delivered"]}
            self.say(kind, {"t": "text.start", "job": m["job"], "prompt_tokens": 1, "context": 64})
        elif what == "cancel" and self.jobs.get(kind, {}).get("job") == m["job"]:
            del self.jobs[kind]

    def die(self, kind: str) -> None:
        if kind in self.ends:
            self._drop(kind)

    async def until(self, true: Callable[[], bool], what: str) -> None:
        """Goes on until it is so.

        Raises:
            Finding: it never is.
        """
        end = time.monotonic() + 10
        rounds = 0
        while not true():
            rounds += 1
            await self.turns(1)
            if rounds > ROUNDS:
                await asyncio.sleep(0.005)
                if time.monotonic() > end:
                    raise Finding(f"not in time: {what}")

    async def over(self) -> None:
        """The end of pvrd; nothing may be left of the session.

        Raises:
            Finding: something is.
        """
        await self.until(lambda: not self.core.tasks, "the end of all tasks")
        used = self.core.peers.usage(0)
        if used.sessions or used.fds or used.jobs or used.bytes or self.core.sessions:
            raise Finding(f"the session left {used}")
        if any(worker.jobs for worker in self.core.supervisor.workers):
            raise Finding("a worker's words are for somebody still")
        stop = asyncio.ensure_future(self.core.supervisor.stop())
        await self.until(stop.done, "the end of the workers")
        for kind in KINDS:
            self.die(kind)
        self._connection.close()
        self._bus.close()
        await asyncio.sleep(0)
