# SPDX-License-Identifier: Apache-2.0
"""Where a text job should be, and when it may go there."""

from __future__ import annotations

import asyncio
import os
from types import SimpleNamespace
from typing import Any

import pytest

from pvrd import text_move
from pvrd.errors import OutOfMemory, QuotaExceeded
from pvrd.governor import Decision
from pvrd.text_move import Mover

BUSY, CALM = Decision(device="cpu", reason="others need the GPU"), Decision()


class Core:
    """As much of the daemon as a Mover sees."""

    def __init__(self) -> None:
        self.gpu, self.cpu = (
            SimpleNamespace(kind=kind, state="ready", generation=1, sent=[], send=self._send)
            for kind in ("gpu", "cpu")
        )
        self.supervisor: Any = self
        self.peers: Any = self
        self.decision = CALM
        self.fails = False
        self.charged = 0
        self.most = 1 << 20
        self.sent: list[dict[str, Any]] = []

    def _send(self, message: dict[str, Any], files: list[int]) -> None:
        self.sent.append(message)
        os.pwrite(files[0], b"caches", 0)

    def task(self, work: Any) -> asyncio.Task[None]:
        return asyncio.get_running_loop().create_task(work)

    async def choose(self, kind: str) -> Any:
        return self.gpu if kind == "gpu" else self.cpu

    async def load(self, worker: Any, model: Any) -> None:
        if self.fails:
            raise OutOfMemory("it needs 9 of 8 bytes")

    def free(self, uid: int) -> int:
        return self.most

    def take(self, uid: int, sessions: int = 0, size: int = 0) -> None:
        if size > self.most:
            raise QuotaExceeded("too much")
        self.charged += size

    def give(self, uid: int, sessions: int, size: int) -> None:
        self.charged -= size


def mover(core: Core, choice: str = "auto") -> tuple[Mover, asyncio.Event]:
    woken = asyncio.Event()
    return Mover(core, 1, None, choice, woken.set), woken  # type: ignore[arg-type]


async def leaves(core: Core, job: Mover, woken: asyncio.Event, worker: Any) -> bool:
    """Does it leave, when the model is there?"""
    if job.due(worker):
        return True
    if job.target(worker) is None:
        return False
    await asyncio.wait_for(woken.wait(), 10)
    woken.clear()
    return job.due(worker)


def test_it_goes_where_the_governor_says_and_back(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        core = Core()
        job, woken = mover(core)
        job.arrived(core.gpu)  # type: ignore[arg-type]
        assert not await leaves(core, job, woken, core.gpu)
        core.decision = BUSY
        assert not job.due(core.gpu)  # type: ignore[arg-type]
        assert await leaves(core, job, woken, core.gpu)
        assert job.reason == "others need the GPU"
        job.leave(core.gpu, "j1")  # type: ignore[arg-type]
        assert core.sent == [{"t": "text.export", "job": "j1", "limit": 1 << 20}]
        job.exported({"bytes": 6})
        assert core.charged == 6
        (file,) = job.carried
        with pytest.raises(PermissionError):
            os.pwrite(file, b"x", 0)
        job.taken()
        assert (core.charged, job.carried) == (0, [])
        job.arrived(core.cpu)  # type: ignore[arg-type]
        core.decision = CALM
        # Not within a second of the last move; it is asked again by itself then.
        asked = asyncio.get_running_loop().time()
        assert not job.due(core.cpu)  # type: ignore[arg-type]
        await asyncio.wait_for(woken.wait(), 10)
        woken.clear()
        assert asyncio.get_running_loop().time() - asked > 0.5 * text_move.APART_S
        assert await leaves(core, job, woken, core.cpu)
        assert job.reason == "the GPU is free again"
        job.close()

    asyncio.run(run())


def test_who_stays() -> None:
    async def run() -> None:
        core = Core()
        core.decision = BUSY
        named, _ = mover(core, "gpu")
        named.arrived(core.gpu)  # type: ignore[arg-type]
        assert named.target(core.gpu) is None  # type: ignore[arg-type]
        core.decision = CALM
        fled, _ = mover(core)  # from a GPU that died
        fled.arrived(core.cpu)  # type: ignore[arg-type]
        assert fled.target(core.cpu) is None  # type: ignore[arg-type]
        core.decision, core.fails = BUSY, True
        job, woken = mover(core)
        job.arrived(core.gpu)  # type: ignore[arg-type]
        assert not await leaves(core, job, woken, core.gpu)  # there is no room for the model
        assert job.stay
        core.decision, core.fails = Decision(device="cpu", parked=True), False
        parked, _ = mover(core)
        assert parked.target(core.gpu) is None  # type: ignore[arg-type]

    asyncio.run(run())


@pytest.mark.parametrize("told", [0, 5, 7])
def test_caches_that_are_not_what_was_said_are_left(told: int) -> None:
    async def run() -> None:
        core = Core()
        job, _ = mover(core)
        job.leave(core.gpu, "j1")  # type: ignore[arg-type]
        job.exported({"bytes": told})
        assert (job.carried, core.charged) == ([], 0)
        core.most = 3
        job.leave(core.gpu, "j1")  # type: ignore[arg-type]
        job.exported({"bytes": 6})
        assert (job.carried, core.charged) == ([], 0)
        job.close()
        job.close()

    asyncio.run(run())
