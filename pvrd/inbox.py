# SPDX-License-Identifier: Apache-2.0
"""What a worker says of one job or session, in order, to its end."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from pvrd.errors import from_name

if TYPE_CHECKING:
    from pvrd.worker import Worker


class WorkerLost(Exception):
    """The worker is gone; the message says how."""


class WorkerReleased(WorkerLost):
    """pvrd ended the worker on purpose (a hold, suspend): no fault of the job's."""


class Inbox:
    """Messages of one job or session from one worker."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self._queue: asyncio.Queue[dict[str, Any] | WorkerLost] = asyncio.Queue()
        self._lost: WorkerLost | None = None

    def put(self, message: dict[str, Any] | WorkerLost) -> None:
        """Adds a message, also one of our own (`t` is then not of the protocol)."""
        if self.worker.on_work is not None:
            self.worker.on_work()
        self._queue.put_nowait(message)

    async def get(self) -> dict[str, Any]:
        """The next message.

        Raises:
            WorkerLost: the worker is gone. PvrdError: it reported an error.
        """
        message = await self._queue.get()
        if isinstance(message, WorkerLost):
            self._queue.put_nowait(message)  # for the next call too
            raise message
        if message["t"] == "error":
            raise from_name(message.get("error"), message.get("message", ""))
        return message

    async def expect(self, kind: str) -> dict[str, Any]:
        """The next message of this kind; others before it are dropped."""
        while True:
            message = await self.get()
            if message["t"] == kind:
                return message
