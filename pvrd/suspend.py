# SPDX-License-Identifier: Apache-2.0
"""Suspend: before the system sleeps jobs are parked and the GPU's memory is given back.

logind waits for us while we hold a delay lock (5 s by default, InhibitDelayMaxSec). Texts that were
under way are computed again from their journals afterwards, frames from the ring: nothing is lost.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable
from typing import Protocol

from pvrd import systemd

PARK_S = 4.0  # less than logind waits
AGAIN_S = 60.0  # between tries for the lock when logind refuses it


class Logind(Protocol):
    """What is needed of pvrd/sensors/logind.py."""

    on_sleep: Callable[[bool], None] | None

    @property
    def sleeping(self) -> bool:
        """Between PrepareForSleep and the return."""

    @property
    def inhibiting(self) -> bool:
        """Is the lock held?"""

    async def inhibit(self) -> bool:
        """Takes the lock; True when it is held."""

    def release(self) -> None:
        """Lets the system sleep."""


class Suspend:
    """Parks and resumes at logind's word."""

    def __init__(
        self,
        logind: Logind,
        decide: Callable[[], None],
        released: Callable[[float], Awaitable[bool]],
    ) -> None:
        """decide: puts a decision into force that knows logind.sleeping. released: waits until the
        GPU worker is gone, at most so many seconds; False when it is not.
        """
        self._logind = logind
        self._decide = decide
        self._released = released
        self._task: asyncio.Task[None] | None = None
        self._asked_at = -math.inf
        logind.on_sleep = self._on_sleep

    def stop(self) -> None:
        """No more; the lock goes with logind's connection."""
        self._logind.on_sleep = None
        if self._task is not None:
            self._task.cancel()

    def keep_lock(self) -> None:
        """Sees to it that the lock is held while the system is awake; whenever logind is there."""
        busy = self._task is not None and not self._task.done()
        now = time.monotonic()
        if busy or self._logind.inhibiting or self._logind.sleeping:
            return
        if now - self._asked_at >= AGAIN_S:
            self._asked_at = now
            self._begin(self._take())

    async def _take(self) -> None:
        if await self._logind.inhibit():
            self._asked_at = -math.inf  # should logind be started anew, it is asked at once

    def _begin(self, work: Awaitable[None]) -> None:
        if self._task is not None:
            self._task.cancel()
        self._task = asyncio.ensure_future(work)

    def _on_sleep(self, sleeping: bool) -> None:
        self._decide()
        self._begin(self._park() if sleeping else self._resume())

    async def _park(self) -> None:
        began = time.monotonic()
        try:
            gone = await self._released(PARK_S)
        finally:
            self._logind.release()
        seconds = time.monotonic() - began
        text = f"parked for suspend in {seconds:.2f} s" if gone else "the GPU worker did not end"
        systemd.log(
            systemd.INFO if gone else systemd.WARNING, text,
            MESSAGE_ID=systemd.MESSAGE_SUSPEND, PVRD_REASON="suspend",
        )  # fmt: skip

    async def _resume(self) -> None:
        systemd.log(
            systemd.INFO, "back from suspend",
            MESSAGE_ID=systemd.MESSAGE_SUSPEND, PVRD_REASON="resume",
        )  # fmt: skip
        await self._logind.inhibit()
