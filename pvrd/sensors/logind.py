# SPDX-License-Identifier: Apache-2.0
"""logind: who is at the seat, whether somebody is, the lid, and that the system goes to sleep.

Source: org.freedesktop.login1(5). A delay inhibitor is a file descriptor: while we hold it, logind
waits (InhibitDelayMaxSec, 5 s by default) between PrepareForSleep and the suspend itself.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from typing import Any

from pvrd.bus import BusError, Connection, Signal
from pvrd.sensors.reading import Reading, unknown
from pvrd.sensors.service import Service

LOGIND = "org.freedesktop.login1"
MANAGER = f"{LOGIND}.Manager"
SEAT = f"{LOGIND}.Seat"
SESSION = f"{LOGIND}.Session"
MANAGER_PATH = "/org/freedesktop/login1"
SEAT_NAME = "seat0"
GRAPHICAL = ("wayland", "x11", "mir")


class Logind:
    """logind's word while it runs.

    `on_sleep` gets True when the system is about to suspend, and False when it is back. Hold
    `inhibit()` from the start, `release()` when all is parked, and inhibit anew after the return.
    """

    def __init__(self, on_change: Callable[[], None]) -> None:
        self._on_change = on_change
        self.on_sleep: Callable[[bool], None] | None = None
        self._service: Service | None = None
        self._seat_path: str | None = None
        self._session_path: str | None = None
        self._lock: int | None = None
        self._sleeping = False
        self._why = "there is no system bus"
        self._following: asyncio.Task[None] | None = None
        self._follow_again = False

    # -- the service

    async def start(self, connection: Connection) -> None:
        """Watches logind on the system bus.

        Raises:
            BusError: the bus refuses.
        """
        self._service = service = Service(connection, LOGIND, self._changed)
        await service.start()
        await service.on_signal(
            self._prepare, path=MANAGER_PATH, interface=MANAGER, member="PrepareForSleep"
        )
        await service.watch(MANAGER_PATH, MANAGER)
        await self._follow()

    def stop(self, why: str = "it was stopped") -> None:
        """Forgets what it said and lets go of the lock."""
        self.release()
        if self._following is not None:
            self._following.cancel()
        if self._service is not None:
            self._service.stop()
        self._service = self._seat_path = self._session_path = None
        self._why = why
        self._sleep(False)

    async def read(self) -> None:
        """Asks again for what comes without a signal (the lid)."""
        if self._service is not None and self._service.present:
            await self._service.read(MANAGER_PATH, MANAGER)

    def _changed(self) -> None:
        self._on_change()
        if self._following is not None and not self._following.done():
            self._follow_again = True
        elif self._service is not None:
            self._following = asyncio.get_running_loop().create_task(self._follow())

    async def _look_again(self) -> None:
        self._changed()

    async def _follow(self) -> None:
        """Watches the seat, and the session that is in its foreground now."""
        while True:
            self._follow_again = False
            service = self._service
            if service is None:
                return
            if not service.present:
                self._seat_path = None
                self._sleep(False)  # nobody is left to say so
            elif self._seat_path is None:
                try:
                    reply = await service.call(MANAGER_PATH, MANAGER, "GetSeat", "s", [SEAT_NAME])
                    reply.close()
                    self._seat_path = str(reply.body[0])
                    await service.watch(self._seat_path, SEAT)
                except BusError as e:
                    service.again(SEAT_NAME, e, self._look_again)
            wanted = None
            if self._seat_path is not None:
                active = service.get(self._seat_path, SEAT).get("ActiveSession") or ["", "/"]
                wanted = active[1] if active[0] else None
            if wanted != self._session_path:
                before = self._session_path
                if wanted is not None:  # known before it counts: nobody in between
                    await service.watch(wanted, SESSION)
                self._session_path = wanted
                if before is not None:
                    service.unwatch(before, SESSION)
                self._on_change()
            if not self._follow_again:
                return

    def _prepare(self, signal: Signal) -> None:
        if signal.body and isinstance(signal.body[0], bool):
            self._sleep(signal.body[0])

    def _sleep(self, sleeping: bool) -> None:
        if self._sleeping != sleeping:
            self._sleeping = sleeping
            if self.on_sleep is not None:
                self.on_sleep(sleeping)
            self._on_change()

    # -- the lock

    async def inhibit(self, why: str = "parks its jobs and gives the GPU's memory back") -> bool:
        """Takes the delay lock; True when it is held. Without logind there is none to hold."""
        if self._lock is not None:
            return True
        service = self._service
        if service is None or not service.present:
            return False
        try:
            reply = await service.call(
                MANAGER_PATH, MANAGER, "Inhibit", "ssss", ["sleep", "pvrd", why, "delay"]
            )
        except BusError:
            return False
        try:
            lock = reply.fds.take(reply.body[0])
        except (IndexError, TypeError):
            return False
        finally:
            reply.close()
        if self._lock is not None or self._service is not service:  # meanwhile
            os.close(lock)
            return self._lock is not None
        self._lock = lock
        return True

    def release(self) -> None:
        """Lets the system sleep; a second time is no error."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    @property
    def inhibiting(self) -> bool:
        """Is the lock held?"""
        return self._lock is not None

    # -- what is known

    @property
    def sleeping(self) -> bool:
        """Between PrepareForSleep and the return."""
        return self._sleeping

    @property
    def active_uid(self) -> int | None:
        """The user of the session in the foreground of seat0; None when nothing tells."""
        user = self._session().get("User")
        if isinstance(user, (list, tuple)) and user and isinstance(user[0], int):
            return user[0]
        return None

    def readings(self) -> list[Reading]:
        """idle, session_active, lid_closed, and the session's number and kind."""
        manager = self._values(MANAGER_PATH, MANAGER)
        if not manager:
            why = self._why if self._service is None else self._service.absent
            why = why or f"{LOGIND} tells nothing"
            return [unknown(n, why) for n in ("idle", "session_active", "lid_closed")]
        seat = self._values(self._seat_path, SEAT)
        if isinstance(seat.get("IdleHint"), bool):
            idle = Reading("idle", seat["IdleHint"], f"logind, {SEAT_NAME}")
        elif isinstance(manager.get("IdleHint"), bool):
            idle = Reading("idle", manager["IdleHint"], "logind, all sessions")
        else:
            idle = unknown("idle", "logind does not tell")
        out = [idle]
        if not seat:
            out.append(unknown("session_active", f"logind has no {SEAT_NAME}"))
        else:
            session = self._session()
            kind = session.get("Type")
            active = bool(session.get("Active")) and kind in GRAPHICAL
            name = session.get("Id")
            source = f"logind, session {name} ({kind})" if name else f"logind, {SEAT_NAME} is free"
            out.append(Reading("session_active", active, source))
        lid = manager.get("LidClosed")
        out.append(
            Reading("lid_closed", lid, "logind")
            if isinstance(lid, bool)
            else unknown("lid_closed", "logind does not tell")
        )
        return out

    def _values(self, path: str | None, interface: str) -> dict[str, Any]:
        if self._service is None or path is None:
            return {}
        return self._service.get(path, interface)

    def _session(self) -> dict[str, Any]:
        return self._values(self._session_path, SESSION)
