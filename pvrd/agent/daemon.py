# SPDX-License-Identifier: Apache-2.0
"""pvrd as an agent sees it: is it there, is it working, does it take a report or a hold?"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping
from typing import Any

from pvrd.bus import BUS, PROPERTIES, BusError, Connection, Signal
from pvrd.bus_values import plain, variant

NAME = "org.pvrd.Pvrd1"
PATH = "/org/pvrd/Pvrd1"
MANAGER = f"{NAME}.Manager"
_ANSWER_S = 10.0
_UNKNOWN = (f"{BUS}.Error.UnknownMethod", f"{BUS}.Error.UnknownProperty")


class Pvrd:
    """The daemon on one bus. `on_change` hears when it comes, goes, begins or ends work.

    Calls go to the unique name: an agent never starts the daemon.
    """

    def __init__(self, connection: Connection, on_change: Callable[[], None]) -> None:
        self._connection = connection
        self._on_change = on_change
        self._holds: dict[str, int] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self.owner: str | None = None
        self.working = False
        self.old = False  # it is there, but of a version that takes no reports

    async def start(self) -> None:
        """Watches, then looks for the first time.

        Raises:
            BusError: the bus refuses.
        """
        await self._connection.subscribe(
            self._owner_changed, sender=BUS, member="NameOwnerChanged", arg0=NAME
        )
        await self._connection.subscribe(
            self._changed, sender=NAME, path=PATH, interface=PROPERTIES,
            member="PropertiesChanged", arg0=MANAGER,
        )  # fmt: skip
        await self._meet(await self._connection.name_owner(NAME))

    def _owner_changed(self, signal: Signal) -> None:
        task = asyncio.get_running_loop().create_task(self._meet(signal.body[2] or None))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _meet(self, owner: str | None) -> None:
        self.owner, self.working, self.old = owner, False, False
        self.let_go()
        if owner is not None:
            try:
                reply = await self._connection.call(
                    owner, PATH, PROPERTIES, "Get", "ss", [MANAGER, "Working"], timeout=_ANSWER_S
                )
            except BusError as e:
                self.old = e.name in _UNKNOWN
            else:
                reply.close()
                if self.owner == owner:
                    self.working = self.working or plain(reply.body[0]) is True
        self._on_change()

    def _changed(self, signal: Signal) -> None:
        if signal.sender != self.owner or len(signal.body) < 2:
            return
        values = plain(signal.body[1])
        if isinstance(values, Mapping) and isinstance(values.get("Working"), bool):
            self.working = values["Working"]
            self._on_change()

    async def report(self, values: Mapping[str, Any]) -> None:
        """Sends a report.

        Raises:
            BusError: it is gone, or does not want it.
        """
        if self.owner is None:
            raise BusError(f"{BUS}.Error.NameHasNoOwner", "pvrd is not there")
        body = {key: variant(value) for key, value in values.items() if value is not None}
        reply = await self._connection.call(
            self.owner, PATH, MANAGER, "ReportCompositor", "a{sv}", [body], timeout=_ANSWER_S
        )
        reply.close()

    async def hold(self, reasons: tuple[str, ...]) -> bool:
        """Holds the GPU free for these reasons and for no others; False where pvrd does not let
        us: a report may name them then.
        """
        for reason in set(self._holds) - set(reasons):
            os.close(self._holds.pop(reason))
        for reason in reasons:
            if reason in self._holds or self.owner is None:
                continue
            try:
                reply = await self._connection.call(
                    self.owner, PATH, MANAGER, "Hold", "sa{sv}", [reason, {}], timeout=_ANSWER_S
                )
            except BusError:  # not known, not allowed, or gone
                return False
            self._holds[reason] = reply.fds.take(reply.body[0])
            reply.close()
        return True

    def let_go(self) -> None:
        """Ends all holds."""
        while self._holds:
            os.close(self._holds.popitem()[1])
