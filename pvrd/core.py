# SPDX-License-Identifier: Apache-2.0
"""What sessions and the Manager share, and the base of sessions."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

from pvrd import systemd
from pvrd.bus import Connection
from pvrd.config import Config, Paths
from pvrd.errors import Internal, PvrdError, ShuttingDown, shortage
from pvrd.governor import Governor
from pvrd.holds import Holds
from pvrd.jobs import Jobs
from pvrd.models import Model, ModelStore
from pvrd.objects import SESSIONS, Object, ObjectTree, prop, where
from pvrd.peers import Peers
from pvrd.polkit import Polkit
from pvrd.precision import Precision
from pvrd.sensors import Sensors
from pvrd.stats import Stats
from pvrd.supervisor import Supervisor
from pvrd.worker import Worker


@dataclass
class Core:
    """The parts of a running daemon."""

    config: Config
    paths: Paths
    connection: Connection
    tree: ObjectTree
    store: ModelStore
    supervisor: Supervisor
    peers: Peers
    polkit: Polkit
    sensors: Sensors
    governor: Governor
    holds: Holds = field(default_factory=Holds)
    stats: Stats = field(default_factory=Stats)
    sessions: dict[str, Session] = field(default_factory=dict)
    tasks: set[asyncio.Task[None]] = field(default_factory=set)
    jobs: Jobs = field(default_factory=Jobs)
    steer: Callable[[], None] = lambda: None  # the governor has to look anew
    config_fault: Callable[[], str] = str  # what is wrong with the files as they lie there now
    looking: asyncio.Future[list[Any]] | None = None  # at files, for who asks what is wrong
    closing: bool = False
    number: int = 0

    @functools.cached_property
    def precision(self) -> Precision:
        """Which form of a text model a new job takes."""
        return Precision(self.supervisor, self.store)

    def check_open(self) -> None:
        """Raises ShuttingDown when the daemon is ending."""
        if self.closing:
            raise ShuttingDown("pvrd is ending")

    def next_number(self) -> int:
        """A number that no session or job had before."""
        self.number += 1
        return self.number

    def task(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Runs something that handles its own errors; a fault of ours goes to the journal."""
        task = asyncio.get_running_loop().create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self._task_done)
        return task

    def _task_done(self, task: asyncio.Task[None]) -> None:
        self.tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            systemd.log(systemd.ERROR, f"a task failed: {where(error)}", PVRD_REASON="internal")

    def shares(self) -> int:
        """Percent of the device that sessions are guaranteed."""
        return self.jobs.shares() + sum(session.share for session in self.sessions.values())


def report(error: Exception) -> PvrdError:
    """An error for a stream: what was not foreseen goes to the journal and becomes Internal."""
    if isinstance(error, PvrdError):
        return error
    if short := shortage(error):
        return short
    systemd.log(systemd.ERROR, f"a job failed: {where(error)}", PVRD_REASON="internal")
    return Internal("pvrd met a fault of its own; the journal has the place")


class Session(Object):
    """A session: its owner, its model, and the loading of that.

    The owner's hold and the UID's charges belong to it from open() to close().
    """

    def __init__(self, core: Core, owner: str, uid: int, model: Model, options: Any) -> None:
        self.number = core.next_number()
        super().__init__(f"{SESSIONS}/{self.number}", owner)
        self.core = core
        self.uid = uid
        self.model = model
        self.choice: str = options["device"]
        self.priority: int = options["priority"]
        self.share: int = options["share"]
        self.charge = 0  # bytes
        self.fds = 0  # open as long as it is
        self.opened = time.monotonic()
        self.closed = False
        self._ready = False
        self._progress = 0.0
        self._error = ""
        self._device = ""

    @property
    def id(self) -> str:
        """The session's name in the worker protocol."""
        return f"s{self.number}"

    def open(self) -> None:
        """Puts it on the bus."""
        self.core.sessions[self.path] = self
        self.core.tree.add(self)
        self.core.supervisor.use(self.model)
        self.core.stats.sessions += 1

    def close(self) -> None:
        """Ends it and all that it does. A second time is no error."""
        if self.closed:
            return
        self.closed = True
        self.core.tree.remove(self)
        self.core.sessions.pop(self.path, None)
        self.end()
        for worker in self.core.supervisor.workers:
            worker.send({"t": "close", "session": self.id})
        self.core.supervisor.release(self.model)
        self.core.peers.give(self.uid, 1, self.charge, self.fds)
        self.core.peers.release(self.owner or "")

    def end(self) -> None:
        """What a kind of session has to end."""
        raise TypeError("a kind of session defines end()")

    def set(self, **values: Any) -> None:
        """Sets properties (ready, progress, error, device) and tells the owner what changed."""
        names = []
        for key, value in values.items():
            old = getattr(self, f"_{key}")
            small = key == "progress" and abs(value - old) < 0.01 and value < 1.0
            if value != old and not small:
                setattr(self, f"_{key}", value)
                names.append(key.capitalize())
        if names and not self.closed:
            self.core.tree.changed(self, *names)

    def news(self) -> None:
        """A worker changed: how far is the model?"""
        if self._ready:
            return
        for worker in self.core.supervisor.workers:
            loading = worker.models.get(self.model.key)
            if loading is not None and not loading.future.done():
                self.set(progress=loading.progress)

    def arrived(self, worker: Worker) -> None:
        """The model is there, in this worker."""
        self.set(ready=True, progress=1.0, error="", device=worker.kind)

    @prop("Ready", "b")
    def ready(self) -> bool:
        """Is the model loaded?"""
        return self._ready

    @prop("Progress", "d")
    def progress(self) -> float:
        """Of loading, 0..1."""
        return self._progress

    @prop("Error", "s")
    def error(self) -> str:
        """Why it failed."""
        return self._error

    @prop("Device", "s")
    def device(self) -> str:
        """gpu, cpu, or empty."""
        return self._device

    @prop("Model", "s")
    def model_name(self) -> str:
        """The model's name."""
        return self.model.name
