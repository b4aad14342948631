# SPDX-License-Identifier: Apache-2.0
"""Whether pvrd has a GPU to give, and the moment that it changes."""

from __future__ import annotations

import asyncio
import contextlib

from pvrd import systemd
from pvrd.activate import NAME
from pvrd.bus import BUS, PROPERTIES, BusAddress, BusError, Connection, Signal
from pvrd.bus_values import plain

PATH = "/org/pvrd/Pvrd1"
MANAGER = f"{NAME}.Manager"
AGAIN_S = 1.0  # between two looks for a bus that was lost


class Health:
    """`healthy` follows the Manager's State; without a bus or a daemon it is False."""

    def __init__(self, address: BusAddress, states: tuple[str, ...]) -> None:
        """states: those in which a pod gets what it asked for."""
        self._address = address
        self._states = states
        self._news = asyncio.Event()
        self.changed = asyncio.Condition()
        self.healthy = False

    async def run(self) -> None:
        """Watches until it is cancelled."""
        while True:
            with contextlib.suppress(BusError):
                connection = await Connection.connect(self._address)
                try:
                    await self._watch(connection)
                finally:
                    connection.close()
            await self._set(False, "the bus or pvrd is not there")
            await asyncio.sleep(AGAIN_S)

    def _wake(self, _signal: Signal | None = None) -> None:
        self._news.set()

    async def _watch(self, connection: Connection) -> None:
        connection.closed.add_done_callback(lambda _: self._wake())
        await connection.subscribe(
            self._wake, sender=NAME, path=PATH, interface=PROPERTIES, member="PropertiesChanged"
        )
        await connection.subscribe(self._wake, sender=BUS, member="NameOwnerChanged", arg0=NAME)
        while not connection.closed.done():
            self._news.clear()
            try:
                reply = await connection.call(
                    NAME, PATH, PROPERTIES, "Get", "ss", [MANAGER, "State"]
                )
                state = str(plain(reply.body[0]))
            except BusError:
                state = "not there"
            await self._set(state in self._states, f"pvrd's state is {state}")
            await self._news.wait()

    async def _set(self, healthy: bool, why: str) -> None:
        if healthy == self.healthy:
            return
        async with self.changed:
            self.healthy = healthy
            self.changed.notify_all()
        word = "healthy" if healthy else "unhealthy"
        systemd.log(systemd.NOTICE, f"pvrd-device-plugin: {word}, {why}")
