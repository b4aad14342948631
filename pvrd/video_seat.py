# SPDX-License-Identifier: Apache-2.0
"""A video session's place in one worker: some of its levels, opened there, and the frames it has.

A seat lives while it is wanted: it waits for its worker, has models loaded and the session opened,
and begins again with the worker's successor.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pvrd.core import report
from pvrd.errors import PvrdError
from pvrd.inbox import WorkerLost, WorkerReleased
from pvrd.models import Model

if TYPE_CHECKING:
    from pvrd.video_session import VideoSession
    from pvrd.worker import Worker

AHEAD = 2  # frames that a worker holds: one in work and the next
MOST_WHY = 200


@dataclass(frozen=True)
class Way:
    """A level as a seat has it: models of a family, none for plain interpolation."""

    models: tuple[Model, ...]

    def name(self, kind: str) -> str:
        """For clients."""
        return f"{kind} {self.models[0].name}" if self.models else "plain"


class Seat:
    """`held`: frames (seq -> slot) of which the worker has not said the last word. A session that
    falls has plain interpolation as a further level of each seat.
    """

    def __init__(
        self, session: VideoSession, name: str, worker: Worker, ways: Sequence[Way], needed: bool
    ) -> None:
        """name: "" or a suffix, of the session's in the worker protocol. needed: the session fails
        with it; else what goes wrong leaves its levels out.
        """
        self.session = session
        self.id = session.id + name
        self.worker = worker
        self.use = worker.use
        self.ways = list(ways)
        self.needed = needed
        self.ready = False
        self.failed = ""  # why it is left out for good
        self.kills = 0  # of workers, while they opened it
        self.left_out: dict[int, str] = {}
        self.held: dict[int, int] = {}
        self.leases: dict[int, float] = {}  # until when it may write them, CLOCK_MONOTONIC s
        self.last_done = 0.0
        self._task: asyncio.Task[None] | None = None

    @property
    def wanted(self) -> bool:
        """Is it open, or on the way to be?"""
        return self._task is not None

    def open(self) -> None:
        """Begins to live, if it does not."""
        if self._task is None and not self.failed:
            self._task = self.session.core.task(self._live())

    def close(self) -> None:
        """Ends; frames that it holds are for others to make."""
        task, self._task = self._task, None
        self.ready = False
        self.forget()
        if task is not None and task is not asyncio.current_task():
            task.cancel()

    async def _live(self) -> None:
        me = self._task
        while self._task is me:
            try:
                await self._one_life()
            except WorkerLost as e:
                if not isinstance(e, WorkerReleased) and not self.ready:
                    self.kills += 1
                self.ready = False
                self.session.seat_lost(self, e)
                if isinstance(e, WorkerReleased):
                    self._task = None  # the session says when it is wanted again
            except asyncio.CancelledError:
                raise
            except Exception as e:
                self.ready = False
                self._task = None
                self.session.seat_failed(self, report(e))

    async def _one_life(self) -> None:
        session, supervisor = self.session, self.session.core.supervisor
        while self.worker.state in ("starting", "restarting"):
            await supervisor.news()
        worker = await supervisor.choose(self.worker.kind)
        loaded: list[list[str]] = []
        for i, way in enumerate(self.ways):
            try:
                for model in way.models:
                    await supervisor.load(worker, model)
            except PvrdError as e:
                if len(self.ways) == 1:
                    raise
                self.left_out[i] = f"{e.name}: {e}"[:MOST_WHY]
            loaded.append([model.key for model in way.models])
        if session.adapt and () not in [way.models for way in self.ways]:
            loaded.append([])
        with worker.route("session", self.id) as inbox:
            message = session.open_message(self.id, loaded)
            worker.send(message, [session.ring])
            try:
                ready = await inbox.expect("video.ready")
                self._opened(ready)
                while True:
                    message = await inbox.get()
                    if message["t"] == "frame.done":
                        self._done(message)
            finally:
                worker.send({"t": "close", "session": self.id})

    def _opened(self, ready: Mapping[str, Any]) -> None:
        self.kills = 0
        left_out = ready.get("left_out")
        for i, why in left_out.items() if isinstance(left_out, dict) else ():
            if str(i).isdecimal():
                self.left_out[int(i)] = str(why)[:MOST_WHY]
        takes = ready.get("takes")
        seconds = [t if isinstance(t, float) else None for t in takes or ()]
        self.ready = True
        self.worker.counters.jobs += 1
        self.session.seat_ready(self, seconds, str(ready.get("precision", ""))[:16])

    def _done(self, message: Mapping[str, Any]) -> None:
        if self.held.pop(message.get("seq", -1), None) is not None:
            self.leases.pop(message["seq"], None)
            began, self.last_done = self.last_done, time.monotonic()
            self.session.frame_done(self, message, began)

    def forget(self) -> None:
        """The worker has none of the frames any more."""
        self.held.clear()
        self.leases.clear()

    def has_room(self) -> bool:
        """May it be given another frame?"""
        return self.ready and len(self.held) < AHEAD
