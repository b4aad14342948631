# SPDX-License-Identifier: Apache-2.0
"""The agent from its start to its end: when to measure, what to report."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from typing import Any

from pvrd import systemd
from pvrd.agent.daemon import Pvrd
from pvrd.agent.games import GameMode
from pvrd.agent.measure import Figures
from pvrd.agent.meter import STUCK, Meter
from pvrd.agent.surface import Stuck, Unknown
from pvrd.bus import BusAddress, BusError, Connection
from pvrd.errors import StartError

REPORT_S = 1.0  # the least time between two reports
UNKNOWN_S = 20.0  # where nothing can be measured, it is tried more and more rarely, to this


class Agent:
    """One agent. Between two bursts it sleeps, and while pvrd has no work it waits for a signal."""

    def __init__(self, address: BusAddress, every_s: float, window: bool) -> None:
        """every_s: from one burst to the next."""
        loop = asyncio.get_running_loop()
        self._address = address
        self._every_s = every_s
        self._meter = Meter(window)
        self._news = asyncio.Event()
        self._stop: asyncio.Future[str] = loop.create_future()
        self._games: GameMode | None = None
        self._last = loop.time() - REPORT_S  # when a report went out
        self._refresh_hz: float | None = None  # as last seen
        self._said = ""
        self._failures = 0  # one after the other
        self._idle: tuple[str, tuple[str, ...]] | None = None  # who was told of what while idle
        self._pvrd: Pvrd

    async def run(self) -> int:
        """Runs to the end; the exit status.

        Raises:
            StartError: there is no bus.
        """
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._end, "")
        try:
            connection = await Connection.connect(self._address)
            self._pvrd = Pvrd(connection, self._news.set)
            await self._pvrd.start()
        except BusError as e:
            raise StartError(e.message) from None
        connection.closed.add_done_callback(lambda done: self._end(done.result() or "closed"))
        session = await self._watch_games()
        work = loop.create_task(self._work())
        work.add_done_callback(lambda _: self._end("it met a fault of its own"))
        systemd.notify(READY=1)
        reason = await self._stop
        work.cancel()
        await asyncio.wait({work})
        self._meter.close()
        self._pvrd.let_go()
        for each in (connection, session):
            if each is not None and not each.closed.done():
                each.close()
        if reason and not work.cancelled() and (error := work.exception()) is not None:
            raise error
        if reason:  # systemd starts it again
            systemd.log(systemd.NOTICE, f"pvr-agent ends: {reason}")
            return 1
        return 0

    def _end(self, reason: str) -> None:
        if not self._stop.done():
            self._stop.set_result(reason)

    async def _watch_games(self) -> Connection | None:
        """GameMode lives on the session bus; without one there are no games to tell of."""
        try:
            connection = await Connection.connect(BusAddress.parse("user"))
        except BusError:
            return None
        try:
            self._games = GameMode(connection, self._news.set)
            await self._games.start()
        except BusError:
            connection.close()
            self._games = None
            return None
        return connection

    async def _work(self) -> None:
        while True:
            pause: float | None = None
            try:
                pause = await self._turn()
            except BusError as e:  # pvrd went away, or is busy
                if self._pvrd.working:
                    pause = REPORT_S
                self._say(f"pvrd takes no report: {e.message}")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self._news.wait()
                    self._news.clear()

    async def _turn(self) -> float | None:
        """Measures when it is time, and reports; how long to wait then, None for news alone."""
        pvrd = self._pvrd
        if pvrd.owner is None or pvrd.old:
            self._meter.close()
            if pvrd.old:
                self._say("the pvrd that runs takes no reports")
            return None
        games = self._games.games if self._games is not None else ()
        games = tuple(f"GameMode: {game}" for game in games)
        held = await pvrd.hold(games)
        told: dict[str, Any] = {"games": list(games) if games and not held else None}
        told["compositor"] = _desktop()
        if not pvrd.working:
            self._meter.close()
            if self._idle != (pvrd.owner, games):
                await self._report(told)  # so that it is known to be there
                self._idle = (pvrd.owner, games)
            return None
        self._idle = None
        pause = self._every_s
        try:
            found = await self._meter.burst()
        except Unknown as e:
            pause = min(self._every_s * 2**self._failures, UNKNOWN_S)
            self._failures = min(self._failures + 1, 16)
            told["reason"] = str(e)[:200]
            self._say(f"nothing can be measured: {e}")
        except Stuck:
            # All refreshes of this time were missed; how many that is, the last burst tells.
            told.update(reason=STUCK, refresh_hz=self._refresh_hz, missed_per_s=self._refresh_hz)
        else:
            told.update(self._told(found))
        told["valid_s"] = min(60.0, max(2.0, 3 * pause))
        if pvrd.working:
            await self._report(told)
        return pause

    def _told(self, found: Figures) -> dict[str, Any]:
        if found.refresh_hz is not None:
            self._refresh_hz = found.refresh_hz
        self._said = ""
        self._failures = 0
        values: dict[str, Any] = {
            "frames": found.frames,
            "refresh_hz": found.refresh_hz,
            "missed_per_s": found.missed_per_s,
            "latency_ms": found.latency_ms,
        }
        if found.refresh_hz is None:
            values["reason"] = "the compositor does not tell its refresh interval"
        return values

    async def _report(self, values: dict[str, Any]) -> None:
        loop = asyncio.get_running_loop()
        await asyncio.sleep(max(0.0, self._last + REPORT_S - loop.time()))
        self._last = loop.time()
        await self._pvrd.report(values)

    def _say(self, text: str) -> None:
        """Into the journal, once."""
        if text != self._said:
            self._said = text
            systemd.log(systemd.NOTICE, text)


def _desktop() -> str:
    name = os.environ.get("XDG_CURRENT_DESKTOP", "")
    return "".join(c for c in name if c.isprintable())[:80]


async def serve(bus: str, every_s: float, window: bool) -> int:
    """Runs an agent of the pvrd on `bus` (user, system or an address); the exit status.

    Raises:
        StartError: there is no bus.
    """
    try:
        address = BusAddress.parse(bus)
    except BusError as e:
        raise StartError(e.message) from None
    return await Agent(address, every_s, window).run()
