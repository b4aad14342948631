# SPDX-License-Identifier: Apache-2.0
"""A worker that computes on CPUs as a neighbour of the desktop: which cores it takes, and how it
stands back. The worker of a GPU in software is one.

Everything here can be undone by the worker itself, or it is not done. SCHED_BATCH, the I/O class,
the affinity and the nice value of the worker's session need no right to come and go. A raised nice
value and SCHED_IDLE can be left again only where RLIMIT_NICE allows nice 0 (the units have
LimitNICE=+0) or with CAP_SYS_NICE, so without those a worker keeps its nice value and takes
SCHED_BATCH for the lowest priorities, too.

The kernel shares time between groups before it does within one, and a thread's class and nice value
count within its group alone. Units are such groups: the cgroup's cpu.weight and io.weight are the
unit's (CPUWeight=, IOWeight=); they follow the running job only where the cgroup was delegated to
the worker and holds nobody else. Outside of such cgroups each session is one (autogroup, sched(7)),
with a nice value of its own; pvrd starts workers in sessions of their own.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import resource
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pvrd.promptness import AUTOGROUP
from pvrd.scheduler import level

SYS = Path("/sys/devices/system/cpu")
BIG = 0.5  # of the largest capacity: less is a little core
CAP_SYS_NICE = 23
_IOPRIO_SET = {"x86_64": 251, "aarch64": 30, "riscv64": 30}
_IOPRIO_PROCESS = 1
_BEST_EFFORT, _IO_IDLE = 2, 3


@dataclass(frozen=True)
class Stand:
    """How a level stands among other programs' threads."""

    policy: int  # SCHED_OTHER, SCHED_BATCH, SCHED_IDLE
    nice: int
    io_class: int
    io_level: int  # 0-7, of the best-effort class
    cpu_weight: str
    io_weight: str


# By level: priorities 0-3, 4-7, 8-11, 12-15.
STANDS = (
    Stand(os.SCHED_IDLE, 19, _IO_IDLE, 7, "idle", "10"),
    Stand(os.SCHED_BATCH, 5, _BEST_EFFORT, 6, "50", "50"),
    Stand(os.SCHED_BATCH, 0, _BEST_EFFORT, 4, "100", "100"),
    Stand(os.SCHED_OTHER, 0, _BEST_EFFORT, 4, "100", "100"),
)


# Of the worker's session, by level. Less than of a thread: beside one that computes, nice 3 leaves
# a third of a CPU and nice 10 a tenth; with 19 a slice that anybody waits for might take minutes.
GROUP_NICE = (10, 3, 0, 0)


@dataclass(frozen=True)
class Cores:
    """Which CPUs work runs on, and how many threads."""

    cpus: frozenset[int]
    threads: int


def capacities(cpus: frozenset[int], root: Path = SYS) -> dict[int, int]:
    """The capacity of each CPU as the kernel knows it; all the same where it does not say."""
    out = {}
    for cpu in cpus:
        try:
            out[cpu] = int((root / f"cpu{cpu}/cpu_capacity").read_text(encoding="ascii"))
        except (OSError, ValueError):
            return dict.fromkeys(cpus, 1024)
    return out


def siblings(cpus: frozenset[int], root: Path = SYS) -> list[frozenset[int]]:
    """The CPUs core by core."""
    cores: set[frozenset[int]] = set()
    for cpu in cpus:
        try:
            text = (root / f"cpu{cpu}/topology/thread_siblings_list").read_text(encoding="ascii")
            cores.add(frozenset(_numbers(text)) & cpus or frozenset({cpu}))
        except (OSError, ValueError):
            cores.add(frozenset({cpu}))
    return sorted(cores, key=min)


def _numbers(text: str) -> list[int]:
    out: list[int] = []
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        out += range(int(first), int(last or first) + 1)
    return out


def choose(allowed: frozenset[int], wanted: int = 0, reserve: int = 1, root: Path = SYS) -> Cores:
    """The big cores, one thread each; with more than two cores `reserve` of them stay free, little
    ones where there are enough. `wanted`: so many threads instead, on as many CPUs as they need.
    """
    strength = capacities(allowed, root)
    cores = siblings(allowed, root)
    power = {core: max(strength[cpu] for cpu in core) for core in cores}
    best = max(power.values())
    big = [core for core in cores if power[core] >= BIG * best]
    left = len(cores) - len(big)
    if len(cores) > 2 and left < reserve:
        # The last ones: the first core often has the interrupts and the boot's leftovers alike.
        big = sorted(big, key=lambda core: (-power[core], min(core)))
        big = big[: max(1, len(big) - (reserve - left))]
    even = len(set(strength.values())) == 1
    # On even cores the kernel's balancing knows better than a fixed choice.
    cpus = allowed if even else frozenset[int]().union(*big)
    threads = len(big)
    if wanted > 0:
        threads = min(wanted, len(allowed))
        if threads > len(cpus):
            cpus = allowed
    return Cores(cpus, threads)


