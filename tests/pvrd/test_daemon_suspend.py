# SPDX-License-Identifier: Apache-2.0
"""Suspend, with python-dbusmock's logind on a private system bus and fake workers."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest

from pvrd.bus import BusError
from pvrd.bus_values import V, plain
from tests.buses import started_bus
from tests.pvrd.mocks import Mocked

pytestmark = pytest.mark.bus
MANAGER = "org.freedesktop.login1.Manager"


class Logind(Mocked):
    """A mocked logind on a system bus of its own."""

    name, path = "org.freedesktop.login1", "/org/freedesktop/login1"

    def __init__(self, address: str) -> None:
        super().__init__(address, "logind")

    def locks(self) -> list[Any]:
        """Inhibitors that are held."""
        try:
            return list(self.call(MANAGER, "ListInhibitors"))
        except BusError:
            return []  # it is not there yet

    def sleep(self, on: bool) -> None:
        body = [MANAGER, "PrepareForSleep", "b", [V("b", on)]]
        self.call("org.freedesktop.DBus.Mock", "EmitSignal", "sssav", body)


@pytest.fixture(scope="module")
def logind() -> Iterator[Logind]:
    with started_bus() as bus, closing(Logind(bus.address)) as mocked:
        yield mocked


def test_suspend_parks_all_jobs_gives_the_memory_back_and_loses_nothing(
    start: Any, caller: Any, lines: Any, until: Any, logind: Logind
) -> None:
    daemon = start({"sensors.system": True}, DBUS_SYSTEM_BUS_ADDRESS=logind.address)
    caller.state("gpu")
    until(lambda: len(logind.locks()) == 1, "the delay lock")
    what, who, why, mode = logind.locks()[0][:4]
    assert (what, who, mode) == ("sleep", "pvrd", "delay")
    assert why
    streams = {
        kind: lines(caller.generate(caller.open_text(device=choice), "slow", max_tokens=300))
        for kind, choice in (("gpu", "auto"), ("cpu", "cpu"))
    }
    said: dict[str, list[Any]] = {kind: [stream.next()] for kind, stream in streams.items()}
    assert {kind: first[0]["device"] for kind, first in said.items()} == {
        "gpu": "gpu",
        "cpu": "cpu",
    }
    gpu = next(d["pid"] for d in caller.get("Devices") if d["kind"] == "gpu")
    for night in range(1, 5):  # more often than a job may end workers
        logind.sleep(True)
        until(lambda n=night: daemon.text().count("parked for suspend") == n, "all parked")
        assert not os.path.exists(f"/proc/{gpu}")
        until(lambda: logind.locks() == [], "leave to sleep")
        decision = caller.get("Decision")
        assert decision["parked"]
        assert "goes to sleep" in decision["reason"]
        assert "goes to sleep" in caller.get("Reason")
        logind.sleep(False)
        until(lambda: len(logind.locks()) == 1, "the next delay lock")
        caller.state("gpu")
        gpu = next(d["pid"] for d in caller.get("Devices") if d["kind"] == "gpu")
    for kind, stream in streams.items():
        said[kind] += stream.rest()
        tokens = [line["n"] for line in said[kind] if line["type"] == "token"]
        assert tokens == list(range(300)), kind
        assert said[kind][-1]["type"] == "end"
        assert said[kind][-1]["device"] == kind
    assert "DeviceLost" not in daemon.text()


def test_jobs_wait_while_the_system_sleeps(
    start: Any, caller: Any, lines: Any, until: Any, logind: Logind
) -> None:
    daemon = start({"sensors.system": True}, DBUS_SYSTEM_BUS_ADDRESS=logind.address)
    caller.state("gpu")
    until(lambda: len(logind.locks()) == 1, "the delay lock")  # it listens
    logind.sleep(True)
    until(lambda: "parked for suspend" in daemon.text(), "all parked")
    stream = lines(caller.generate(caller.open_text(), "hello", max_tokens=3))
    until(lambda: caller.get("Decision")["parked"], "parked")
    assert plain(caller.call("GetStatistics").body[0])["jobs"]["running"] == 0
    logind.sleep(False)
    said = stream.rest()
    assert said[0]["device"] == "gpu"
    assert said[-1]["type"] == "end"
