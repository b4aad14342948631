# SPDX-License-Identifier: Apache-2.0
"""One worker and its successors: start, hello, ping, deadlines, kill, back-off, its models.

A worker that dies, stops or talks nonsense is killed and followed at once, later with growing
pauses. Those who wait for its messages get WorkerLost after all that it still said.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pvrd import link, systemd
from pvrd.config import Config
from pvrd.errors import DeviceLost, PvrdError, from_name
from pvrd.inbox import Inbox, WorkerLost, WorkerReleased
from pvrd.models import COMPILED, Model
from pvrd.workers import protocol

SOFTWARE_SLICE_S, SLICE_S = 30.0, 1.0
FIRST_SLICE_S = 10.0  # before anything was measured
SOFTWARE_PIPELINE_S, PIPELINE_S = 120.0, 30.0
QUIET_PINGS = 10  # a worker with nothing to do is asked so many times more rarely
CANARY_S = 3.0  # how long its word counts
HEALTHY_S = 60.0  # a worker that lived so long starts the back-off from the beginning
BUSY_RETRY_S = 60.0
TRYING_S = 5.0  # the same while its driver has a kernel that is being tried: let it get that over
ENDING_S = 1.0  # a worker that closed its socket is killed when it is not gone by then
OFF = "the configuration turns it off (gpu.enabled)"
BY_OTHERS = ("it was killed by signal 9", "it was killed by signal 15")  # says nothing of a kernel
MOST_KERNELS = 256
MOST_ENDED_BY = 64  # what a hello has room for
DEVICE_CODES = ("busy", "failed")  # that may pass


@dataclass
class Loading:
    """A model in a worker."""

    model: Model
    future: asyncio.Future[dict[str, Any]]
    progress: float = 0.0


@dataclass
class Counters:
    """What a worker did, over all its generations."""

    restarts: int = 0
    jobs: int = 0
    frames: int = 0
    tokens: int = 0
    last_exit: str = ""


@dataclass
class Worker:
    """The worker of one kind. `changed` is called whenever state, device or loading change."""

    kind: str
    config: Config
    cache: str
    changed: Callable[[], None]
    state: str = "starting"  # starting, ready, restarting, absent, disabled, asleep
    generation: int = 0
    device: dict[str, Any] | None = None
    reason: str = ""
    code: str = ""
    pid: int = 0
    counters: Counters = field(default_factory=Counters)
    models: dict[str, Loading] = field(default_factory=dict)
    stopping: bool = False

    def __post_init__(self) -> None:
        self._link: link.Link | None = None
        self._process: link.Process | None = None
        self._routes: dict[tuple[str, str], Inbox] = {}
        self._stats: list[asyncio.Future[dict[str, Any]]] = []
        self._end: asyncio.Future[str] | None = None
        self._heard = 0.0
        self._said = 0.0
        self._slice = FIRST_SLICE_S / 10
        self._ready_at = 0.0
        self._greeted = False
        self._busy = False
        self._silent = False  # it was ended because it did not answer
        self._previous: dict[str, Any] = {}  # how the one before ended, when that says something
        self._trying = ""  # the kernel that the driver's compiler has, or its self-test
        self._ended_by: dict[str, str] = {}  # kernels over which workers ended, and how
        self._orders: dict[str, Any] = {}  # of the governor
        self.on_work: Callable[[], None] | None = None  # a job came here, or got on
        self.on_canary: Callable[[], None] | None = None
        self.canary: dict[str, float] = {}  # its last word: ratio, busy, slices
        self._canary_at = 0.0
        self.used_at = 0.0  # when it last had something to do
        self._blamed = ""  # what its end on purpose says of the kernel that it tried
        self._resting = ""  # why pvrd ended it on purpose; "" when it is to live
        self._stir = asyncio.Event()  # the watch has to look anew
        self._restart = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    # -- life

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
        self._ended_by.clear()
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
            self._blamed = reason
            if self._trying and len(self._ended_by) < MOST_ENDED_BY:
                self._ended_by[self._trying] = reason[:200]
        if not self._resting:
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
    def occupied(self) -> bool:
        """Has it something to do, or models in its memory?"""
        return bool(self._routes or self.models or self._stats)

    @property
    def jobs(self) -> int:
        """Jobs and video sessions in it."""
        return len(self._routes)

    @property
    def enabled(self) -> bool:
        """The CPU worker always; the GPU worker unless the configuration says no."""
        return self.kind != "gpu" or self.config.flag("gpu.enabled")

    @property
    def settled(self) -> bool:
        """Has the first hello come, or is it known that none will?"""
        return self.state != "starting"

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
            self._previous = {}
            if self._restart.is_set() or self._resting:
                failures = 0
                self._previous = {"how": self._blamed[:200]} if self._blamed else {"spared": True}
                self._blamed = ""
                continue
            if self.state == "absent":
                if self.code in DEVICE_CODES:
                    await self._pause(BUSY_RETRY_S)
                else:
                    await self._restart.wait()
                continue
            failures = 1 if lived >= HEALTHY_S else failures + 1
            self.counters.restarts += 1
            self.counters.last_exit = how
            if how not in BY_OTHERS:
                self._previous = {"how": how[:200], "silent": self._silent}
                if self._trying and len(self._ended_by) < MOST_ENDED_BY:
                    self._ended_by[self._trying] = how[:200]
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
        self._greeted = self._busy = self._silent = False
        self._trying = ""
        self._process = None
        self.generation += 1
        path = self.config.text(f"workers.{self.kind}_socket")
        try:
            if path:
                sock = link.connect(path)
            else:
                sock, self._process = link.spawn(self.kind, self.config.texts("workers.program"))
        except DeviceLost as e:
            return str(e)
        self._heard = self._said = loop.time()
        self._slice = FIRST_SLICE_S / 10
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
        return TRYING_S if self._trying else ENDING_S

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
                "previous": {**self._previous, "ended_by": self._ended_by},
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
        lost = WorkerReleased(reason) if self._resting else WorkerLost(reason)
        for inbox in list(self._routes.values()):
            inbox.put(lost)
        self._routes.clear()
        for loading in self.models.values():
            if not loading.future.done():
                loading.future.set_exception(lost)
                loading.future.exception()  # nobody may be waiting
        self.models.clear()
        for future in self._stats:
            future.cancel()
        self._stats.clear()
        self.canary = {}

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
        if not self._greeted:
            return self.config.number("deadlines.hello_s")
        if self._busy or any(not loading.future.done() for loading in self.models.values()):
            configured = self.config.number("deadlines.pipeline_s")
            return configured or (SOFTWARE_PIPELINE_S if software else PIPELINE_S)
        configured = self.config.number("deadlines.slice_s")
        if configured:
            return configured
        floor = SOFTWARE_SLICE_S if software else SLICE_S
        return min(max(floor, 10 * self._slice), SOFTWARE_PIPELINE_S)

    def _measure(self, now: float) -> None:
        """A message came: how long did its slice take? Long ones are forgotten slowly."""
        took = now - max(self._heard, self._said)
        self._slice = max(took, 0.95 * self._slice)

    def _every(self) -> float:
        """Seconds of silence after which it is asked. What it hangs in while nobody waits for it
        does no harm, and an idle daemon sleeps.
        """
        every = self.config.number("deadlines.ping_s")
        waited_for = self._routes or self._stats or self._busy or not self._greeted
        loading = any(not loading.future.done() for loading in self.models.values())
        return every if waited_for or loading else QUIET_PINGS * every

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
            if not self._greeted and asked is None:
                asked = self._heard
            due = self._heard + self._every() if asked is None else asked + self.deadline()
            pause = max(due - loop.time(), 0.001)
            before = loop.time()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stir.wait(), pause)
            now = loop.time()
            if now - before > 2 * pause + 1.0 and asked is not None:
                asked = now  # it was pvrd that slept: what came meanwhile is not read yet
            if asked is not None and self._heard > asked:
                asked = None
            if asked is None and now - self._heard >= self._every() and self._link is not None:
                number += 1
                asked = now
                self.send({"t": "ping", "n": number})
            elif asked is not None and now - asked > self.deadline():
                self._silent = True
                self._on_end(f"it did not answer for {self.deadline():g} s")
                return

    # -- messages

    def _on_message(self, received: protocol.Received) -> None:
        message = received.message
        kind = message["t"]
        now = asyncio.get_running_loop().time()
        if not self._busy:
            self._measure(now)
        self._heard = now
        self._busy = kind == "busy" and message.get("on") is True  # it makes pipelines
        if kind != "pong":
            self._trying = str(message.get("kernel") or "")[:100] if self._busy else ""
        if kind == "hello":
            self._on_hello(message, received.pid)
        elif kind == "dying":
            self._on_end(f"it lost its device: {str(message.get('reason', ''))[:200]}")
        elif kind == "quarantine":
            self._on_quarantine(message)
        elif kind in ("loaded", "progress"):
            self._on_loading(message)
        elif kind == "canary":
            self._on_canary(message)
        elif kind == "stats":
            for future in self._stats:
                if not future.done():
                    future.set_result(message)
            self._stats.clear()
        elif kind == "error" and "model" in message and not {"job", "session"} & set(message):
            loading = self.models.pop(str(message["model"]), None)
            if loading is not None and not loading.future.done():
                loading.future.set_exception(
                    from_name(message.get("error"), message.get("message", ""))
                )
                loading.future.exception()
            self.changed()
        elif kind not in ("pong", "busy"):
            for field_name in ("job", "session"):
                inbox = self._routes.get((field_name, str(message.get(field_name))))
                if inbox is not None:
                    inbox.put(message)

    def _on_hello(self, message: Mapping[str, Any], pid: int) -> None:
        if message.get("protocol") != protocol.PROTOCOL or self._greeted:
            self._on_end("it speaks another protocol")
            return
        self._greeted = True
        if self._process is None:
            # The kernel's word, not the worker's.
            self._process = link.Process(pid or int(message.get("pid", 0)), None)
        self.pid = self._process.pid
        device = message.get("device")
        if not isinstance(device, dict):
            reason = from_name("Internal", message.get("reason") or "it has no device")
            code = str(message.get("code") or "failed")
            self._set("absent", str(reason), code)
            systemd.log(
                systemd.NOTICE, f"no {self.kind}: {reason}",
                MESSAGE_ID=systemd.MESSAGE_WORKER_ABSENT, PVRD_DEVICE=self.kind, PVRD_REASON=code,
            )  # fmt: skip
            if self._end is not None and not self._end.done():
                self._end.set_result("it has no device")
            return
        self.device = device
        self._ready_at = self.used_at = time.monotonic()
        if self._orders:
            self.send({"t": "govern", **self._orders})
        self._set("ready")
        systemd.log(
            systemd.INFO, f"{self.kind} worker ready: {str(device.get('name', ''))[:100]}",
            MESSAGE_ID=systemd.MESSAGE_WORKER_READY, PVRD_DEVICE=self.kind,
        )  # fmt: skip

    def _on_quarantine(self, message: Mapping[str, Any]) -> None:
        if self.device is None or not isinstance(found := message.get("kernels"), dict):
            return
        before = self.quarantined
        self.device = {**self.device, "quarantined": found}
        for name, reason in self.quarantined.items():
            if name not in before:
                systemd.log(
                    systemd.WARNING, f"the {self.kind} does not use {name} any more: {reason}",
                    PVRD_DEVICE=self.kind, PVRD_REASON=reason,
                )  # fmt: skip
        self.changed()

    def _on_canary(self, message: Mapping[str, Any]) -> None:
        values = {key: message.get(key) for key in ("ratio", "busy", "slices")}
        known = {key: value for key, value in values.items() if value is not None}
        if all(isinstance(v, (int, float)) and 0 <= v < 1e9 for v in known.values()):
            self.canary = {key: float(value) for key, value in known.items()}
            self._canary_at = time.monotonic()
            if self.on_canary is not None:
                self.on_canary()

    def canary_ratio(self, now: float) -> float | None:
        """A slice's time beside what it takes alone, if slices ran lately (time.monotonic())."""
        fresh = self.canary and now - self._canary_at <= CANARY_S
        return self.canary.get("ratio") if fresh and self.canary.get("slices") else None

    def _on_loading(self, message: Mapping[str, Any]) -> None:
        loading = self.models.get(str(message.get("model")))
        if loading is None or loading.future.done():
            return
        if message["t"] == "loaded":
            loading.progress = 1.0
            info = message.get("info")
            loading.future.set_result(info if isinstance(info, dict) else {})
        else:
            with contextlib.suppress(TypeError, ValueError):
                loading.progress = min(1.0, max(0.0, float(message.get("value", 0.0))))
        self.changed()

    # -- use

    @property
    def name(self) -> str:
        """The device's name for people."""
        return str((self.device or {}).get("name", ""))[:200]

    @property
    def quarantined(self) -> dict[str, str]:
        """Kernels that the device must not run, with the reasons."""
        found = (self.device or {}).get("quarantined")
        entries = list(found.items())[:MOST_KERNELS] if isinstance(found, dict) else []
        return {str(name)[:100]: str(reason)[:300] for name, reason in entries}

    def send(self, message: Mapping[str, Any], fds: Sequence[int] = ()) -> None:
        """Sends to the present worker; without one the message is lost, as if it just died."""
        if self._link is not None:
            self._said = asyncio.get_running_loop().time()
            self._link.send(message, fds)

    def govern(self, orders: Mapping[str, Any]) -> None:
        """What the worker may take of its device, from now on and for its successors."""
        if orders != self._orders:
            self._orders = dict(orders)
            if self.state == "ready":
                self.send({"t": "govern", **orders})

    @contextlib.contextmanager
    def route(self, field_name: str, value: str) -> Iterator[Inbox]:
        """Messages whose `field_name` (job or session) is `value`, until the block ends.

        Raises:
            WorkerLost: there is no worker now.
        """
        if self._link is None or self.state != "ready":
            raise WorkerLost(f"the {self.kind} worker is gone")
        inbox = Inbox(self)
        self._routes[(field_name, value)] = inbox
        if self.on_work is not None:
            self.on_work()
        self._stir.set()
        try:
            yield inbox
        finally:
            self.used_at = time.monotonic()
            if self._routes.get((field_name, value)) is inbox:
                del self._routes[(field_name, value)]

    async def load(self, model: Model) -> dict[str, Any]:
        """Has the model loaded; what the worker says about it.

        Raises:
            WorkerLost: it died. PvrdError: it cannot load the model.
        """
        loading = self.models.get(model.key)
        if loading is None:
            if self._link is None or self.state != "ready":
                raise WorkerLost(f"the {self.kind} worker is gone")
            loading = Loading(model, asyncio.get_running_loop().create_future())
            fd = model.open()
            try:
                self.models[model.key] = loading
                self._stir.set()
                self.used_at = time.monotonic()
                compiled = model.path.suffix == COMPILED
                cache = "" if compiled else f"{self.cache}/{model.key}{COMPILED}"
                self._link.send(
                    {
                        "t": "load", "model": model.key, "name": model.name, "kind": model.kind,
                        "cache": cache, "force": False, "narrow": model.narrow,
                    },
                    [fd],
                )  # fmt: skip
            finally:
                os.close(fd)
            self.changed()
        return await asyncio.shield(loading.future)

    def unload(self, key: str) -> None:
        """Has a model dropped."""
        loading = self.models.get(key)
        if loading is not None and loading.future.done():
            del self.models[key]
            self.send({"t": "unload", "model": key})

    async def stats(self, seconds: float) -> dict[str, Any]:
        """What the worker counts; nothing when it is busy for longer than `seconds`."""
        if self._link is None or self.state != "ready":
            return {}
        future: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._stats.append(future)
        self._stir.set()
        self.send({"t": "stats"})
        try:
            return await asyncio.wait_for(future, seconds)
        except (TimeoutError, asyncio.CancelledError):
            return {}


__all__ = ["Inbox", "PvrdError", "Worker", "WorkerLost", "WorkerReleased"]
