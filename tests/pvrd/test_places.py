# SPDX-License-Identifier: Apache-2.0
"""Who has a place in a worker, and who is next."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from pvrd.places import JOBS_A_WORKER, PlaceLost, Places
from pvrd.worker import Worker

NEXT = JOBS_A_WORKER  # the number of the first job that has to wait


class Bed:
    """A worker and its jobs, which go on until they are told to end; `order` as they began."""

    def __init__(self) -> None:
        self.worker = SimpleNamespace(kind="cpu", generation=1, state="ready")
        self.places = Places(lambda: 100)
        self.order: list[int] = []
        self.lost: list[int] = []
        self.tasks: dict[int, asyncio.Task[None]] = {}
        self._ends: dict[int, asyncio.Event] = {}

    async def _job(self, number: int, priority: int) -> None:
        try:
            async with self.places.place(cast("Worker", self.worker), priority):
                self.order.append(number)
                await self._ends[number].wait()
        except PlaceLost:
            self.lost.append(number)

    def come(self, number: int, priority: int = 5) -> None:
        self._ends[number] = asyncio.Event()
        self.tasks[number] = asyncio.get_running_loop().create_task(self._job(number, priority))

    def end(self, number: int) -> None:
        self._ends[number].set()

    async def rest(self) -> None:
        for _ in range(50):
            await asyncio.sleep(0)

    async def full(self) -> None:
        for number in range(JOBS_A_WORKER):
            self.come(number)
        await self.rest()


def run(test: Callable[[Bed], Awaitable[Any]]) -> None:
    async def work() -> None:
        bed = Bed()
        await bed.full()
        assert bed.order == list(range(JOBS_A_WORKER))
        await test(bed)
        for task in bed.tasks.values():
            task.cancel()
        await asyncio.gather(*bed.tasks.values(), return_exceptions=True)
        assert (bed.places.running(), bed.places.waiting()) == (0, 0)

    asyncio.run(work())


def test_nobody_comes_between_one_job_and_the_next() -> None:
    async def test(bed: Bed) -> None:
        bed.come(NEXT)
        bed.come(NEXT + 1)
        await bed.rest()
        bed.end(0)
        bed.come(NEXT + 2)  # in the same moment
        await bed.rest()
        assert bed.order[JOBS_A_WORKER:] == [NEXT]
        assert (bed.places.running("cpu"), bed.places.waiting()) == (JOBS_A_WORKER, 2)
        bed.end(1)
        bed.end(2)
        await bed.rest()
        assert bed.order[JOBS_A_WORKER:] == [NEXT, NEXT + 1, NEXT + 2]

    run(test)


def test_priority_goes_first() -> None:
    async def test(bed: Bed) -> None:
        bed.come(NEXT)
        bed.come(NEXT + 1, priority=9)
        await bed.rest()
        bed.end(0)
        await bed.rest()
        assert bed.order[JOBS_A_WORKER:] == [NEXT + 1]

    run(test)


@pytest.mark.parametrize("handed", [False, True])
def test_a_job_that_is_cancelled_while_it_waits_takes_no_place_along(handed: bool) -> None:
    async def test(bed: Bed) -> None:
        bed.come(NEXT)
        bed.come(NEXT + 1)
        await bed.rest()
        if handed:
            bed.end(0)
            while not bed.tasks[0].done():
                await asyncio.sleep(0)
        bed.tasks[NEXT].cancel()
        await bed.rest()
        bed.end(0)
        await bed.rest()
        assert NEXT + 1 in bed.order
        assert bed.places.running("cpu") == JOBS_A_WORKER

    run(test)


def test_a_new_worker_is_told_to_all_who_waited() -> None:
    async def test(bed: Bed) -> None:
        for number in range(NEXT, NEXT + 3):
            bed.come(number)
        await bed.rest()
        bed.worker.generation = 2
        bed.end(0)
        await bed.rest()
        assert bed.lost == [NEXT, NEXT + 1, NEXT + 2]
        assert bed.places.running("cpu") == JOBS_A_WORKER - 1
        bed.come(NEXT + 3)
        await bed.rest()
        assert NEXT + 3 in bed.order

    run(test)
