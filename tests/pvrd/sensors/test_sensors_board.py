# SPDX-License-Identifier: Apache-2.0
"""All sensors together: what is unknown says why, and an idle daemon sleeps."""

from __future__ import annotations

import asyncio
import os
import selectors
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pvrd.config import KEYS, Config
from pvrd.sensors import Compositor, Sensors, udev
from pvrd.sensors.compositor import FRESH_S


@pytest.fixture(autouse=True)
def _no_system_bus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DBUS_SYSTEM_BUS_ADDRESS", "unix:path=/nonexistent")


def board(on_change: Any = lambda: None, **changed: Any) -> Sensors:
    values = {key: rule.default for key, rule in KEYS.items()}
    values |= {key.replace("__", "."): value for key, value in changed.items()}
    nowhere: Any = SimpleNamespace(address=None)
    return Sensors(nowhere, Config(values), on_change)


def test_what_is_absent_is_unknown_and_says_why() -> None:
    async def act() -> None:
        sensors = board()
        await sensors.start()
        snapshot = sensors.snapshot(
            time.monotonic(), canary=1.5, holds=["a game"], wedged=True
        )
        assert snapshot.idle is snapshot.missed_per_s is None
        why = "the system bus at /nonexistent does not answer: No such file or directory"
        assert snapshot.unknown["idle"] == snapshot.unknown["session_active"] == why
        assert snapshot.unknown["missed_per_s"] == "no pvr-agent reports"
        assert (snapshot.canary, snapshot.holds) == (1.5, ("a game",))
        assert snapshot.sources["canary"] == "the GPU worker"
        assert (snapshot.wedged, snapshot.sleeping) == (True, False)
        for row in sensors.describe():
            assert set(row) == {"name", "value", "source", "unit"}
            assert row["source"]
        names = [row["name"] for row in sensors.describe()]
        assert len(names) == len(set(names))
        assert not set(snapshot.sources) & set(snapshot.unknown)
        assert not await sensors.logind.inhibit()
        await sensors.stop()

    asyncio.run(act())


def test_no_sensor_is_read_when_it_says_so() -> None:
    async def act() -> None:
        sensors = board(sensors__system=False)
        before = len(os.listdir("/proc/self/fd"))
        await sensors.start()
        sensors.work(True)
        assert len(os.listdir("/proc/self/fd")) == before
        snapshot = sensors.snapshot(1.0)
        assert snapshot.psi_cpu is None
        rows = {row["name"]: row for row in sensors.describe()}
        assert rows["system"]["source"] == "sensors.system is false"
        await sensors.stop()

    asyncio.run(act())


def test_fdinfo_is_off_by_its_key() -> None:
    async def act() -> None:
        sensors = board(sensors__fdinfo=False)
        await sensors.start()
        await sensors.refresh()
        row = next(r for r in sensors.describe() if r["name"] == "others_gpu")
        assert (row["value"], row["source"]) == ("unknown", "sensors.fdinfo is false")
        await sensors.stop()

    asyncio.run(act())


def test_what_work_needs_ends_with_it() -> None:
    async def act() -> None:
        before = len(os.listdir("/proc/self/fd"))
        sensors = board()
        await sensors.start()
        for _ in range(3):
            sensors.work(True)
            sensors.work(True)
            await sensors.refresh()
            sensors.work(False)
            assert sensors.pressure.watching == []
        sensors.work(True)
        await sensors.stop()
        await asyncio.get_running_loop().shutdown_default_executor()
        del sensors
        assert len(os.listdir("/proc/self/fd")) == before
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(act())


class Counting(selectors.DefaultSelector):
    """Counts how often the loop wakes."""

    woken = 0

    def select(self, timeout: float | None = None) -> Any:
        got = super().select(timeout)
        self.woken += 1
        return got


def test_an_idle_daemon_sleeps() -> None:
    """Its loop wakes less than once a second; a slow machine makes that fewer, not more."""
    selector = Counting()

    async def wakes(seconds: float) -> int:
        before = selector.woken
        await asyncio.sleep(seconds)
        return selector.woken - before - 1  # our own sleep's end

    async def act() -> None:
        changes: list[int] = []
        sensors = board(lambda: changes.append(1))
        await sensors.start()
        await sensors.refresh()
        await asyncio.sleep(0.1)
        assert await wakes(3.0) < 3
        await sensors.stop()

    with asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(selector)) as runner:
        runner.run(act())


