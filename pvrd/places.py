# SPDX-License-Identifier: Apache-2.0
"""Places in the workers: some jobs run in each, others wait by priority, then by coming."""

from __future__ import annotations

import asyncio
import contextlib
import heapq
from collections import Counter
from collections.abc import AsyncIterator, Callable

from pvrd.errors import Busy
from pvrd.inbox import WorkerLost
from pvrd.jobs import Job
from pvrd.worker import Worker

JOBS_A_WORKER = 8  # running together; the worker gives them slices in turn

_Waiter = tuple[int, int, asyncio.Future[None]]  # -priority, number of coming


class PlaceLost(WorkerLost):
    """The worker went away before the job began there."""


class Places:
    """`most` says how many jobs a user may have."""

    def __init__(self, most: Callable[[], int]) -> None:
        self._most = most
        self._running: Counter[str] = Counter()
        self._waiting: dict[str, list[_Waiter]] = {"gpu": [], "cpu": []}
        self._number = 0

    def waiting(self) -> int:
        """Jobs that wait for a place."""
        queues = self._waiting.values()
        return sum(1 for queue in queues for _, _, future in queue if not future.done())

    def running(self, kind: str = "") -> int:
        """Jobs that have a place, in both workers or in that of a kind."""
        return self._running[kind] if kind else sum(self._running.values())

    @contextlib.asynccontextmanager
    async def place(
        self, worker: Worker, priority: int, job: Job | None = None
    ) -> AsyncIterator[None]:
        """A place in the worker, as soon as it is this job's turn.

        Raises:
            PlaceLost: the worker went away while the job waited.
        """
        generation = worker.generation
        waited = self._running[worker.kind] >= JOBS_A_WORKER
        if waited:
            await self._turn(worker.kind, priority, job)
        else:
            self._running[worker.kind] += 1
        try:
            if waited and (worker.generation != generation or worker.state != "ready"):
                raise PlaceLost("the worker changed while the job waited")
            yield
        finally:
            self._leave(worker.kind)

    async def _turn(self, kind: str, priority: int, job: Job | None) -> None:
        """Waits; afterwards the job has a place, which was handed over to it: who comes in the
        moment between two jobs finds none free.
        """
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._number += 1
        heapq.heappush(self._waiting[kind], (-priority, self._number, future))
        if job is not None:
            job.at("waiting", kind, self._number)
        try:
            await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled():
                self._leave(kind)
            raise

    def position(self, kind: str, number: int) -> int:
        """Where in its queue a job waits that came as this number, from 1; 0: it does not."""
        queue = sorted(w for w in self._waiting.get(kind, ()) if not w[2].done())
        return next((i for i, waiter in enumerate(queue, 1) if waiter[1] == number), 0)

    def _leave(self, kind: str) -> None:
        """The next one has the place, or it is free."""
        while self._waiting[kind]:
            _, _, future = heapq.heappop(self._waiting[kind])
            if not future.done():
                future.set_result(None)
                return
        self._running[kind] -= 1

    def admit(self, waiting_of_user: int) -> None:
        """Raises Busy when the user has as many jobs as limits.queue: a further one would have to
        wait, and the message says at which position.
        """
        most = self._most()
        if waiting_of_user >= most:
            raise Busy(
                f"{waiting_of_user} jobs of yours run or wait already, limits.queue is {most}; "
                f"another one would be at position {self.waiting() + 1} of the queue, "
                f"{self.running()} jobs run"
            )
