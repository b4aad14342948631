# SPDX-License-Identifier: Apache-2.0
"""What pvr-agents tell, and when they are wanted to: the daemon's end of ReportCompositor.

An agent measures only while work is under way (`Working`), so that an idle machine stays idle. What
it says goes to the sensors' store (pvrd/sensors/compositor.py), which decides whom to believe.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from pvrd.bus import BUS, Call, Connection, Signal, Subscription
from pvrd.errors import Busy, InvalidArgument, QuotaExceeded
from pvrd.options import Option, parse
from pvrd.peers import Peers
from pvrd.sensors.compositor import Compositor

LINGER_S = 5.0  # work with shorter pauses counts as one
EVERY_S = 0.9  # between two reports of one agent; it means a second, and its timer may be early
AGENTS, AGENTS_A_USER = 16, 4
MOST_GAMES = 16

REPORT: Mapping[str, Option] = {
    "refresh_hz": Option("float", low=1, high=1000),
    "missed_per_s": Option("float", high=1000),
    "latency_ms": Option("float", high=60000),
    "frames": Option("int", high=10000),
    "valid_s": Option("float", 10.0, low=1, high=60),
    "compositor": Option("str", "", length=80),
    "reason": Option("str", "", length=200),
    "games": Option("strs", (), high=MOST_GAMES, length=128),
}
_FIGURES = ("refresh_hz", "missed_per_s", "latency_ms")


class Activity:
    """Is work under way? `on_change` hears of the first and of the end of the last."""

    def __init__(
        self,
        on_change: Callable[[], None],
        busy: Callable[[], bool] = lambda: False,
        linger_s: float = LINGER_S,
    ) -> None:
        """busy: does a job run that may be silent for long? While it does, the work goes on."""
        self._on_change = on_change
        self._busy = busy
        self._linger_s = linger_s
        self._last = 0.0
        self._timer: asyncio.TimerHandle | None = None

    @property
    def working(self) -> bool:
        """True from the first message about a job until linger_s after the last."""
        return self._timer is not None

    def touch(self) -> None:
        """A job came, or got on."""
        loop = asyncio.get_running_loop()
        self._last = loop.time()
        if self._timer is None:
            self._timer = loop.call_later(self._linger_s, self._look)
            self._on_change()

    def stop(self) -> None:
        """No more; nobody is told."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look(self) -> None:
        loop = asyncio.get_running_loop()
        rest = self._linger_s if self._busy() else self._last + self._linger_s - loop.time()
        if rest > 0:
            self._timer = loop.call_later(rest, self._look)
            return
        self._timer = None
        self._on_change()


@dataclass
class Agent:
    """One agent on the bus, and what it said last."""

    uid: int
    time_s: float
    said: Mapping[str, Any]
    subscription: Subscription | None = None


class Reports:
    """The agents that are there. `on_change` hears when one goes, or its games change."""

    def __init__(
        self,
        connection: Connection,
        peers: Peers,
        store: Compositor,
        on_change: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._connection = connection
        self._peers = peers
        self.store = store
        self._on_change = on_change
        self._clock = clock
        self._agents: dict[str, Agent] = {}

    async def report(self, call: Call, given: Mapping[str, Any]) -> bool:
        """Takes a report; True when its sender is believed at the moment.

        Raises:
            InvalidArgument: what makes no sense. Busy: two in a second. QuotaExceeded: too many
            agents. NoSuchSession: the sender left meanwhile.
        """
        said = check(given)
        uid = await self._peers.uid(call.sender)
        now = self._clock()
        agent = self._agents.get(call.sender)
        if agent is None:
            agent = await self._meet(call.sender, uid, said)
        elif now - agent.time_s < EVERY_S:
            raise Busy("one report a second is enough")
        else:
            agent.time_s = now
        values = {name: said[name] for name in _FIGURES if said[name] is not None}
        words = {name: said[name] for name in ("valid_s", "compositor", "reason")}
        believed = self.store.report(call.sender, uid, {**values, **words}, now)
        games, agent.said = agent.said["games"], said
        if games != said["games"]:
            self._on_change()
        return believed

    async def _meet(self, sender: str, uid: int, said: Mapping[str, Any]) -> Agent:
        users = [agent.uid for agent in self._agents.values()]
        if len(users) >= AGENTS or users.count(uid) >= AGENTS_A_USER:
            raise QuotaExceeded(f"{len(users)} agents report already, {users.count(uid)} of yours")
        agent = Agent(uid, self._clock(), {**said, "games": ()})
        self._agents[sender] = agent
        try:
            agent.subscription = await self._connection.subscribe(
                self._owner_changed, sender=BUS, member="NameOwnerChanged", arg0=sender
            )
            await self._peers.uid(sender)  # it may have left before we watched
        except BaseException:
            self._forget(sender)
            raise
        return agent

    def _owner_changed(self, signal: Signal) -> None:
        name, _, new = signal.body
        if not new and name in self._agents:
            self._forget(name)
            self._on_change()

    def _forget(self, sender: str) -> None:
        agent = self._agents.pop(sender)
        if agent.subscription is not None:
            agent.subscription.cancel()
        self.store.gone(sender)

    def games(self) -> tuple[str, ...]:
        """Games that agents which are believed name; each keeps the GPU free."""
        found = [
            game
            for agent in self._agents.values()
            if self.store.believes(agent.uid)
            for game in agent.said["games"]
        ]
        return tuple(dict.fromkeys(found))

    def words(self, working: bool) -> tuple[bool, str]:
        """For the doctor: is there an agent that does what it can, and one sentence about it."""
        if not self._agents:
            return False, "no pvr-agent was seen: missed refreshes of the compositor are unknown"
        agents = [a for a in self._agents.values() if self.store.believes(a.uid)]
        if not agents:
            users = ", ".join(sorted({str(a.uid) for a in self._agents.values()}))
            return False, f"pvr-agent of UID {users} is seen, but that user's session is not active"
        agent = max(agents, key=lambda a: a.time_s)
        age, said = self._clock() - agent.time_s, agent.said
        text = f"pvr-agent of UID {agent.uid} is seen"
        if working and age > said["valid_s"]:
            return False, f"{text}, but silent for {age:.0f} s"
        if said["missed_per_s"] is None or not working:
            why = said["reason"] if said["missed_per_s"] is None else ""
            idle = "it measures while pvrd has work" + (f"; {why}" if why else "")
            return not (why and working), f"{text}: {why if working else idle}".rstrip(": ")
        delay = f", {said['latency_ms']:.1f} ms to the screen" if said["latency_ms"] else ""
        return True, (
            f"{text}: {said['missed_per_s']:.1f} of {said['refresh_hz']:.1f} refreshes/s missed"
            f"{delay}" + (f" ({said['reason']})" if said["reason"] else "")
        )


def check(given: Mapping[str, Any]) -> dict[str, Any]:
    """A report whose values make sense together.

    Raises:
        InvalidArgument: they do not.
    """
    said = parse(given, REPORT)
    missed, refresh = said["missed_per_s"], said["refresh_hz"]
    if missed is not None and (refresh is None or missed > refresh + 0.5):
        raise InvalidArgument("missed_per_s needs refresh_hz and is not above it")
    for name in ("compositor", "reason"):
        if not said[name].isprintable():
            raise InvalidArgument(f"option {name!r} has control characters")
    if any(not game.isprintable() for game in said["games"]):
        raise InvalidArgument("option 'games' has control characters")
    said["games"] = tuple(said["games"])
    return said
