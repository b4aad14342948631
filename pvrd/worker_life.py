# SPDX-License-Identifier: Apache-2.0
"""The lives of one kind of worker: start, hello, ping, deadlines, kill, back-off.

A worker that dies, stops or talks nonsense is killed and followed at once, later with growing
pauses. What is said to it and what it says is pvrd/worker.py's.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pvrd import link, systemd
from pvrd.config import Config
from pvrd.errors import PvrdError
from pvrd.inbox import WorkerLost, WorkerReleased
from pvrd.worker_pulse import Past, Pulse
from pvrd.workers import protocol

HEALTHY_S = 60.0  # a worker that lived so long starts the back-off from the beginning
BUSY_RETRY_S = 60.0
ENDING_S = 1.0  # a worker that closed its socket is killed when it is not gone by then
TRYING_S = 5.0  # the same while its driver has a kernel that is being tried: let it get that over
OFF = "the configuration turns it off (gpu.enabled)"
DEVICE_CODES = ("busy", "failed")  # that may pass


@dataclass
class Counters:
    """What a worker did, over all its generations."""

    restarts: int = 0
    jobs: int = 0
    frames: int = 0
    tokens: int = 0
    last_exit: str = ""


class Life(ABC):
    """One process after the other. `changed` is called whenever state or device change."""

    def __init__(self, kind: str, config: Config, cache: str, changed: Callable[[], None]) -> None:
        self.kind, self.config, self.cache, self.changed = kind, config, cache, changed
        self.state = "starting"  # starting, ready, restarting, absent, disabled, asleep
        self.generation = 0
        self.device: dict[str, Any] | None = None
        self.reason = ""
        self.code = ""
        self.pid = 0
        self.counters = Counters()
        self.stopping = False
        self._link: link.Link | None = None
        self._process: link.Process | None = None
        self._end: asyncio.Future[str] | None = None
        self._pulse = Pulse(0.0)
        self._past = Past()
        self._ready_at = 0.0
        self._silent = False  # it was ended because it did not answer
        self._resting = ""  # why pvrd ended it on purpose; "" when it is to live
        self._stir = asyncio.Event()  # the watch has to look anew
        self._restart = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    # -- what the worker itself adds

    @abstractmethod
    def _on_message(self, received: protocol.Received) -> None: ...

    @abstractmethod
    def _lose(self, lost: WorkerLost) -> None:
        """Tells all who wait for it that it is gone."""

    @abstractmethod
    def _loading(self) -> bool:
        """Is a model on its way there?"""

    @abstractmethod
    def _waited_for(self) -> bool:
        """Does anybody wait for its word?"""

    # -- from outside

    def start(self) -> None:
        """Begins to keep a worker alive."""
        self._task = asyncio.get_running_loop().create_task(self._live())

    async def stop(self) -> None:
        """Ends the worker for good."""
        self.stopping = True
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        self._teardown("pvrd ends", kill=False)
        if self._process is not None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(asyncio.shield(self._process.ended), self._patience())
            self._process.kill()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(asyncio.shield(self._process.ended), 1.0)
            self._process.forget()

    def restart(self, config: Config) -> None:
        """Starts a new worker with another configuration; its jobs go on elsewhere or in it."""
        self.config = config
        self.generation = 0  # the first of its kind under this configuration
        self._past.forget()
        self._restart.set()
        self._on_end("the configuration changed")
        if not self.enabled:
            self._set("disabled", OFF)

    def rest(self, reason: str, kill: bool = False, blame: bool = False) -> None:
        """Ends the worker on purpose and gives its memory back; none follows before wake().

        Jobs in it get WorkerReleased. Its device stays known. `kill`: at once, since it may hang.
        `blame`: what it was trying may be the reason.
        """
        if blame:
            self._past.blame(reason)
        if not self._resting and self.state not in ("absent", "disabled"):
            systemd.log(
                systemd.INFO, f"the {self.kind} worker is ended: {reason}",
                MESSAGE_ID=systemd.MESSAGE_WORKER_RESTS, PVRD_DEVICE=self.kind, PVRD_REASON=reason,
            )  # fmt: skip
        self._resting = reason
        if self.state in ("ready", "starting", "restarting", "asleep"):
            self._set("asleep", reason)
        self._on_end(reason, kill)
        self._restart.set()  # no back-off goes on

    def wake(self) -> None:
        """Starts a worker again after rest(); also tries anew at once when there was no device."""
        if not self._resting and self.state != "absent":
            return
        self._resting = ""
        if self.state == "asleep":
            self._set("starting")
        self._restart.set()

    async def gone(self, seconds: float) -> bool:
        """Waits until the ended worker's process, and so its memory, is gone."""
        process = self._process
        if process is not None and not process.ended.done():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(asyncio.shield(process.ended), seconds)
        return process is None or process.ended.done()

    @property
    def enabled(self) -> bool:
        """The CPU worker always; the GPU worker unless the configuration says no."""
        return self.kind != "gpu" or self.config.flag("gpu.enabled")

    @property
    def settled(self) -> bool:
        """Has the first hello come, or is it known that none will?"""
        return self.state != "starting"

    def send(self, message: Mapping[str, Any], fds: Sequence[int] = (), lane: str = "") -> None:
        """Sends to the present worker; without one the message is lost, as if it just died. `lane`
        as in Link.send."""
        if self._link is not None:
            self._pulse.said = asyncio.get_running_loop().time()
            self._link.send(message, fds, lane)

    # -- one after the other

    async def _live(self) -> None:
        failures = 0
        while not self.stopping:  # a cancel() that meets the end of a process may be lost
            self._restart.clear()
            if not self.enabled:
                self._set("disabled", OFF)
                await self._restart.wait()
                continue
            if self._resting:
                if self.state == "disabled":
                    self._set("asleep", self._resting)
                await self._restart.wait()
                continue
            how = await self._one_life()
            lived = time.monotonic() - self._ready_at if self._ready_at else 0.0
            if self._restart.is_set() or self._resting:
                failures = 0
                self._past.spared()
                continue
            if self.state == "absent":
                self._past.never()
                if self.code in DEVICE_CODES:
                    await self._pause(BUSY_RETRY_S)
                else:
                    await self._restart.wait()
                continue
            failures = 1 if lived >= HEALTHY_S else failures + 1
            self.counters.restarts += 1
            self.counters.last_exit = how
            self._past.ended(how, self._silent)
            pause = 0.0
            if failures > 1 or not lived:
                pause = min(
                    self.config.number("workers.backoff_s") * 2 ** min(failures - 1, 16),
                    self.config.number("workers.backoff_max_s"),
                )
            systemd.log(
                systemd.WARNING,
                f"the {self.kind} worker is gone: {how}; its successor starts in {pause:g} s",
                MESSAGE_ID=systemd.MESSAGE_WORKER_LOST, PVRD_DEVICE=self.kind, PVRD_REASON=how,
            )  # fmt: skip
            self._set("restarting", how)
            await self._pause(pause)

    async def _pause(self, seconds: float) -> None:
        if seconds > 0:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._restart.wait(), seconds)

    async def _one_life(self) -> str:
        """Starts a worker and watches it to its end; how it ended."""
        loop = asyncio.get_running_loop()
        self._end = loop.create_future()
        self._ready_at = 0.0
        self._pulse = Pulse(loop.time())
        self._silent = False
        self._past.trying = ""
        self._process = None
        self.generation += 1
        path = self.config.text(f"workers.{self.kind}_socket")
        try:
            if path:
                sock = link.connect(path)
            else:
                sock, self._process = await link.spawn(
                    self.kind, self.config.texts("workers.program")
                )
        except PvrdError as e:
            return str(e)
        self._link = link.Link(sock, self._on_message, self._on_end)
        self._link.send(self._hello())
        watch = loop.create_task(self._watch(self._link))
        try:
            how = await self._end
            if self._process is not None and (how == "it ended" or self._resting):
                # It is about to go by itself: how it goes is its own to say.
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(asyncio.shield(self._process.ended), self._patience())
        finally:
            watch.cancel()
            self._teardown("pvrd ends", kill=self.stopping is False)
        if self._process is not None:
            # The device is free, and its last words are known, when the process is gone.
            with contextlib.suppress(TimeoutError):
                died = await asyncio.wait_for(asyncio.shield(self._process.ended), 2.0)
                how = died if how == "it ended" else how
        return how

    def _patience(self) -> float:
        """How long a worker that is to end may take. The kernel in whose self-test it was killed
        would be suspected.
        """
        return TRYING_S if self._past.trying else ENDING_S

    def _hello(self) -> dict[str, Any]:
        config = self.config
        return {
            "t": "hello",
            "protocol": protocol.PROTOCOL,
            "kind": self.kind,
            "generation": self.generation,
            "config": {
                "allow_software": config.flag("gpu.allow_software"),
                "threads": config.whole("cpu.threads"),
                "reserve": config.whole("cpu.reserve"),
                "cache": self.cache,
                "tile": config.whole("video.tile"),
                "overlap": config.whole("video.overlap"),
                "chunk": config.whole("text.chunk"),
                "check_rate": config.number("gpu.check_rate"),
                "previous": self._past.told(),
                "faults": list(config.texts("debug.faults")),
            },
        }

    def _teardown(self, reason: str, kill: bool) -> None:
        if self._link is not None:
            self._link.close()
            self._link = None
        if kill and self._process is not None:
            self._process.kill()
        self.pid = 0
        self._lose(WorkerReleased(reason) if self._resting else WorkerLost(reason))

    def _on_end(self, reason: str, kill: bool | None = None) -> None:
        """The worker is gone, or is to go. `kill`: or else it has closed its end by itself."""
        if self._end is not None and not self._end.done():
            self._end.set_result(reason)
        # At once, not a turn later: nobody may choose a worker that is gone.
        if self.state == "ready":
            self._set("restarting", reason)
        how = "was ended" if self._resting else "is gone"
        kill = reason != "it ended" if kill is None else kill
        self._teardown(f"the {self.kind} worker {how}: {reason}", kill)

    def _set(self, state: str, reason: str = "", code: str = "") -> None:
        self.state, self.reason, self.code = state, reason, code
        if state not in ("ready", "restarting", "asleep"):
            self.device = None
        self._stir.set()
        self.changed()

    # -- deadlines

    def deadline(self) -> float:
        """How long the thread that runs slices may be silent, in seconds."""
        software = self.device is None or bool(self.device.get("software"))
        return self._pulse.deadline(self.config, software, self._loading())

    def _every(self) -> float:
        return self._pulse.every(self.config, self._waited_for() or self._loading())

    async def _watch(self, watched: link.Link) -> None:
        """Pings a silent worker and ends one past its deadline.

        It ends with the worker by itself, too: until Python 3.12 wait_for may swallow a cancelling
        when `_stir` is set at the same time.
        """
        loop = asyncio.get_running_loop()
        asked: float | None = None
        number = 0
        while self._link is watched:
            self._stir.clear()
            if not self._pulse.greeted and asked is None:
                asked = self._pulse.heard
            due = self._pulse.heard + self._every() if asked is None else asked + self.deadline()
            pause = max(due - loop.time(), 0.001)
            before = loop.time()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stir.wait(), pause)
            now = loop.time()
            if now - before > 2 * pause + 1.0 and asked is not None:
                asked = now  # it was pvrd that slept: what came meanwhile is not read yet
            if asked is not None and self._pulse.heard > asked:
                asked = None
            quiet = now - self._pulse.heard >= self._every()
            if asked is None and quiet and self._link is not None:
                number += 1
                asked = now
                self.send({"t": "ping", "n": number})
            elif asked is not None and now - asked > self.deadline():
                self._silent = True
                self._on_end(f"it did not answer for {self.deadline():g} s")
                return
