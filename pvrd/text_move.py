# SPDX-License-Identifier: Apache-2.0
"""A running text job goes where the governor wants work to be, at a token's boundary.

The model is loaded there first, while the job goes on here. Then this worker writes the job's KV
caches into a memfd, as its last word, and the other one takes them in. Without them (a worker that
died, no quota) the other one computes them anew from the journal.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from pvrd import fds
from pvrd.errors import PvrdError
from pvrd.inbox import WorkerLost
from pvrd.models import Model
from pvrd.places import PlaceLost

if TYPE_CHECKING:
    from pvrd.core import Core
    from pvrd.worker import Worker

APART_S = 1.0  # between two moves of a job
SEALS = fds.SEAL_SHRINK | fds.SEAL_GROW | fds.SEAL_WRITE


class Moved(PlaceLost):
    """The job is over here and goes on elsewhere."""


class Mover:
    """The moves of one job. `wake` has `due` asked again, by whoever follows the job."""

    def __init__(
        self, core: Core, uid: int, model: Model, choice: str, wake: Callable[[], None]
    ) -> None:
        self._core, self._uid, self.model, self._choice = core, uid, model, choice
        self._wake = wake
        self.stay = choice != "auto"
        self.reason = ""  # of the move under way
        self._governed = False  # it is on the CPU because the governor wants it there
        self._at = float("-inf")  # when it moved last
        self._loading: asyncio.Task[None] | None = None
        self._loaded: set[tuple[str, int]] = set()  # where the model is: kind and generation
        self._timer: asyncio.TimerHandle | None = None
        self._file = -1
        self._charge = 0

    def arrived(self, worker: Worker) -> None:
        """The job is in this worker now."""
        decision = self._core.supervisor.decision
        self._governed = worker.kind == "cpu" and decision.device == "cpu"
        self.reason = ""

    def target(self, worker: Worker) -> Worker | None:
        """The worker where a job in this one should be instead."""
        supervisor = self._core.supervisor
        decision, gpu, cpu = supervisor.decision, supervisor.gpu, supervisor.cpu
        if self.stay or decision.parked:
            return None
        if worker is gpu and decision.device == "cpu":
            return cpu if cpu.state in ("ready", "asleep") else None
        # Who fled from a GPU that failed does not go back by itself.
        up = worker is cpu and self._governed and decision.device == "gpu" and not decision.release
        return gpu if up and gpu.state in ("ready", "asleep") else None

    def due(self, worker: Worker) -> bool:
        """Should it leave now? Else, when it should leave, makes ready for that."""
        target = self.target(worker)
        if target is None:
            return False
        if (left := self._at + APART_S - time.monotonic()) > 0:
            if self._timer is None:
                self._timer = asyncio.get_running_loop().call_later(left, self._again)
            return False
        if target.state == "ready" and (target.kind, target.generation) in self._loaded:
            self.reason = self._core.supervisor.decision.reason if target.kind == "cpu" else ""
            self.reason = self.reason or f"the {target.kind.upper()} is free again"
            return True
        if self._loading is None or self._loading.done():
            self._loading = self._core.task(self._load(target))
        return False

    def _again(self) -> None:
        self._timer = None
        self._wake()

    async def _load(self, target: Worker) -> None:
        supervisor = self._core.supervisor
        try:
            worker = await supervisor.choose(target.kind)
            await supervisor.load(worker, self.model)
            self._loaded.add((worker.kind, worker.generation))
        except WorkerLost:
            return  # whoever comes next tells that it is there
        except PvrdError:
            self.stay = True  # better slowly than not at all
        self._wake()

    def leave(self, worker: Worker, job: str) -> None:
        """Asks for what the worker computed, and that it says no more."""
        self.close()
        self._at = time.monotonic()
        self._file = fds.memfd("pvrd-kv")
        limit = self._core.peers.free(self._uid)
        worker.send({"t": "text.export", "job": job, "limit": limit}, [self._file])

    def exported(self, message: Mapping[str, Any]) -> None:
        """The worker's last word came."""
        try:
            size = os.fstat(self._file).st_size
            if not size or size != message.get("bytes") or not fds.seal(self._file, SEALS):
                self.taken()
                return
            self._core.peers.take(self._uid, size=size)
            self._charge = size
        except PvrdError:
            self.taken()

    @property
    def carried(self) -> list[int]:
        """What the next worker is given beside the journal."""
        return [self._file] if self._charge else []

    def taken(self) -> None:
        """It is in the worker, or of no use."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
        if self._charge:
            self._core.peers.give(self._uid, 0, self._charge)
            self._charge = 0

    def close(self) -> None:
        """Lets go of everything. A second time is no error."""
        self.taken()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
