# SPDX-License-Identifier: Apache-2.0
"""Both workers together: which one gets a job, how many at a time, which models stay loaded."""

from __future__ import annotations

import asyncio
import contextlib
import heapq
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar

from pvrd.config import WORKER_KEYS, Config, changed
from pvrd.errors import Busy, DeviceLost, OutOfMemory, ShuttingDown
from pvrd.governor import Decision
from pvrd.models import Model
from pvrd.worker import Worker, WorkerLost

JOBS_A_WORKER = 8  # running together; the worker gives them slices in turn
MAX_KILLS = 3
CHOOSE_S = 90.0  # more than the longest back-off
FALL_BACK = (OutOfMemory, DeviceLost)  # of the GPU: the CPU may still do it

_T = TypeVar("_T")
_Waiter = tuple[int, int, asyncio.Future[None]]  # -priority, number of coming


def orders(decision: Decision, kind: str) -> dict[str, Any]:
    """What a worker of this kind is told of a decision. A share of the GPU is none of the CPU."""
    return {
        "slice_ms": decision.slice_ms,
        "group_scale": decision.group_scale,
        "share": decision.share if kind == "gpu" else 1.0,
        "parked": decision.parked,
        "preload_tokens": decision.preload_tokens,
    }


class PlaceLost(WorkerLost):
    """The worker went away before the job began there."""


