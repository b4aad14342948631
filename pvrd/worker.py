# SPDX-License-Identifier: Apache-2.0
"""The worker of one kind: what is said to it, what it says, and who hears that.

Those who wait for its messages get WorkerLost after all that it still said when it dies.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from pvrd import link, systemd
from pvrd.config import Config
from pvrd.errors import from_name
from pvrd.inbox import Inbox, WorkerLost, WorkerReleased
from pvrd.ladder import Use
from pvrd.models import Model
from pvrd.worker_life import Life
from pvrd.worker_models import Loadings
from pvrd.workers import protocol

CANARY_S = 3.0  # how long its word counts
MOST_KERNELS = 256


class Worker(Life):
    """`changed` is called whenever state, device or loading change."""

    def __init__(self, kind: str, config: Config, cache: str, changed: Callable[[], None]) -> None:
        super().__init__(kind, config, cache, changed)
        self.models = Loadings()
        self.on_work: Callable[[], None] | None = None  # a job came here, or got on
        self.on_canary: Callable[[], None] | None = None
        self.canary: dict[str, float] = {}  # its last word: ratio, busy, slices
        self.use = Use()  # by frames
        self.used_at = 0.0  # when it last had something to do
        self._canary_at = 0.0
        self._routes: dict[tuple[str, str], Inbox] = {}
        self._stats: list[asyncio.Future[dict[str, Any]]] = []
        self._orders: dict[str, Any] = {}  # of the governor

    @property
    def occupied(self) -> bool:
        """Has it something to do, or models in its memory?"""
        return bool(self._routes or self.models or self._stats)

    @property
    def jobs(self) -> int:
        """Jobs and video sessions in it."""
        return len(self._routes)

    def _lose(self, lost: WorkerLost) -> None:
        for inbox in list(self._routes.values()):
            inbox.put(lost)
        self._routes.clear()
        self.models.lose(lost)
        for future in self._stats:
            future.cancel()
        self._stats.clear()
        self.canary = {}

    def _loading(self) -> bool:
        return self.models.under_way

    def _waited_for(self) -> bool:
        return bool(self._routes or self._stats)

    # -- messages

    def _on_message(self, received: protocol.Received) -> None:
        message = received.message
        kind = message["t"]
        now = asyncio.get_running_loop().time()
        self._pulse.hears(message, now)
        self._past.hears(message, self._pulse.busy)
        if kind == "hello":
            self._on_hello(message, received.pid)
        elif kind == "dying":
            self._on_end(f"it lost its device: {str(message.get('reason', ''))[:200]}")
        elif kind == "quarantine":
            self._on_quarantine(message)
        elif kind == "canary":
            self._on_canary(message)
        elif kind == "stats":
            for future in self._stats:
                if not future.done():
                    future.set_result(message)
            self._stats.clear()
        elif kind in ("loaded", "progress") or _of_model(message):
            self.models.told(message)
            self.changed()
        elif kind not in ("pong", "busy"):
            for field_name in ("job", "session"):
                inbox = self._routes.get((field_name, str(message.get(field_name))))
                if inbox is not None:
                    inbox.put(message)

    def _on_hello(self, message: Mapping[str, Any], pid: int) -> None:
        if message.get("protocol") != protocol.PROTOCOL or self._pulse.greeted:
            self._on_end("it speaks another protocol")
            return
        self._pulse.greeted = True
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
            loading = self.models.begin(model, self.cache, self.send)
            self.used_at = time.monotonic()
            self._stir.set()
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


def _of_model(message: Mapping[str, Any]) -> bool:
    """Is it an error of a model alone?"""
    return message["t"] == "error" and "model" in message and not {"job", "session"} & set(message)


__all__ = ["Inbox", "Worker", "WorkerLost", "WorkerReleased"]
