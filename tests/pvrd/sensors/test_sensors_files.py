# SPDX-License-Identifier: Apache-2.0
"""Sensors that read files of /proc and /sys, in folders of the test's own."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pvrd.sensors.battery import Battery, Supplies, read_supplies
from pvrd.sensors.drm import parse, share
from pvrd.sensors.pressure import Pressure, some_avg10
from pvrd.sensors.reading import Reading
from pvrd.sensors.thermal import STALE_S, Thermal, read_zones


def write(folder: Path, files: Mapping[str, str]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name).write_text(content + "\n")
    return folder


def values(readings: list[Reading]) -> dict[str, Any]:
    return {r.name: r.value for r in readings}


# -- pressure


def test_the_kernels_averages(tmp_path: Path) -> None:
    write(tmp_path, {"cpu": "some avg10=12.50 avg60=1.00 avg300=0.00 total=9\nfull avg10=9.00",
                     "memory": "nonsense"})  # fmt: skip
    got = Pressure(lambda kind: None, tmp_path).readings()
    assert values(got) == {"psi_cpu": 12.5, "psi_memory": None, "psi_io": None}
    assert got[0].source == str(tmp_path / "cpu")
    assert "cannot be read" in got[1].source


@pytest.mark.parametrize("text", ["", "some", "some avg10=", "some avg10=x", "full avg10=1.0"])
def test_no_average(text: str) -> None:
    assert some_avg10(text) is None


def test_triggers_where_the_kernel_has_none(tmp_path: Path) -> None:
    async def act() -> None:
        pressure = Pressure(lambda kind: None, tmp_path)
        pressure.watch()
        assert pressure.watching == []
        assert pressure.refused == f"{tmp_path}/cpu is not there"
        pressure.ignore()

    asyncio.run(act())


def test_triggers_come_and_go() -> None:
    async def act() -> None:
        before = len(os.listdir("/proc/self/fd"))
        pressure = Pressure(lambda kind: None)
        pressure.watch()
        pressure.watch()
        assert pressure.watching == ["cpu", "io", "memory"] or pressure.refused
        pressure.ignore()
        pressure.ignore()
        assert pressure.watching == []
        assert len(os.listdir("/proc/self/fd")) == before

    asyncio.run(act())


WORDS = ["drm-driver:\t", "drm-client-id:\t", "drm-engine-a:\t", "drm-cycles-a:\t", "some ",
         "drm-total-cycles-a:\t", "drm-engine-capacity-a:\t", "avg10=", "9", "-1", " ns", "\n", ":",
         "²", "1e9999"]  # fmt: skip


@given(st.lists(st.sampled_from(WORDS) | st.text(max_size=5), max_size=40).map("".join))
def test_no_text_upsets_the_readers(content: str) -> None:
    client = parse(content)
    if client is not None:
        assert 0 <= share({"": client}, {"": client}, 1.0) <= 1
    value = some_avg10(content)
    assert value is None or isinstance(value, float)


# -- thermal zones


def test_the_nearest_to_its_trip(tmp_path: Path) -> None:
    zones = tmp_path / "thermal"
    write(zones / "cooling_device0", {"type": "Fan"})
    write(zones / "thermal_zone0", {"type": "hot but far", "temp": "90000",
          "trip_point_0_type": "passive", "trip_point_0_temp": "120000"})  # fmt: skip
    write(zones / "thermal_zone1", {"type": "near", "temp": "70000",
          "trip_point_0_type": "critical", "trip_point_0_temp": "71000",
          "trip_point_1_type": "passive", "trip_point_1_temp": "80000",
          "trip_point_2_type": "passive", "trip_point_2_temp": "-274000"})  # fmt: skip
    write(zones / "thermal_zone2", {"type": "off", "mode": "disabled", "temp": "99000",
          "trip_point_0_type": "passive", "trip_point_0_temp": "1000"})  # fmt: skip
    thermal = Thermal(zones)
    assert thermal.read(5.0)
    got = thermal.readings(5.0)
    assert values(got) == {"temperature_c": 70.0, "margin_c": 10.0}
    assert got[0].source == f"{zones}/thermal_zone1 (near)"
    assert not thermal.read(6.0)
    write(zones / "thermal_zone1", {"temp": "85500"})
    assert thermal.read(7.0)
    assert values(thermal.readings(7.0)) == {"temperature_c": 85.5, "margin_c": -5.5}
    assert values(thermal.readings(7.0 + STALE_S + 1)) == {"temperature_c": None, "margin_c": None}


def test_zones_without_a_passive_trip(tmp_path: Path) -> None:
    write(tmp_path / "thermal_zone0", {"type": "a", "temp": "41000"})
    write(tmp_path / "thermal_zone1", {"type": "b", "temp": "43000",
          "trip_point_0_type": "critical", "trip_point_0_temp": "100000"})  # fmt: skip
    write(tmp_path / "thermal_zone2", {"type": "no number", "temp": "?"})
    thermal = Thermal(tmp_path)
    thermal.read(0.0)
    temperature, margin = thermal.readings(0.0)
    assert (temperature.value, margin.value) == (43.0, None)
    assert margin.source == "no zone has a passive trip point"


def test_no_zones(tmp_path: Path) -> None:
    thermal = Thermal(tmp_path / "none")
    assert values(thermal.readings(0.0)) == {"temperature_c": None, "margin_c": None}
    assert not thermal.read(0.0)
    assert thermal.readings(0.0)[0].source == f"{tmp_path / 'none'} has no zone"
    assert read_zones(tmp_path / "none") == []


# -- batteries without UPower

BATTERY = {"type": "Battery", "present": "1", "status": "Discharging"}


def test_two_batteries_count_by_size(tmp_path: Path) -> None:
    write(tmp_path / "BAT0", {**BATTERY, "capacity": "100", "energy_full": "10000000"})
    write(tmp_path / "BAT1", {**BATTERY, "capacity": "20", "energy_full": "30000000"})
    assert read_supplies(tmp_path) == Supplies(40.0, True, ("BAT0", "BAT1"))
    (tmp_path / "BAT1" / "energy_full").unlink()
    write(tmp_path / "BAT1", {"charge_full": "3000000"})  # Ah beside Wh: evenly
    assert read_supplies(tmp_path).percent == 60.0


def test_mains_and_a_mouse(tmp_path: Path) -> None:
    write(tmp_path / "AC", {"type": "Mains", "online": "1"})
    write(tmp_path / "hid", {**BATTERY, "scope": "Device", "capacity": "5"})
    assert read_supplies(tmp_path) == Supplies(None, False, ("AC",))
    write(tmp_path / "BAT0", {**BATTERY, "capacity": "55"})
    assert read_supplies(tmp_path).on_battery is False  # it is plugged in, whatever the status
    write(tmp_path / "AC", {"online": "0"})
    write(tmp_path / "BAT0", {"status": "Not charging"})
    assert read_supplies(tmp_path).on_battery is True


def test_an_empty_bay(tmp_path: Path) -> None:
    write(tmp_path / "BAT0", {**BATTERY, "present": "0", "capacity": "0"})
    write(tmp_path / "BAT1", {**BATTERY, "status": "Charging", "capacity": "101"})
    assert read_supplies(tmp_path) == Supplies(100.0, False, ("BAT1",))


def test_nothing_tells_of_power(tmp_path: Path) -> None:
    battery = Battery(lambda: None, tmp_path / "none", tmp_path / "profile")
    assert not battery.read()
    assert values(battery.readings()) == {"battery": None, "on_battery": None, "power_saver": None}
    assert battery.lid_closed is None
    (tmp_path / "profile").write_text("low-power\n")
    assert battery.read()
    assert battery.readings()[2] == Reading("power_saver", True, str(tmp_path / "profile"))
