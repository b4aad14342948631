# SPDX-License-Identifier: Apache-2.0
"""Both workers together: which one gets a job, how many at a time, which models stay loaded."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, TypeVar

from pvrd.config import WORKER_KEYS, Config, changed
from pvrd.errors import DeviceLost, OutOfMemory, ShuttingDown
from pvrd.governor import Decision
from pvrd.jobs import Job
from pvrd.models import Model
from pvrd.places import PlaceLost, Places
from pvrd.worker import Worker, WorkerLost, WorkerReleased

CPU_SLICE_MS = 20.0
MAX_KILLS = 3
CHOOSE_S = 90.0  # more than the longest back-off
GRACE_S = 1.0  # for jobs to leave a device that is to be released
IDLE = "it had nothing to do; the next job starts it"
FALL_BACK = (OutOfMemory, DeviceLost)  # of the GPU: the CPU may still do it

_T = TypeVar("_T")


def orders(decision: Decision, kind: str) -> dict[str, Any]:
    """What a worker of this kind is told of a decision. A share of the GPU is none of the CPU. The
    CPU's threads are interrupted by the kernel anyway: short slices would only cost there. Heat
    takes of both devices' time what it takes of a slice: smaller slices one after the other warm
    as much as large ones. The CPU's are so much shorter then that with the rest behind them they
    take no longer than before: a frame that has to be interpolated waits for both.
    """
    share = decision.share if kind == "gpu" else 1.0
    on_cpu = max(decision.slice_ms, CPU_SLICE_MS) * decision.group_scale
    return {
        "slice_ms": decision.slice_ms if kind == "gpu" else on_cpu,
        "group_scale": decision.group_scale,
        "share": min(share, decision.group_scale),
        "parked": decision.parked,
        "refresh_hz": decision.refresh_hz if kind == "gpu" else 0.0,
    }


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
        self.places = Places(lambda: self.config.whole("limits.queue"))
        self._uses: Counter[str] = Counter()
        self._idle: dict[str, asyncio.TimerHandle] = {}
        self._rests: dict[str, asyncio.TimerHandle] = {}  # by worker: when to see if it is idle
        self._releasing: asyncio.Task[None] | None = None
        self.stopping = False
        self.decision = Decision()  # the governor's, in force

    def start(self) -> None:
        """Starts both workers."""
        for worker in self.workers:
            worker.start()
            self._look_idle(worker)

    async def stop(self) -> None:
        """Ends both workers."""
        self.stopping = True
        self._changed()
        for timer in (*self._idle.values(), *self._rests.values()):
            timer.cancel()
        if self._releasing is not None:
            self._releasing.cancel()
        await asyncio.gather(*(worker.stop() for worker in self.workers))

    def reconfigure(self, config: Config) -> None:
        """Takes new values; a worker whose values changed is started anew."""
        every = changed(self.config, config)
        keys = every & WORKER_KEYS
        self.config = config
        if "workers.idle_s" in every:
            for worker in self.workers:
                self._look_idle(worker)
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
        before, self.decision = self.decision, decision
        for worker in self.workers:
            worker.govern(orders(decision, worker.kind))
        if decision.release != before.release:
            if self._releasing is not None:
                self._releasing.cancel()
                self._releasing = None
            if decision.release:
                self._releasing = asyncio.get_running_loop().create_task(self._release())
            else:
                self.gpu.wake()
        self._changed()

    async def _release(self) -> None:
        """Gives the GPU's memory back: jobs get a moment to leave at a boundary of their own."""
        reason = self.decision.reason
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.0 if self.decision.parked else GRACE_S):
                while self.gpu.jobs:
                    await self.news()
        self.gpu.rest(reason)

    async def released(self, seconds: float) -> bool:
        """Waits until the GPU worker that was to be released is gone, at most so long."""
        if self._releasing is not None:
            await asyncio.wait([self._releasing], timeout=seconds)
        return await self.gpu.gone(seconds)

    # -- workers with nothing to do

    def _look_idle(self, worker: Worker, seconds: float | None = None) -> None:
        """Looks after `seconds` (workers.idle_s) whether the worker was idle all the time."""
        timer = self._rests.pop(worker.kind, None)
        if timer is not None:
            timer.cancel()
        if not self.stopping:
            pause = self.config.number("workers.idle_s") if seconds is None else seconds
            loop = asyncio.get_running_loop()
            self._rests[worker.kind] = loop.call_later(pause, self._idle_yet, worker)

    def _idle_yet(self, worker: Worker) -> None:
        left = worker.used_at + self.config.number("workers.idle_s") - time.monotonic()
        if worker.state != "ready" or worker.occupied or self.places.running(worker.kind):
            self._look_idle(worker)
        elif left > 0:
            self._look_idle(worker, left)
        else:
            worker.rest(IDLE)
            self._look_idle(worker)

    # -- state

    @property
    def state(self) -> str:
        """gpu, cpu, starting or failed: what new work would get."""
        order = [self.gpu, self.cpu]
        if self.decision.device == "cpu":
            order.reverse()
        for worker in order:
            if worker.state == "ready" or self._on_call(worker):
                return worker.kind
        if any(worker.state == "starting" for worker in self.workers):
            return "starting"
        return "failed"

    def _on_call(self, worker: Worker) -> bool:
        """Does the next job start it?"""
        return worker.state == "asleep" and not (worker is self.gpu and self.decision.release)

    @property
    def reason(self) -> str:
        """Why not the GPU, one sentence; "" with it."""
        if self.state == "gpu":
            return ""
        if self.gpu.state == "restarting":
            return f"the GPU worker is being restarted: {self.gpu.reason}"
        if self.gpu.state in ("absent", "disabled"):
            return self.gpu.reason
        if self.decision.device == "cpu" or self.decision.release:
            return self.decision.reason
        return "the GPU worker is starting"

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
            if not self.decision.parked and (found := self._now(device)) is not None:
                return found
            await self.news()

    def _now(self, device: str) -> Worker | None:
        """The worker that a job can have at this moment; one that sleeps is woken for it.

        Raises:
            DeviceLost: there is none at all.
        """
        gpu, cpu = self.gpu, self.cpu
        if device in ("gpu", "cpu"):
            return self._woken(gpu if device == "gpu" else cpu)
        no_cpu = cpu.state in ("absent", "disabled")
        if self.decision.device == "cpu" and not no_cpu:
            return self._woken(cpu)
        if gpu.state in ("ready", "starting") or self._on_call(gpu):
            return self._woken(gpu)
        if gpu.state in ("absent", "disabled") and no_cpu:
            raise DeviceLost(f"there is no device at all: {cpu.reason}")
        return self._woken(cpu)

    def _woken(self, worker: Worker) -> Worker | None:
        if self._on_call(worker):
            worker.wake()
        return worker if worker.state == "ready" else None

    async def attempt(
        self,
        device: str,
        model: Model,
        priority: int,
        body: Callable[[Worker], Awaitable[_T]],
        moved: Callable[[str], None],
        job: Job | None = None,
    ) -> _T:
        """Runs `body` with a worker that has the model; again in another when that one dies.

        Args:
            body: may start over where its record ends.
            moved: called with the reason before each further attempt.
            job: is told where it stands.

        Raises:
            DeviceLost: no device, or the job ended MAX_KILLS workers. Else what the body raises.
        """
        kills = 0
        with self._using(model):
            while True:
                worker = await self.choose(device)
                try:
                    async with self.places.place(worker, priority, job):
                        if job is not None:
                            job.at("loading", worker.kind)
                        await self.load(worker, model)
                        if job is not None:
                            job.at("running", worker.kind)
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
                    if self.stopping:
                        raise ShuttingDown("pvrd is ending") from None
                    kills += not isinstance(e, WorkerReleased)
                    if kills >= MAX_KILLS:
                        text = f"{kills} workers ended under this job, the last: {e}"
                        raise DeviceLost(text) from None
                    moved(str(e))

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

    @contextlib.contextmanager
    def _using(self, model: Model) -> Iterator[None]:
        self.use(model)
        try:
            yield
        finally:
            self.release(model)

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
                if not worker.occupied:
                    self._look_idle(worker, 0.0)