class Supervisor:
    """Owns the workers. `on_change` is called when a worker's state, a loading or the governor's
    decision changes.
    """

    def __init__(self, config: Config, cache: str, on_change: Callable[[], None]) -> None:
        self.config = config
        self._on_change = on_change
        self._news = asyncio.Event()
        self.gpu = Worker("gpu", config, cache, self._changed)
        self.cpu = Worker("cpu", config, cache, self._changed)
        self.workers = (self.gpu, self.cpu)
        self._running: Counter[str] = Counter()
        self._waiting: dict[str, list[_Waiter]] = {"gpu": [], "cpu": []}
        self._number = 0
        self._uses: Counter[str] = Counter()
        self._idle: dict[str, asyncio.TimerHandle] = {}
        self.stopping = False
        self.decision = Decision()  # the governor's, in force

    def start(self) -> None:
        """Starts both workers."""
        for worker in self.workers:
            worker.start()

    async def stop(self) -> None:
        """Ends both workers."""
        self.stopping = True
        self._changed()
        for timer in self._idle.values():
            timer.cancel()
        await asyncio.gather(*(worker.stop() for worker in self.workers))

    def reconfigure(self, config: Config) -> None:
        """Takes new values; a worker whose values changed is started anew."""
        keys = changed(self.config, config) & WORKER_KEYS
        self.config = config
        for worker in self.workers:
            section = {"gpu": "cpu.", "cpu": "gpu."}[worker.kind]
            if any(not key.startswith(section) for key in keys):
                worker.restart(config)
            else:
                worker.config = config

    async def settled(self, seconds: float) -> None:
        """Waits until each worker said hello or is known not to, at most so long."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while not all(worker.settled for worker in self.workers):
                    await self.news()

    def _changed(self) -> None:
        self._news.set()
        self._news = asyncio.Event()
        self._on_change()

    async def news(self) -> None:
        """Waits for the next change of a worker."""
        await self._news.wait()

    def govern(self, decision: Decision) -> None:
        """Puts a decision into force: tells the workers, then `on_change` and news()."""
        if decision == self.decision:
            return
        self.decision = decision
        for worker in self.workers:
            worker.govern(orders(decision, worker.kind))
        self._changed()

    # -- state

    @property
    def state(self) -> str:
        """gpu, cpu, starting or failed: what new work would get."""
        if self.gpu.state == "ready":
            return "gpu"
        if self.cpu.state == "ready":
            return "cpu"
        if any(worker.state == "starting" for worker in self.workers):
            return "starting"
        return "failed"

    @property
    def reason(self) -> str:
        """Why not the GPU, one sentence; "" with it."""
        if self.gpu.state in ("ready", "starting"):
            return ""
        if self.gpu.state == "restarting":
            return f"the GPU worker is being restarted: {self.gpu.reason}"
        return self.gpu.reason

    def check_device(self, device: str) -> None:
        """Raises DeviceLost when this device is asked for by name and is known not to be there."""
        for worker in self.workers:
            if device == worker.kind and worker.state in ("absent", "disabled"):
                raise DeviceLost(f"there is no {device.upper()} to use: {worker.reason}")

    # -- jobs

    async def choose(self, device: str) -> Worker:
        """The worker for a job that starts now; waits while none is ready.

        A GPU that is being restarted is not waited for, unless by name: the CPU is there at once.

        Raises:
            DeviceLost: the device asked for is known to be absent, or none came in CHOOSE_S.
            ShuttingDown.
        """
        try:
            async with asyncio.timeout(CHOOSE_S):
                return await self._choose(device)
        except TimeoutError:
            reasons = "; ".join(f"{w.kind}: {w.reason or w.state}" for w in self.workers)
            raise DeviceLost(f"no worker came within {CHOOSE_S:g} s ({reasons})") from None

    async def _choose(self, device: str) -> Worker:
        while True:
            if self.stopping:
                raise ShuttingDown("pvrd is ending")
            self.check_device(device)
            if device in ("gpu", "cpu"):
                worker = self.gpu if device == "gpu" else self.cpu
                if worker.state == "ready":
                    return worker
            elif self.gpu.state == "ready":
                return self.gpu
            elif self.gpu.state != "starting":
                if self.cpu.state == "ready":
                    return self.cpu
                if self.gpu.state == "absent" and self.cpu.state in ("absent", "disabled"):
                    raise DeviceLost(f"there is no device at all: {self.cpu.reason}")
            await self.news()

    async def attempt(
        self,
        device: str,
        model: Model,
        priority: int,
        body: Callable[[Worker], Awaitable[_T]],
        moved: Callable[[str], None],
    ) -> _T:
        """Runs `body` with a worker that has the model; again in another when that one dies.

        Args:
            body: may start over where its record ends.
            moved: called with the reason before each further attempt.

        Raises:
            DeviceLost: no device, or the job ended MAX_KILLS workers. Else what the body raises.
        """
        kills = 0
        while True:
            worker = await self.choose(device)
            try:
                async with self.place(worker, priority):
                    await self.load(worker, model)
                    return await body(worker)
            except PlaceLost:
                continue
            except FALL_BACK as e:
                gone = self.cpu.state in ("absent", "disabled")
                if device != "auto" or worker is not self.gpu or gone:
                    raise  # a CPU worker that is being restarted is worth the wait
                device = "cpu"
                moved(f"{e.name}: {e}")
            except WorkerLost as e:
                kills += 1
                if self.stopping:
                    raise ShuttingDown("pvrd is ending") from None
                if kills >= MAX_KILLS:
                    text = f"{kills} workers ended under this job, the last: {e}"
                    raise DeviceLost(text) from None
                moved(str(e))

    def waiting(self) -> int:
        """Jobs that wait for a place."""
        queues = self._waiting.values()
        return sum(1 for queue in queues for _, _, future in queue if not future.done())

    def running(self) -> int:
        """Jobs that have a place."""
        return sum(self._running.values())

    @contextlib.asynccontextmanager
    async def place(self, worker: Worker, priority: int) -> AsyncIterator[None]:
        """A place among the jobs that run in the worker; in the order of priority, then of coming.

        Raises:
            PlaceLost: the worker went away while the job waited.
        """
        generation = worker.generation
        while self._running[worker.kind] >= JOBS_A_WORKER:
            future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._number += 1
            heapq.heappush(self._waiting[worker.kind], (-priority, self._number, future))
            try:
                await future
            except asyncio.CancelledError:
                if future.done() and not future.cancelled():
                    self._wake(worker.kind)
                raise
            if worker.generation != generation or worker.state != "ready":
                self._wake(worker.kind)
                raise PlaceLost("the worker changed while the job waited")
        self._running[worker.kind] += 1
        try:
            yield
        finally:
            self._running[worker.kind] -= 1
            self._wake(worker.kind)

    def _wake(self, kind: str) -> None:
        while self._waiting[kind]:
            _, _, future = heapq.heappop(self._waiting[kind])
            if not future.done():
                future.set_result(None)
                return

    def admit(self, waiting_of_user: int) -> None:
        """Raises Busy when the user's queue is full and the job would have to wait."""
        if waiting_of_user >= self.config.whole("limits.queue"):
            raise Busy(
                f"{waiting_of_user} jobs of yours wait already; {self.waiting()} wait in all, "
                f"{self.running()} run"
            )

    # -- models

    async def load(self, worker: Worker, model: Model) -> dict[str, Any]:
        """Has the model loaded there; what the worker says about it."""
        self._uses.setdefault(model.key, 0)
        try:
            info = await worker.load(model)
        except OutOfMemory:
            idle = [key for key in worker.models if self._uses[key] <= 0 and key != model.key]
            if not idle:
                raise
            for key in idle:  # what only waits to be used again makes room
                worker.unload(key)
            info = await worker.load(model)
        self._expire(model.key)
        return info

    def use(self, model: Model) -> None:
        """The model is needed; until release() it stays loaded."""
        self._uses[model.key] += 1
        timer = self._idle.pop(model.key, None)
        if timer is not None:
            timer.cancel()

    def release(self, model: Model) -> None:
        """One use less; the last one starts the time after which it is unloaded."""
        self._uses[model.key] -= 1
        self._expire(model.key)

    def drop(self, model: Model) -> None:
        """A removed model is unloaded once nobody uses it."""
        if self._uses[model.key] <= 0:
            self._unload(model.key)

    def _expire(self, key: str) -> None:
        if self._uses[key] > 0 or key in self._idle or self.stopping:
            return
        loop = asyncio.get_running_loop()
        seconds = self.config.number("models.keep_s")
        self._idle[key] = loop.call_later(seconds, self._unload, key)

    def _unload(self, key: str) -> None:
        timer = self._idle.pop(key, None)
        if timer is not None:
            timer.cancel()
        if self._uses[key] <= 0:
            del self._uses[key]
            for worker in self.workers:
                worker.unload(key)
