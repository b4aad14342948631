# SPDX-License-Identifier: Apache-2.0
"""How much of our GPU's time other programs take, from DRM's fdinfo.

Source: the kernel's Documentation/gpu/drm-usage-stats.rst. Each open DRM file tells in
/proc/PID/fdinfo/FD how long its client kept each engine busy. Files that share a client (dup, fork,
passed on) have one drm-client-id and count once. The share is that of the busiest engine.

Reading another user's fdinfo needs CAP_SYS_PTRACE, which the service does not have: then the value
is unknown, and pvr-agent may tell what the programs of its session take.
"""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from pvrd.sensors.reading import Reading, entries, text, unknown

# Drivers whose fdinfo is left alone: name -> (kernels before this, or None for all; why).
BREAKS: Mapping[str, tuple[tuple[int, int] | None, str]] = {
    "pvrsrvkm": (None, "reading fdinfo made the vendor's kernel module panic"),
    "amdgpu": ((6, 5), "fdinfo dereferences NULL on 5.19 (amdgpu_bo_get_memory), and races with a "
                       "process that ends; older ones have another form"),
    "panthor": ((6, 15), "fdinfo reads groups that may be gone (CVE-2025-22100)"),
    "nvidia": (None, "the proprietary driver tells no engine's time in fdinfo"),
    "nvidia-drm": (None, "the proprietary driver tells no engine's time in fdinfo"),
    "powervr": (None, "the driver tells no engine's time in fdinfo"),
}  # fmt: skip
LOOK_ANEW_S = 10.0  # how often all processes are searched for new clients
STALE_S = 10.0
_SHORTEST_S, _LONGEST_S = 0.2, 30.0  # a window that says something of now
_KEY = re.compile(r"drm-(engine-capacity|engine|total-cycles|cycles)-(.+)")


@dataclass(frozen=True)
class Gpu:
    """A render node and the device behind it."""

    node: str  # /dev/dri/renderD128
    parent: str  # 0000:01:00.0, or a platform device's name
    driver: str
    nodes: frozenset[str]  # all nodes of the device: card0, renderD128


@dataclass(frozen=True)
class Engine:
    """What a client kept one engine busy with, since it began."""

    busy: int  # ns, or cycles
    total: int = 0  # cycles of the engine itself; 0: busy is in ns
    capacity: int = 1


@dataclass(frozen=True)
class Client:
    """One client's fdinfo."""

    driver: str
    pdev: str
    number: str
    engines: Mapping[str, Engine]


def find_gpus(base: Path = Path("/sys/class/drm")) -> list[Gpu]:
    """The render nodes of the machine."""
    found: dict[Path, list[str]] = {}
    for entry in entries(base):
        if re.fullmatch(r"(card|renderD)\d+", entry.name):
            found.setdefault((entry / "device").resolve(), []).append(f"/dev/dri/{entry.name}")
    gpus = []
    for device, nodes in found.items():
        render = [n for n in nodes if "renderD" in n]
        if render:
            driver = _link(device / "driver").rpartition("/")[2]
            gpus.append(Gpu(render[0], device.name, driver, frozenset(nodes)))
    return gpus


def parse(content: str) -> Client | None:
    """A client out of a fdinfo file; None when it is no DRM client's."""
    values: dict[str, str] = {}
    numbers: dict[str, dict[str, int]] = {}
    for line in content.splitlines():
        key, colon, value = line.partition(":")
        if not colon or not key.startswith("drm-"):
            continue
        value = value.strip()
        match = _KEY.fullmatch(key)
        if match is None:
            values[key] = value
        elif re.fullmatch(r"[0-9]{1,20}( .*)?", value):
            numbers.setdefault(match[2], {})[match[1]] = int(value.split()[0])
    if "drm-driver" not in values or "drm-client-id" not in values:
        return None
    engines = {}
    for name, told in numbers.items():
        capacity = max(1, told.get("engine-capacity", 1))
        if "engine" in told:
            engines[name] = Engine(told["engine"], 0, capacity)
        elif "cycles" in told and told.get("total-cycles"):
            engines[name] = Engine(told["cycles"], told["total-cycles"], capacity)
    return Client(
        values["drm-driver"], values.get("drm-pdev", ""), values["drm-client-id"], engines
    )


def share(before: Mapping[str, Client], after: Mapping[str, Client], seconds: float) -> float:
    """The busiest engine's share in all clients between two looks, 0..1.

    A client that is in one look alone does not count: how long it had been there is not known.
    """
    busy: dict[str, float] = {}
    for key, now in after.items():
        past = before.get(key)
        if past is None:
            continue
        for name, engine in now.engines.items():
            old = past.engines.get(name)
            if old is None or engine.busy < old.busy:  # the counter began anew
                continue
            window = float(engine.total - old.total) if engine.total else seconds * 1e9
            if window > 0:
                part = (engine.busy - old.busy) / window / engine.capacity
                busy[name] = busy.get(name, 0.0) + part
    return min(1.0, max(busy.values(), default=0.0))


@dataclass
class _Look:
    clients: dict[str, Client] = field(default_factory=dict)
    hidden: int = 0  # processes that may not be looked into


