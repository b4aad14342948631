# SPDX-License-Identifier: Apache-2.0
"""Reading a property of pvrd (State) while both its workers have all the work that they take.

    python -m benchmarks.qos_control [--quick] [--json] [--threads N]

Each read is followed by a call that the bus answers itself (GetId), so both meet the same load. The
way of a read is client, bus, pvrd, bus, client; of the other one client, bus, client: what a read
takes beyond it is pvrd's, and the bus's once more. The GPU worker has a software device, where
there is one. Rows:

    property p99      against the target of 5 ms, against pvrd idle, against GetId beside it
    GetId p99         against itself while pvrd was idle: what the machine's load does to others
    property median   against pvrd idle
    wait for a CPU    of pvrd's control process, each time that it has something to do: the mean,
                      as the kernel counts it (/proc/PID/schedstat), against the bus's
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks import common
from benchmarks.qos_weston import pvrd, working
from pvrd.bus import BUS, BUS_PATH, PROPERTIES, BusAddress, Connection

TARGET_MS = 5.0
READS, PAUSE_S = 200, 0.01
NAME, PATH = "org.pvrd.Pvrd1", "/org/pvrd/Pvrd1"


@dataclass(frozen=True)
class Times:
    """Milliseconds of one kind of call, sorted."""

    ms: list[float]

    @property
    def p99(self) -> float:
        return self.ms[min(len(self.ms) - 1, len(self.ms) * 99 // 100)]

    @property
    def median(self) -> float:
        return statistics.median(self.ms)


@dataclass(frozen=True)
class Reading:
    """A run of reads: of pvrd's property, of the bus itself; mean waits for a CPU in ms."""

    ours: Times
    bus: Times
    our_wait: float
    bus_wait: float


def waits(pid: int) -> tuple[int, int]:
    """Nanoseconds that a process's main thread waited for a CPU, and how often it got one."""
    _, waited, times = Path(f"/proc/{pid}/schedstat").read_text(encoding="ascii").split()
    return int(waited), int(times)


def mean_wait(before: tuple[int, int], after: tuple[int, int]) -> float:
    """Milliseconds a time, between two of these."""
    return (after[0] - before[0]) / 1e6 / max(1, after[1] - before[1])


async def read(address: str, reads: int) -> Reading:
    """Reads so many times, with pauses."""
    connection = await Connection.connect(BusAddress.parse(address))
    pids = []
    for name in (NAME, BUS):
        told = await connection.call(BUS, BUS_PATH, BUS, "GetConnectionUnixProcessID", "s", [name])
        pids.append(int(told.body[0]))
    before = [waits(pid) for pid in pids]
    ours, theirs = [], []
    for _ in range(reads):
        begin = time.perf_counter()
        body = [f"{NAME}.Manager", "State"]
        (await connection.call(NAME, PATH, PROPERTIES, "Get", "ss", body)).close()
        middle = time.perf_counter()
        (await connection.call(BUS, BUS_PATH, BUS, "GetId")).close()
        theirs.append(1e3 * (time.perf_counter() - middle))
        ours.append(1e3 * (middle - begin))
        await asyncio.sleep(PAUSE_S)
    found = [mean_wait(a, waits(pid)) for a, pid in zip(before, pids, strict=True)]
    connection.close()
    return Reading(Times(sorted(ours)), Times(sorted(theirs)), *found)


def control(args: argparse.Namespace, folder: Path) -> Iterator[common.Row]:
    """Idle, then with both workers saturated."""
    reads = READS if args.quick else 10 * READS
    with contextlib.ExitStack() as stack:
        env = stack.enter_context(pvrd(folder / "both", True, args.threads))
        address = env["PVRD_BUS"]
        idle = asyncio.run(read(address, reads))
        stack.enter_context(working(env, "cpu"))
        label = "cpu"
        with contextlib.suppress(SystemExit):
            stack.enter_context(working(env, "gpu"))
            label = "cpu and gpu"
        busy = asyncio.run(read(address, reads))
    name = f"property p99, {label} busy"
    yield common.row(name, "ms", busy.ours.p99, TARGET_MS, "target")
    yield common.row(name, "ms", busy.ours.p99, idle.ours.p99, "idle")
    yield common.row(name, "ms", busy.ours.p99, busy.bus.p99, "GetId of the bus, same time")
    yield common.row(f"GetId p99, {label} busy", "ms", busy.bus.p99, idle.bus.p99, "idle")
    name = f"property median, {label} busy"
    yield common.row(name, "ms", busy.ours.median, idle.ours.median, "idle")
    yield common.row(name, "ms", busy.ours.median, busy.bus.median, "GetId of the bus, same time")
    yield common.row("wait for a CPU, mean", "ms", busy.our_wait, busy.bus_wait, "the bus")


def measure(args: argparse.Namespace) -> list[common.Row]:
    with tempfile.TemporaryDirectory(prefix="qos-") as name:
        return list(control(args, Path(name)))


def facts() -> dict[str, str]:
    return {"load average": " ".join(f"{x:.1f}" for x in os.getloadavg())}


if __name__ == "__main__":
    sys.exit(common.main((__doc__ or "").splitlines()[0], measure, facts=facts))
