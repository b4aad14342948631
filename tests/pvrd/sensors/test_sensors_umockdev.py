# SPDX-License-Identifier: Apache-2.0
"""udev and /sys through the real sensors, in umockdev's testbed: testbed.py plays the scenes."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

TESTBED = Path(__file__).with_name("testbed.py")


def play(scene: str) -> list[dict[str, Any]]:
    if shutil.which("umockdev-wrapper") is None:
        pytest.fail("umockdev is missing; tools/install/packages check installs it")
    result = subprocess.run(
        ["umockdev-wrapper", sys.executable, str(TESTBED), scene],
        env={**os.environ, "DBUS_SYSTEM_BUS_ADDRESS": "unix:path=/nonexistent"},
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    return [json.loads(line) for line in result.stdout.splitlines()]


def test_a_battery_runs_down() -> None:
    full, unplugged, low, charging = play("battery")
    assert (full["battery"], full["on_battery"]) == (100.0, False)
    assert (unplugged["battery"], unplugged["on_battery"]) == (100.0, True)
    assert (low["battery"], low["on_battery"]) == (19.0, True)
    assert (charging["battery"], charging["on_battery"]) == (19.0, False)
    assert low["sources"]["battery"] == "/sys/class/power_supply: AC, BAT0"  # not the mouse


@pytest.mark.bus
def test_a_battery_runs_down_as_upower_sees_it() -> None:
    files, low = play("upower")
    assert files["sources"]["battery"] == "/sys/class/power_supply: AC, BAT0"
    assert (low["battery"], low["on_battery"]) == (18.0, True)
    assert low["sources"] == {"battery": "UPower", "on_battery": "UPower"}


def test_a_zone_heats_up_past_its_trip() -> None:
    cool, hot = play("thermal")
    assert (cool["temperature_c"], cool["margin_c"]) == (50.0, 25.0)
    assert (hot["temperature_c"], hot["margin_c"]) == (78.0, -3.0)
    assert hot["sources"]["margin_c"] == "/sys/class/thermal/thermal_zone1 (gpu-thermal)"


def test_a_gpu_is_wedged_leaves_and_comes_back() -> None:
    events = play("gpu")
    render = "/dev/dri/renderD128"
    assert [(e["action"], e["node"]) for e in events] == [
        ("add", "/dev/dri/card0"), ("add", render), ("wedged", "/dev/dri/card0"),
        ("wedged", "/dev/dri/card0"), ("remove", render), ("add", render),
    ]  # fmt: skip
    assert [e["recovery"] for e in events[2:4]] == [[], ["rebind", "bus-reset"]]
    assert {(e["parent"], e["driver"]) for e in events} == {("fd000000.gpu", "powervr")}


def test_fdinfo_is_off_for_a_driver_that_tells_nothing() -> None:
    (row,) = play("busy")
    assert row["driver"] == "powervr"
    assert row["source"].startswith("off for the driver powervr")
