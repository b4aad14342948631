# SPDX-License-Identifier: Apache-2.0
"""From what is heard to what is done: sensors, canary, holds and sessions make a snapshot, the
governor decides, the supervisor puts it into force.

Nothing here wakes by itself but for a step of the governor that is due, or a canary that has become
old: an idle daemon sleeps.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from pvrd import systemd
from pvrd.core import Core
from pvrd.objects import where
from pvrd.sensors import DeviceEvent
from pvrd.suspend import Suspend
from pvrd.worker import CANARY_S, Worker

PAUSE_S = 0.1  # between two decisions that nobody waits for
LONGEST_S = 3600.0


class Steering:
    """Decides whenever there is news."""

    def __init__(self, core: Core, working: Callable[[], bool], games: Callable[[], Any]) -> None:
        """working: is work under way? games: what else, told by agents, keeps the GPU free."""
        self.core = core
        self._working = working
        self._games = games
        self._wedged = ""  # why the GPU is not to be used until it is added again
        self._timer: asyncio.TimerHandle | None = None
        self._soon: asyncio.TimerHandle | None = None
        self._last = -math.inf
        self._pid = -1
        self._nodes: set[str] = set()
        self._started = False
        sensors, supervisor = core.sensors, core.supervisor
        self.suspend = Suspend(sensors.logind, self.decide, supervisor.released)
        sensors.on_device = self._on_device
        supervisor.gpu.on_canary = self.news

    async def start(self) -> None:
        """Starts the sensors and decides for the first time."""
        self._started = True
        await self.core.sensors.start()
        self.decide()

    async def stop(self) -> None:
        """Stops the sensors; the last decision stays."""
        self._started = False
        for timer in (self._timer, self._soon):
            if timer is not None:
                timer.cancel()
        self.suspend.stop()
        await self.core.sensors.stop()

    # -- deciding

    def news(self) -> None:
        """Something was heard: decides soon, and not more often than makes sense."""
        if self._soon is None and self._started:
            loop = asyncio.get_running_loop()
            pause = max(0.0, self._last + PAUSE_S - loop.time())
            self._soon = loop.call_later(pause, self.decide)

    def decide(self) -> None:
        """Decides now."""
        if not self._started:
            return
        try:
            self._decide()
        except Exception as e:  # a sensor's fault: the last decision stays in force
            text = f"the governor could not decide: {where(e)}"
            systemd.log(systemd.ERROR, text, PVRD_REASON="internal")

    def _decide(self) -> None:
        core, loop = self.core, asyncio.get_running_loop()
        if self._soon is not None:
            self._soon.cancel()
            self._soon = None
        self._last = loop.time()
        core.sensors.work(self._working())
        now = time.monotonic()
        gpu = core.supervisor.gpu
        # A GPU in software is as slow as the CPU is busy: that says nothing of a GPU.
        software = bool((gpu.device or {}).get("software"))
        canary = None if software else gpu.canary_ratio(now)
        snapshot = core.sensors.snapshot(
            now,
            canary=canary,
            holds=dict.fromkeys((*core.holds.reasons(), *self._games())),
            wedged=bool(self._wedged),
        )
        if "idle" in snapshot.sources:  # logind told
            self.suspend.keep_lock()
        if self._wedged:
            sources = {**snapshot.sources, "wedged": self._wedged}
            snapshot = replace(snapshot, sources=sources)
        core.supervisor.govern(core.governor.decide(snapshot))
        look = core.governor.state.look_s - now
        if canary is not None:
            look = min(look, CANARY_S)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if look <= LONGEST_S:
            self._timer = loop.call_later(max(look, 0.0), self.decide)

    # -- the GPU itself

    def met(self) -> None:
        """The workers changed: whose GPU time is our own?"""
        workers = self.core.supervisor.workers
        gpu = self.core.supervisor.gpu
        if gpu.state == "ready" and gpu.pid != self._pid:
            self._pid = gpu.pid
            told = (gpu.device or {}).get("properties")
            listed = told.get("nodes") if isinstance(told, dict) else None
            self._nodes = set(map(str, listed)) if listed else open_nodes(gpu.pid)
            render = [n for n in sorted(self._nodes) if "render" in n]
            pids = [worker.pid for worker in workers if worker.pid]
            self.core.sensors.workers([os.getpid(), *pids], render[0] if render else "")

    def _on_device(self, event: DeviceEvent) -> None:
        gpu = self.core.supervisor.gpu
        if event.action == "add":
            if self._wedged:
                systemd.log(systemd.NOTICE, f"{event.node} is there again", PVRD_DEVICE="gpu")
                self._wedged = ""
            elif gpu.state == "absent":
                gpu.wake()  # it may be the one that was missing
        elif gpu.state != "absent" and self._ours(event, gpu):
            way = f" (to mend it: {', '.join(event.recovery)})" if event.recovery else ""
            self._wedged = (
                f"{event.node or event.parent} was removed"
                if event.action == "remove"
                else f"the kernel says that the GPU hung{way}"
            )
            gpu.rest(self._wedged, kill=True, blame=event.action == "wedged")
            self.decide()
            if event.action == "wedged" and not event.recovery:
                self._wedged = ""  # its driver has reset it by itself: tried again in a while
        self.news()

    def _ours(self, event: DeviceEvent, gpu: Worker) -> bool:
        """Is it the GPU that the worker has, or had? Where no node is known every GPU may be."""
        if self._nodes:
            return event.node in self._nodes or event.parent in {_parent(n) for n in self._nodes}
        return not (gpu.device or {}).get("software")


def open_nodes(pid: int) -> set[str]:
    """The DRM nodes that a process has open; none where /proc does not tell."""
    found = set()
    with contextlib.suppress(OSError):
        for name in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                target = os.readlink(f"/proc/{pid}/fd/{name}")
                if target.startswith("/dev/dri/"):
                    found.add(target.removesuffix(" (deleted)"))
    return found


def _parent(node: str) -> str:
    """The device behind a node, as events name it: 0000:01:00.0."""
    return os.path.basename(os.path.realpath(f"/sys/class/drm/{os.path.basename(node)}/device"))