@pytest.mark.bus
def test_an_idle_daemon_takes_no_time(start: Any, caller: Any) -> None:
    """The whole daemon with its two workers: it sleeps, as the kernel counts it."""
    daemon = start({"sensors.system": True})
    caller.call("GetStatistics")

    def switches() -> int:
        lines = Path(f"/proc/{daemon.process.pid}/status").read_text().splitlines()
        (line,) = [x for x in lines if x.startswith("voluntary_ctxt_switches")]
        return int(line.split()[1])

    def window() -> int:
        before = switches()
        time.sleep(3.0)
        return switches() - before

    # The start and the call may still settle; what wakes by the clock is in every window.
    counted: list[int] = []
    while len(counted) < 6 and not (counted and counted[-1] < 3):
        counted.append(window())
    assert counted[-1] < 3, counted


def test_without_udevd_the_kernel_is_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    for group, hears in ((0, False), (2, True)):
        with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 15) as sock:
            sock.bind((0, group))
            assert udev._hears(sock.fileno()) is hears

    async def act() -> None:
        watch = udev.Udev(lambda event: None, lambda: None, lambda: None)
        assert watch.absent == "it was not started"
        monkeypatch.setattr(udev, "_hears", lambda fd: False)
        watch.start()
        assert (watch.source, watch.absent) == ("the kernel, without udevd", "")
        watch.stop()
        watch.stop()
        assert watch.absent == "it was stopped"

    asyncio.run(act())


# -- what agents report


def test_a_report_counts_for_a_while() -> None:
    store = Compositor(lambda: 1000)
    told = {"missed_per_s": 2, "latency_ms": 9.5, "refresh_hz": 60.0, "compositor": "weston",
            "others_gpu": None}  # fmt: skip
    assert store.report(":1.9", 1000, told, 100.0)
    got = {r.name: (r.value, r.source) for r in store.readings(100.0)}
    assert got == {
        "missed_per_s": (2.0, "pvr-agent, weston"), "latency_ms": (9.5, "pvr-agent, weston"),
        "refresh_hz": (60.0, "pvr-agent, weston"),
    }  # fmt: skip
    late = store.readings(100.0 + FRESH_S + 0.1)
    assert {r.value for r in late} == {None}
    assert late[0].source == "the agent of the active session has been silent for too long"
    store.report(":1.9", 1000, {**told, "valid_s": 60}, 100.0)
    assert store.readings(150.0)[0].value == 2.0
    store.gone(":1.9")
    store.gone(":1.9")
    assert store.readings(150.0)[0].source == "no pvr-agent reports"


def test_why_an_agent_knows_nothing() -> None:
    store = Compositor(lambda: 1000)
    store.report(":1.9", 1000, {"reason": "an X11 session", "others_gpu": 0.25}, 0.0)
    got = {r.name: (r.value, r.source) for r in store.readings(0.0)}
    assert got["missed_per_s"] == (None, "an X11 session")
    assert got["others_gpu"] == (0.25, "pvr-agent")


def test_whom_to_believe() -> None:
    active: list[int | None] = [1000]
    store = Compositor(lambda: active[0])
    assert not store.report(":1.1", 1001, {"missed_per_s": 60}, 0.0)
    assert store.readings(0.0)[0].source == "no agent of the active session reports"
    active[0] = 1001  # the user was switched
    assert store.readings(0.0)[0].value == 60.0
    active[0] = None  # no logind: our own user
    assert store.report(":1.2", os.geteuid(), {"missed_per_s": 1}, 0.0)
    assert store.readings(0.0)[0].value == 1.0
    assert store.agents() == 2


@pytest.mark.parametrize(
    "told",
    [{"missed_per_s": -1}, {"latency_ms": "fast"}, {"refresh_hz": float("nan")},
     {"others_gpu": 1.5}, {"valid_s": 1e9}, {"missed_per_s": True}],
)  # fmt: skip
def test_a_report_that_makes_no_sense(told: dict[str, Any]) -> None:
    store = Compositor(lambda: 1000)
    with pytest.raises(ValueError, match=r"is a number|lies in 0 to"):
        store.report(":1.1", 1000, told, 0.0)
    assert store.agents() == 0


def test_words_of_an_agent_are_cut_and_cleaned() -> None:
    store = Compositor(lambda: 1000)
    store.report(":1.1", 1000, {"reason": "a\nb\x1b[31m" + "x" * 500}, 0.0)
    source = store.readings(0.0)[0].source
    assert source.isprintable()
    assert len(source) <= 200


def test_no_file_of_the_package_is_a_surprise() -> None:
    """pvrctl and the daemon import it: neither the engine nor libudev comes with it."""
    code = "import sys, pvrd.sensors; print([m for m in sys.modules if m in ('engine', 'pyudev')])"
    out = subprocess.run(
        [sys.executable, "-c", code], cwd=Path(__file__).parents[3], capture_output=True,
        text=True, check=True,
    )  # fmt: skip
    assert out.stdout.strip() == "[]"
