# SPDX-License-Identifier: Apache-2.0
"""Games that registered with Feral's GameMode on the session bus; nothing is started for it.

Source: https://github.com/FeralInteractive/gamemode, data/com.feralinteractive.GameMode: ListGames
-> a(io), signals GameRegistered and GameUnregistered (i pid, o path).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from pathlib import Path

from pvrd.bus import BUS, BusError, Connection, Signal

NAME = "com.feralinteractive.GameMode"
PATH = "/com/feralinteractive/GameMode"
MOST = 16
_ANSWER_S = 5.0


class GameMode:
    """The games of this session while GameMode runs; `on_change` hears when there are others."""

    def __init__(self, connection: Connection, on_change: Callable[[], None]) -> None:
        self._connection = connection
        self._on_change = on_change
        self._reading: asyncio.Task[None] | None = None
        self._again = False
        self.games: tuple[str, ...] = ()

    async def start(self) -> None:
        """Watches, then looks for the first time.

        Raises:
            BusError: the bus refuses.
        """
        subscribe = self._connection.subscribe
        await subscribe(self._changed, sender=BUS, member="NameOwnerChanged", arg0=NAME)
        for member in ("GameRegistered", "GameUnregistered"):
            await subscribe(self._changed, sender=NAME, interface=NAME, member=member)
        await self._read()

    def _changed(self, _: Signal) -> None:
        if self._reading is None or self._reading.done():
            self._reading = asyncio.get_running_loop().create_task(self._read())
        else:
            self._again = True

    async def _read(self) -> None:
        while True:
            self._again = False
            found: tuple[str, ...] = ()
            with contextlib.suppress(BusError):  # none there, or it just left
                # By the unique name: the well-known one would start it.
                owner = await self._connection.name_owner(NAME)
                if owner is not None:
                    reply = await self._connection.call(
                        owner, PATH, NAME, "ListGames", timeout=_ANSWER_S
                    )
                    reply.close()
                    if reply.signature == "a(io)":
                        found = tuple(named(pid) for pid, _ in reply.body[0][:MOST])
            if not self._again:
                break
        if found != self.games:
            self.games = found
            self._on_change()


def named(pid: int) -> str:
    """The name of a process, with its number."""
    try:
        name = Path(f"/proc/{pid}/comm").read_text("utf-8", "replace").strip()
    except OSError:
        name = ""
    clean = "".join(c for c in name if c.isprintable())
    return f"{clean or 'game'} ({pid})"