def reversible(status: str, limit: int, nice: int) -> bool:
    """Can this process come back to `nice` from a higher value, and from SCHED_IDLE? status: of
    /proc/self/status; limit: RLIMIT_NICE.
    """
    for line in status.splitlines():
        if line.startswith("CapEff:") and int(line.split()[1], 16) >> CAP_SYS_NICE & 1:
            return True
    return limit < 0 or limit >= 20 - nice


def own_cgroup(proc: Path = Path("/proc"), root: Path = Path("/sys/fs/cgroup")) -> Path | None:
    """This process's cgroup, if it was delegated to it and it is alone there."""
    try:
        lines = (proc / "self/cgroup").read_text(encoding="utf-8").splitlines()
        path = next(line.partition("::")[2] for line in lines if line.startswith("0::"))
        folder = root / path.lstrip("/")
        members = (folder / "cgroup.procs").read_text(encoding="ascii").split()
    except (OSError, StopIteration, UnicodeDecodeError):
        return None
    alone = members == [str(os.getpid())]
    return folder if alone and os.access(folder / "cpu.weight", os.W_OK) else None


def group_nice() -> int | None:
    """The nice value of this process's session, if it leads that and the kernel groups sessions."""
    try:
        said = AUTOGROUP.read_text(encoding="ascii")
        return int(said.split()[-1]) if os.getsid(0) == os.getpid() else None
    except (OSError, ValueError, IndexError):
        return None


class Neighbour:
    """Makes all threads of this process stand as the running job's priority says."""

    def __init__(self) -> None:
        self._level = -1
        self._group = self._wanted = self._usual = group_nice()
        self._nice = os.getpriority(os.PRIO_PROCESS, 0)
        try:
            status = Path("/proc/self/status").read_text(encoding="utf-8", errors="replace")
        except OSError:
            status = ""
        limit = resource.getrlimit(resource.RLIMIT_NICE)[0]
        self.reversible = reversible(status, limit, self._nice)
        self._cgroup = own_cgroup()
        self._io = _IOPRIO_SET.get(platform.machine())
        self._libc = ctypes.CDLL(None, use_errno=True)
        self.refused = False  # a sandbox that allows none of it

    def serve(self, priority: int) -> None:
        """The next slice is of a job of this priority. Cheap where nothing changes."""
        now = level(priority)
        if now != self._level and not self.refused:
            self._level = now
            stand = self.stand(now)
            for thread in self._tids():
                self._apply(int(thread), stand)
            self._weigh(stand)
            if self._usual is not None:
                self._wanted = min(19, self._usual + GROUP_NICE[now])
        if self._group != self._wanted:
            self._regroup()

    def keep_to(self, cpus: frozenset[int]) -> None:
        """Has all threads run on these CPUs alone, for a driver that made some of its own."""
        if cpus != os.sched_getaffinity(0):
            for thread in self._tids():
                with contextlib.suppress(OSError):  # it ended meanwhile, or this is refused
                    os.sched_setaffinity(int(thread), cpus)

    def stand(self, at: int) -> Stand:
        """How a level stands, as far as this process could come back from it."""
        stand = STANDS[at]
        if self.reversible:
            nice = min(19, self._nice + stand.nice)
            return Stand(stand.policy, nice, *_rest(stand))
        policy = os.SCHED_OTHER if stand.policy == os.SCHED_OTHER else os.SCHED_BATCH
        return Stand(policy, self._nice, *_rest(stand))

    @staticmethod
    def _tids() -> list[str]:
        try:
            return os.listdir("/proc/self/task")
        except OSError:
            return []

    def _apply(self, thread: int, stand: Stand) -> None:
        try:
            os.sched_setscheduler(thread, stand.policy, os.sched_param(0))
            if self.reversible:
                os.setpriority(os.PRIO_PROCESS, thread, stand.nice)
        except ProcessLookupError:
            return  # it ended meanwhile
        except PermissionError:
            self.refused = True
        if self._io is not None:
            value = stand.io_class << 13 | stand.io_level
            self._libc.syscall(self._io, _IOPRIO_PROCESS, thread, value)

    def _regroup(self) -> None:
        """Gives the session its nice value. The kernel does that ten times a second at most, for
        all: what it will not do now is done before a later slice.
        """
        try:
            fd = os.open(AUTOGROUP, os.O_WRONLY | os.O_CLOEXEC)
            try:
                os.write(fd, str(self._wanted).encode())
            finally:
                os.close(fd)
        except BlockingIOError:
            return
        except OSError:
            self._wanted = self._group  # it is refused
        self._group = self._wanted

    def _weigh(self, stand: Stand) -> None:
        if self._cgroup is None:
            return
        idle = stand.cpu_weight == "idle"
        files: Mapping[str, str] = {
            "cpu.idle": "1" if idle else "0",
            "cpu.weight": "1" if idle else stand.cpu_weight,
            "io.weight": stand.io_weight,
        }
        for name, value in files.items():
            try:
                (self._cgroup / name).write_text(value, encoding="ascii")
            except OSError:
                continue  # a controller that is not there


def _rest(stand: Stand) -> tuple[int, int, str, str]:
    return stand.io_class, stand.io_level, stand.cpu_weight, stand.io_weight