class Fdinfo:
    """Looks at other programs' fdinfo. `read` may take a while: call it beside the loop."""

    def __init__(
        self,
        proc: Path = Path("/proc"),
        base: Path = Path("/sys/class/drm"),
        kernel: str | None = None,
    ) -> None:
        self._proc = proc
        self._base = base
        self._kernel = _version(platform.release() if kernel is None else kernel)
        self._own: frozenset[int] = frozenset()
        self._wanted = ""
        self._files: list[str] = []  # fdinfo files of our GPU's clients, as they were found
        self._hidden = 0
        self._looked_s: float | None = None
        self._last: tuple[float, dict[str, Client]] | None = None
        self._result: Reading = unknown("others_gpu", "it is read while work runs", "share")
        self._time_s = 0.0

    def own(self, pids: Iterable[int], node: str = "") -> None:
        """The processes that are ours, and our GPU's render node when that is known."""
        self._own, self._wanted = frozenset(pids), node
        self._looked_s = None

    def forget(self) -> None:
        """The next value needs two looks again."""
        self._last = None
        self._looked_s = None
        self._result = unknown("others_gpu", "it is read while work runs", "share")

    def readings(self, now: float) -> list[Reading]:
        """others_gpu: the share of our GPU's time that other programs take, 0..1."""
        if self._result.value is not None and now - self._time_s > STALE_S:
            return [unknown("others_gpu", "it is read while work runs", "share")]
        return [self._result]

    def read(self, now: float) -> None:
        """Looks once; the share is known from the second look on."""
        gpu, why = self._gpu()
        if gpu is None or (why := self._breaks(gpu)):
            self._result = unknown("others_gpu", why, "share")
            self._last = None
            return
        if self._looked_s is None or now - self._looked_s >= LOOK_ANEW_S:
            self._search(gpu)
            self._looked_s = now
        clients = self._clients(gpu)
        if not clients and self._hidden:
            self._last = None
            self._result = unknown(
                "others_gpu",
                "no permission to read other users' /proc/*/fdinfo (CAP_SYS_PTRACE)", "share",
            )  # fmt: skip
            return
        last = self._last
        if last is not None and now - last[0] < _SHORTEST_S:
            return
        self._last = (now, clients)
        if last is None or now - last[0] > _LONGEST_S:
            self._result = unknown("others_gpu", "it takes two looks; this was the first", "share")
            return
        value = share(last[1], clients, now - last[0])
        source = f"fdinfo of {gpu.node}, {len(clients)} clients"
        if self._hidden:
            source += f", {self._hidden} processes unreadable"
        self._result = Reading("others_gpu", round(value, 4), source, "share")
        self._time_s = now

    # -- which files

    def _gpu(self) -> tuple[Gpu | None, str]:
        gpus = find_gpus(self._base)
        if not gpus:
            return None, f"{self._base} has no render node"
        wanted = {self._wanted} if self._wanted else self._opened()
        ours = [g for g in gpus if g.nodes & wanted] if wanted else gpus
        if len(ours) == 1:
            return ours[0], ""
        return None, f"which of {len(gpus)} GPUs is ours is not known"

    def _opened(self) -> set[str]:
        """The nodes that our own processes have open."""
        found = set()
        for pid in self._own:
            for fd in entries(self._proc / str(pid) / "fd"):
                target = _link(fd)
                if target.startswith("/dev/dri/"):
                    found.add(target)
        return found

    def _breaks(self, gpu: Gpu) -> str:
        before, why = BREAKS.get(gpu.driver, ((0, 0), ""))
        if before is not None and self._kernel >= before:
            return ""
        return f"off for the driver {gpu.driver}: {why}"

    def _search(self, gpu: Gpu) -> None:
        # Thousands of fds: strings, and no objects for their paths.
        self._files = []
        self._hidden = 0
        try:
            numbers = [name for name in os.listdir(self._proc) if name.isdecimal()]
        except OSError:
            numbers = []
        if "1" not in numbers:
            self._hidden = 1  # ProtectProc=, hidepid=: others are not even listed
        for number in numbers:
            if int(number) in self._own:
                continue
            folder = f"{self._proc}/{number}"
            try:
                with os.scandir(f"{folder}/fd") as fds:
                    found = [fd.name for fd in fds if _link(fd.path) in gpu.nodes]
            except PermissionError:
                self._hidden += 1
                continue
            except OSError:
                continue  # it ended meanwhile
            self._files += [f"{folder}/fdinfo/{fd}" for fd in found]

    def _clients(self, gpu: Gpu) -> dict[str, Client]:
        clients: dict[str, Client] = {}
        for path in self._files:
            content = text(Path(path))
            if content is None:
                continue  # closed, or its process ended
            client = parse(content)
            if client is not None and client.pdev in ("", gpu.parent):
                clients[client.number] = client
        return clients


def _link(path: Path | str) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return ""


def _version(release: str) -> tuple[int, int]:
    match = re.match(r"(\d+)\.(\d+)", release)
    return (int(match[1]), int(match[2])) if match else (0, 0)
