# SPDX-License-Identifier: Apache-2.0
"""Joules of work by each source that a machine may have, from files as /sys has them."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import energy


def put(root: Path, files: dict[str, object]) -> None:
    for name, value in files.items():
        path = root / "class" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{value}\n")


def meter(root: Path) -> energy.Meter:
    return energy.Meter(root, idle_s=0.0)


def test_without_a_source_nothing_is_known_but_the_work_is_done(tmp_path: Path) -> None:
    done = []
    found = meter(tmp_path)
    assert found.joules(lambda: done.append(1)) is None
    assert done == [1]
    assert str(found).startswith("unknown")


def test_rapl_counts_packages_and_dram_and_runs_around(tmp_path: Path) -> None:
    zone = "powercap/intel-rapl:{}/{}"
    for at, name in (("0", "package-0"), ("0:0", "core"), ("0:1", "dram")):
        put(tmp_path, {zone.format(at, "name"): name, zone.format(at, "energy_uj"): 9_000_000})
        put(tmp_path, {zone.format(at, "max_energy_range_uj"): 10_000_000})
    found = meter(tmp_path)
    assert str(found) == "RAPL, over an idle baseline of 0.0 W"

    def work() -> None:
        put(tmp_path, {zone.format("0", "energy_uj"): 1_000_000})  # 2 J, once around
        put(tmp_path, {zone.format("0:0", "energy_uj"): 9_900_000})  # in the package already
        put(tmp_path, {zone.format("0:1", "energy_uj"): 9_500_000})

    assert found.joules(work) == pytest.approx(2.5)


def test_counters_of_hwmon(tmp_path: Path) -> None:
    put(tmp_path, {"hwmon/hwmon1/energy1_input": 0, "hwmon/hwmon1/power1_input": 5})
    found = meter(tmp_path)
    work = {"hwmon/hwmon1/energy1_input": 3_000_000}
    assert found.joules(lambda: put(tmp_path, work)) == pytest.approx(3.0)


@pytest.mark.parametrize(
    "files",
    [
        {"hwmon/hwmon0/power1_input": 4_000_000, "hwmon/hwmon0/power2_input": 1_000_000},
        {"power_supply/BAT0/status": "Discharging", "power_supply/BAT0/power_now": 5_000_000},
        {
            "power_supply/BAT0/status": "Discharging",
            "power_supply/BAT0/current_now": 1_000_000,
            "power_supply/BAT0/voltage_now": 5_000_000,
        },
    ],
)
def test_sensors_of_power_add_up_over_time(tmp_path: Path, files: dict[str, object]) -> None:
    put(tmp_path, files)
    source = meter(tmp_path)._source
    assert isinstance(source, energy.Sensors)
    assert source._read() == pytest.approx(5e6)
    joules, _ = source.measure(lambda: sum(range(100_000)))
    assert joules > 0


def test_a_battery_that_is_charged_says_nothing(tmp_path: Path) -> None:
    put(tmp_path, {"power_supply/BAT0/status": "Charging", "power_supply/BAT0/power_now": 5})
    assert str(meter(tmp_path)).startswith("unknown")
