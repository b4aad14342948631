# SPDX-License-Identifier: Apache-2.0
"""From a mocked system bus through the sensors of a real daemon to what it decides and tells."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest

from pvrd.bus import BusAddress, Connection
from pvrd.bus_values import V, plain
from pvrd.sensors import battery, logind

pytestmark = pytest.mark.bus

MOCK = "org.freedesktop.DBus.Mock"


def call(address: str, name: str, path: str, interface: str, member: str,
         signature: str = "", *body: Any) -> list[Any]:  # fmt: skip
    """One call on the mocked system bus, once the service is there; the reply's body."""

    async def once() -> list[Any]:
        connection = await Connection.connect(BusAddress.parse(address))
        async with asyncio.timeout(30):
            while await connection.name_owner(name) is None:
                await asyncio.sleep(0.02)
        reply = await connection.call(name, path, interface, member, signature, list(body))
        reply.close()
        connection.close()
        return [plain(value) for value in reply.body]

    return asyncio.run(once())


def rows(caller: Any) -> Mapping[str, Mapping[str, Any]]:
    told = plain(caller.call("GetStatistics").body[0])["sensors"]
    return {row["name"]: row for row in told}


def test_a_low_battery_makes_new_jobs_lighter(
    system: Any, start: Any, caller: Any, until: Any
) -> None:
    system.mock("logind")
    system.mock("upower", '{"OnBattery": true}')

    def display(percent: float) -> None:
        call(
            system.address, battery.UPOWER, battery.UPOWER_PATH, MOCK, "SetupDisplayDevice",
            "uuddddxxbsu", 2, 2, percent, 1.0, 2.0, 1.0, 100, 0, True, "", 1,
        )  # fmt: skip

    display(80.0)
    daemon = start({"sensors.system": True}, DBUS_SYSTEM_BUS_ADDRESS=system.address)
    # The daemon does not wait for the system bus before it is ready.
    until(lambda: rows(caller)["battery"]["value"] == 80.0, "the battery")
    seen = rows(caller)
    assert (seen["battery"]["source"], seen["on_battery"]["value"]) == ("UPower", True)
    assert caller.get("Decision")["precision"] == "full"

    def locks() -> list[Any]:
        who = system.address, logind.LOGIND, logind.MANAGER_PATH, logind.MANAGER
        return [lock[:2] + lock[3:4] for lock in call(*who, "ListInhibitors")[0]]

    assert until(locks, "the delay lock") == [["sleep", "pvrd", "delay"]]
    display(12.0)
    until(lambda: caller.get("Decision")["precision"] == "low", "low precision")
    assert "battery" in caller.get("Decision")["reason"]
    display(90.0)
    until(lambda: caller.get("Decision")["precision"] == "full", "full precision")
    # The bus goes: what it told is unknown, and the daemon goes on.
    system.close()
    until(lambda: rows(caller)["idle"]["value"] == "unknown", "no more logind")
    assert daemon.process.poll() is None


def test_values_are_plain_on_the_bus(system: Any, start: Any, caller: Any) -> None:
    start({"sensors.system": True}, DBUS_SYSTEM_BUS_ADDRESS=system.address)
    reply = caller.call("GetStatistics").body[0]["sensors"]
    assert reply.signature == "aa{sv}"
    for row in reply.value:
        assert set(row) == {"name", "value", "source", "unit"}
        assert row["value"].signature in "bdsu"
        assert row["name"] == V("s", row["name"].value)
