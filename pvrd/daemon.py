# SPDX-License-Identifier: Apache-2.0
"""The daemon from its start to its end: bus, workers, readiness, reload, watchdog, shutdown."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Callable
from pathlib import Path

from pvrd import __version__, config, systemd
from pvrd.bus import BusAddress, BusError, Connection
from pvrd.config import Config, Paths
from pvrd.core import Core
from pvrd.errors import PvrdError, ShuttingDown, StartError
from pvrd.governor import Governor
from pvrd.manager import Manager
from pvrd.models import ModelStore
from pvrd.objects import NAMESPACE, ObjectTree
from pvrd.peers import Peers
from pvrd.polkit import Polkit
from pvrd.sensors import Sensors
from pvrd.steering import Steering
from pvrd.supervisor import Supervisor
from pvrd.text_session import TextSession

_REAP_S = 2.0  # for streams to take their last line


class Daemon:
    """One daemon on one bus."""

    def __init__(self, address: BusAddress, file: Path | None) -> None:
        self.address = address
        self._file = file
        self._paths = Paths.find(address.kind == "system")
        self._stop: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def run(self) -> int:
        """Runs to the end; the exit status.

        Raises:
            StartError: it cannot start.
        """
        loop = asyncio.get_running_loop()
        settings = self._load()
        try:
            connection = await Connection.connect(self.address)
        except BusError as e:
            raise StartError(e.message) from None
        self._core = core = self._build(connection, settings)
        self._manager = Manager(core, self.address.kind, self.reload)
        self._steering = Steering(
            core, lambda: self._manager.activity.working, self._manager.reports.games
        )
        core.steer = self._steering.news
        core.holds.on_change = self._steering.decide
        core.holds.on_end = core.peers.release
        core.tree.add(self._manager)
        await self._tidy(core.store.recover)
        try:
            await connection.request_name(NAMESPACE)
        except BusError as e:
            connection.close()
            raise StartError(
                "another pvrd is on this bus already" if e.name == "NameTaken" else e.message
            ) from None
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._end, "")
        loop.add_signal_handler(signal.SIGHUP, self._hangup)
        connection.closed.add_done_callback(lambda done: self._end(done.result() or "lost"))
        core.task(self._tidy(core.store.sweep))
        core.supervisor.start()
        core.task(self._steering.start())  # not awaited: the system bus may hang
        ready = loop.create_task(self._become_ready())
        watchdog = loop.create_task(self._watchdog())
        reason = await self._stop
        ready.cancel()
        watchdog.cancel()
        await self._shut_down()
        if reason:
            systemd.log(systemd.ERROR, reason)
            return 1
        return 0

    async def _tidy(self, work: Callable[[], None]) -> None:
        """Has the store put itself in order. Where its disk does not answer that is left undone."""
        try:
            await self._core.store.change(work)
        except PvrdError as e:
            systemd.log(systemd.WARNING, f"models are not put in order: {e}")

    def _load(self) -> Config:
        settings = config.load(self._paths, self._file)
        for warning in settings.warnings:
            systemd.log(systemd.WARNING, warning)
        return settings

    def _config_fault(self) -> str:
        try:
            config.load(self._paths, self._file)
        except StartError as e:
            return str(e)
        return ""

    def _build(self, connection: Connection, settings: Config) -> Core:
        return Core(
            settings,
            self._paths,
            connection,
            ObjectTree(connection),
            ModelStore(self._paths, settings),
            Supervisor(settings, self._cache(), self._news),
            Peers(connection, settings, self._caller_gone),
            Polkit(connection, self.address, self._accounts),
            Sensors(connection, settings, self._heard),
            Governor(settings),
            config_fault=self._config_fault,
        )

    def _accounts(self) -> tuple[str, ...]:
        return self._core.config.texts("access.accounts")

    def _heard(self) -> None:
        self._steering.news()

    def _cache(self) -> str:
        with contextlib.suppress(OSError):
            self._paths.cache.mkdir(parents=True, exist_ok=True)
        return str(self._paths.cache)

    async def _become_ready(self) -> None:
        """READY once the name is ours and each worker said hello, or will not."""
        seconds = self._core.config.number("deadlines.hello_s") + 1.0
        await self._core.supervisor.settled(seconds)
        self._news()
        systemd.log(
            systemd.INFO, f"pvrd {__version__} ready, {self._core.supervisor.state}",
            MESSAGE_ID=systemd.MESSAGE_STARTED,
        )  # fmt: skip
        self._ready = True
        systemd.notify(READY=1, STATUS=self._status())

    _ready = False

    def _status(self) -> str:
        supervisor = self._core.supervisor
        return f"{supervisor.state}, {len(self._core.sessions)} sessions" + (
            f"; {supervisor.reason}" if supervisor.reason else ""
        )

    async def _watchdog(self) -> None:
        every = systemd.watchdog_s()
        while every is not None:
            systemd.notify(WATCHDOG=1)
            await asyncio.sleep(every / 2)

    # -- what happens

    def _end(self, reason: str) -> None:
        if not self._stop.done():
            self._stop.set_result(reason)

    def _news(self) -> None:
        self._manager.news()
        for session in list(self._core.sessions.values()):
            session.news()
        self._steering.met()
        if self._ready and not self._core.closing:
            systemd.notify(STATUS=self._status())

    def _caller_gone(self, name: str) -> None:
        """A caller left the bus, most often by its own end: what it had open ends, too."""
        theirs = [s for s in self._core.sessions.values() if s.owner == name]
        for session in theirs:
            session.close()
        if theirs:
            systemd.log(
                systemd.INFO, f"{name} left the bus; its sessions ended: {len(theirs)}",
                PVRD_SESSION=theirs[0].id, PVRD_REASON="the client is gone",
            )  # fmt: skip
        self._core.holds.gone(name)

    def _hangup(self) -> None:
        systemd.notify(RELOADING=1)
        try:
            self.reload()
        except StartError as e:
            systemd.log(systemd.ERROR, f"the old configuration stays: {e}")
        systemd.notify(READY=1, STATUS=self._status())

    def reload(self) -> None:
        """Reads the configuration anew; sessions stay.

        Raises:
            StartError: it is bad; the old one stays in force.
        """
        settings = self._load()
        core = self._core
        core.config = core.store.config = core.peers.config = settings
        core.governor.config = settings
        core.sensors.reconfigure(settings)
        core.supervisor.reconfigure(settings)
        self._steering.news()

    # -- the end

    async def _shut_down(self) -> None:
        """No new work; jobs get limits.shutdown_s, then ShuttingDown; then the workers end."""
        core = self._core
        systemd.notify(STOPPING=1)
        core.closing = True
        deadline = core.config.number("limits.shutdown_s")
        if core.connection.closed.done():
            deadline = 0.0  # nobody can take an answer any more
        jobs = [
            session.job.task
            for session in core.sessions.values()
            if isinstance(session, TextSession) and session.job is not None and session.job.task
        ]
        if jobs and deadline:
            await asyncio.wait(jobs, timeout=deadline)
        for session in list(core.sessions.values()):
            if isinstance(session, TextSession) and session.job is not None:
                session.job.stop(ShuttingDown("pvrd is ending"))
            session.close()
        await core.tree.drain(min(deadline, 1.0))
        for task in set(core.tasks):
            if task.cancelling() == 0:
                task.cancel()
        if core.tasks:
            await asyncio.wait(set(core.tasks), timeout=_REAP_S)
        await self._steering.stop()
        core.holds.close()
        await core.supervisor.stop()
        if not core.connection.closed.done():
            with contextlib.suppress(BusError):
                await core.connection.release_name(NAMESPACE)
            core.connection.close()


async def serve(bus: str, file: Path | None) -> int:
    """Runs a daemon on `bus` (user, system or an address); the exit status.

    Raises:
        StartError: it cannot start.
    """
    try:
        address = BusAddress.parse(bus)
    except BusError as e:
        raise StartError(e.message) from None
    return await Daemon(address, file).run()
