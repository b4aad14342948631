# SPDX-License-Identifier: Apache-2.0
"""Reading a property of pvrd (State) while both its workers have all the work that they take.

    python -m benchmarks.qos_control [--quick] [--json] [--threads N] [--rounds N]

Each read is followed by a call that the bus answers itself (GetId), so both meet the same load. The
way of a read is client, bus, pvrd, bus, client; of the other one client, bus, client: what a read
takes beyond it is pvrd's, and the bus's once more. The GPU worker has a software device, where
there is one. Rounds of pvrd idle, then saturated; each one's figures go to stderr. Rows are medians
of the rounds:

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
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks import common
from benchmarks.qos_weston import pvrd, working
from pvrd.bus import BUS, BUS_PATH, PROPERTIES, BusAddress, Connection
from pvrd.client import Client

TARGET_MS = 5.0
READS, PAUSE_S = 400, 0.01
ROUNDS = 5
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


def one_round(env: dict[str, str], kinds: list[str]) -> tuple[Reading, Reading]:
    """Idle, then with these workers saturated."""
    address = env["PVRD_BUS"]
    idle = asyncio.run(read(address, READS))
    with contextlib.ExitStack() as stack:
        for kind in kinds:
            stack.enter_context(working(env, kind))
        return idle, asyncio.run(read(address, READS))


def control(args: argparse.Namespace, folder: Path) -> Iterator[common.Row]:
    """All rounds."""
    idle: list[Reading] = []
    busy: list[Reading] = []
    with pvrd(folder / "both", True, args.threads) as env:
        with Client(env["PVRD_BUS"]) as client:
            devices = client.properties()["Devices"]
        kinds = sorted(str(device["kind"]) for device in devices if device.get("present"))
        for _ in range(1 if args.quick else args.rounds):
            both = one_round(env, kinds)
            for what, runs, one in zip(("idle", "busy"), (idle, busy), both, strict=True):
                runs.append(one)
                said = f"p99 {one.ours.p99:.2f} ms, of GetId {one.bus.p99:.2f} ms"
                print(f"{what}: {said}, load {os.getloadavg()[0]:.1f}", file=sys.stderr, flush=True)
    yield from rows(idle, busy, " and ".join(kinds))


def rows(idle: list[Reading], busy: list[Reading], label: str) -> list[common.Row]:
    """Medians of the rounds."""

    def middle(runs: list[Reading], figure: Callable[[Reading], float]) -> float:
        return statistics.median(figure(run) for run in runs)

    p99, median = middle(busy, lambda r: r.ours.p99), middle(busy, lambda r: r.ours.median)
    bus = middle(busy, lambda r: r.bus.p99)
    name, middles = f"property p99, {label} busy", f"property median, {label} busy"
    beside = "GetId of the bus, same time"
    return [
        common.row(name, "ms", p99, TARGET_MS, "target"),
        common.row(name, "ms", p99, middle(idle, lambda r: r.ours.p99), "idle"),
        common.row(name, "ms", p99, bus, beside),
        common.row(
            f"GetId p99, {label} busy", "ms", bus, middle(idle, lambda r: r.bus.p99), "idle"
        ),
        common.row(middles, "ms", median, middle(idle, lambda r: r.ours.median), "idle"),
        common.row(middles, "ms", median, middle(busy, lambda r: r.bus.median), beside),
        common.row(
            "wait for a CPU, mean", "ms", middle(busy, lambda r: r.our_wait),
            middle(busy, lambda r: r.bus_wait), "the bus",
        ),
    ]  # fmt: skip


def measure(args: argparse.Namespace) -> list[common.Row]:
    with tempfile.TemporaryDirectory(prefix="qos-") as name:
        return list(control(args, Path(name)))


def facts() -> dict[str, str]:
    return {"load average": " ".join(f"{x:.1f}" for x in os.getloadavg())}


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"of all reads ({ROUNDS})")


if __name__ == "__main__":
    sys.exit(common.main((__doc__ or "").splitlines()[0], measure, options, facts))
