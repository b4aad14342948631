# SPDX-License-Identifier: Apache-2.0
"""Scenes that the real sensors watch, played in umockdev's /sys with umockdev's udev.

A program of its own, since umockdev works by preloading: `umockdev-wrapper python testbed.py SCENE`
plays one and prints what the sensors said, a JSON object a line.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from pvrd import config
from pvrd.sensors import DeviceEvent, Sensors
from pvrd.sensors.drm import find_gpus

LONG = 30.0
UPOWERD = ("/usr/libexec/upowerd", "/usr/lib/upower/upowerd", "/usr/libexec/upower/upowerd")


class Testbed:
    """libumockdev's testbed: a /sys of our own, as long as the object lives."""

    __test__ = False

    def __init__(self) -> None:
        self._lib = lib = ctypes.CDLL("libumockdev.so.0")
        lib.umockdev_testbed_new.restype = ctypes.c_void_p
        lib.umockdev_testbed_add_devicev.restype = ctypes.c_char_p
        lib.umockdev_in_mock_environment.restype = ctypes.c_int
        self._bed = ctypes.c_void_p(lib.umockdev_testbed_new())
        if not lib.umockdev_in_mock_environment():
            raise SystemExit("run this under umockdev-wrapper")

    def add(
        self, subsystem: str, name: str, parent: str = "", attributes: Mapping[str, str] = {},
        properties: Mapping[str, str] = {},
    ) -> str:  # fmt: skip
        """A new device, which is announced; its path below /sys."""
        path = self._lib.umockdev_testbed_add_devicev(
            self._bed, subsystem.encode(), name.encode(), parent.encode() or None,
            _strings(attributes), _strings(properties),
        )  # fmt: skip
        return str(path.decode())

    def set(self, device: str, name: str, value: str) -> None:
        """Writes an attribute, as the kernel does: without an event."""
        self._lib.umockdev_testbed_set_attribute(
            self._bed, device.encode(), name.encode(), value.encode()
        )

    def property(self, device: str, name: str, value: str) -> None:
        """A property of the events to come."""
        self._lib.umockdev_testbed_set_property(
            self._bed, device.encode(), name.encode(), value.encode()
        )

    def event(self, device: str, action: str) -> None:
        """udev says so."""
        self._lib.umockdev_testbed_uevent(self._bed, device.encode(), action.encode())

    def link(self, device: str, name: str, target: str) -> None:
        """A symbolic link in the device's folder, such as `driver`."""
        self._lib.umockdev_testbed_set_attribute_link(
            self._bed, device.encode(), name.encode(), target.encode()
        )


def _strings(values: Mapping[str, str]) -> Any:
    flat = [part.encode() for pair in values.items() for part in pair]
    return (ctypes.c_char_p * (len(flat) + 1))(*flat, None)


class Stage:
    """Sensors at work in the testbed."""

    def __init__(self, bed: Testbed) -> None:
        self.bed = bed
        values = {key: rule.default for key, rule in config.KEYS.items()}
        self.news = asyncio.Event()
        self.events: list[DeviceEvent] = []
        self.sensors = Sensors(
            SimpleNamespace(address=None),  # type: ignore[arg-type]
            config.Config(values),
            self.news.set,
        )
        self.sensors.on_device = self.events.append

    async def until(self, true: Callable[[], Any]) -> None:
        """Waits for news that make it true: nothing looks again without any."""
        async with asyncio.timeout(LONG):
            while not true():
                await self.news.wait()
                self.news.clear()

    def tell(self, *names: str) -> None:
        """Prints fields of the snapshot, and who told."""
        snapshot = dataclasses.asdict(self.sensors.snapshot(time.monotonic()))
        row = {name: snapshot[name] for name in names}
        row["sources"] = {n: snapshot["sources"].get(n) for n in names}
        print(json.dumps(row), flush=True)

    def value(self, name: str) -> Any:
        return getattr(self.sensors.snapshot(time.monotonic()), name)


async def battery(stage: Stage) -> None:
    """On mains; pulled out; drained below 20 %; back on mains."""
    bed = stage.bed
    mains = bed.add("power_supply", "AC", "", {"type": "Mains", "online": "1"})
    cell = bed.add(
        "power_supply", "BAT0", "",
        {"type": "Battery", "present": "1", "status": "Full", "capacity": "100",
         "energy_full": "50000000", "energy_now": "50000000"},
    )  # fmt: skip
    bed.add(
        "power_supply", "mouse", "",
        {"type": "Battery", "scope": "Device", "present": "1", "status": "Discharging",
         "capacity": "3"},
    )  # fmt: skip
    await stage.sensors.start()
    stage.tell("battery", "on_battery")
    bed.set(mains, "online", "0")
    bed.set(cell, "status", "Discharging")
    bed.event(mains, "change")
    await stage.until(lambda: stage.value("on_battery"))
    stage.tell("battery", "on_battery")
    for level in (60, 21, 19):
        bed.set(cell, "capacity", str(level))
        bed.event(cell, "change")
        await stage.until(lambda level=level: stage.value("battery") == level)
    stage.tell("battery", "on_battery")
    bed.set(mains, "online", "1")
    bed.event(mains, "change")
    await stage.until(lambda: stage.value("on_battery") is False)
    stage.tell("battery", "on_battery")


async def thermal(stage: Stage) -> None:
    """A GPU's zone heats up past its passive trip; another one is hotter but far from its own."""
    bed = stage.bed
    bed.add(
        "thermal", "thermal_zone0", "",
        {"type": "cpu-thermal", "mode": "enabled", "temp": "88000",
         "trip_point_0_type": "passive", "trip_point_0_temp": "120000"},
    )  # fmt: skip
    zone = bed.add(
        "thermal", "thermal_zone1", "",
        {"type": "gpu-thermal", "mode": "enabled", "temp": "50000",
         "trip_point_0_type": "active", "trip_point_0_temp": "40000",
         "trip_point_1_type": "passive", "trip_point_1_temp": "75000",
         "trip_point_2_type": "critical", "trip_point_2_temp": "95000"},
    )  # fmt: skip
    await stage.sensors.start()
    stage.tell("temperature_c", "margin_c")
    for degrees in (60, 71, 78):
        bed.set(zone, "temp", str(degrees * 1000))
        bed.event(zone, "change")
        await stage.until(lambda degrees=degrees: stage.value("temperature_c") == degrees)
    stage.tell("temperature_c", "margin_c")


async def gpu(stage: Stage) -> None:
    """A GPU is there, is wedged, leaves, and comes back; a display is plugged in meanwhile."""
    bed = stage.bed
    await stage.sensors.start()
    parent = bed.add("platform", "fd000000.gpu", "", {}, {"DRIVER": "powervr"})
    bed.link(parent, "driver", "/sys/bus/platform/drivers/powervr")

    def node(name: str, minor: int) -> str:
        return bed.add(
            "drm", name, parent, {"dev": f"226:{minor}"},
            {"DEVNAME": f"dri/{name}", "MAJOR": "226", "MINOR": str(minor), "DEVTYPE": "drm_minor"},
        )  # fmt: skip

    card, render = node("card0", 0), node("renderD128", 128)
    await stage.until(lambda: len(stage.events) == 2)
    bed.property(card, "HOTPLUG", "1")
    bed.event(card, "change")  # a display: of no matter
    for word in ("none", "rebind,bus-reset"):
        bed.property(card, "WEDGED", word)
        bed.event(card, "change")
    await stage.until(lambda: len(stage.events) == 4)
    bed.event(render, "remove")
    await stage.until(lambda: len(stage.events) == 5)
    bed.event(render, "add")
    await stage.until(lambda: len(stage.events) == 6)
    for event in stage.events:
        print(json.dumps(dataclasses.asdict(event)), flush=True)


async def busy(stage: Stage) -> None:
    """Work runs beside a GPU whose driver's fdinfo is of no use."""
    bed = stage.bed
    parent = bed.add("platform", "fd000000.gpu", "", {}, {"DRIVER": "powervr"})
    bed.link(parent, "driver", "/sys/bus/platform/drivers/powervr")
    node = bed.add("drm", "renderD128", parent, {"dev": "226:128"}, {"DEVNAME": "dri/renderD128"})
    bed.link(node, "device", parent)
    await stage.sensors.start()
    await stage.sensors.refresh()
    (gpu,) = find_gpus()
    (row,) = [r for r in stage.sensors.describe() if r["name"] == "others_gpu"]
    print(json.dumps({"driver": gpu.driver, "source": row["source"]}), flush=True)


async def upower(stage: Stage) -> None:
    """The battery's scene again, through a real upowerd on a system bus of its own."""
    bed = stage.bed
    mains = bed.add("power_supply", "AC", "", {"type": "Mains", "online": "1"})
    cell = bed.add(
        "power_supply", "BAT0", "",
        {"type": "Battery", "present": "1", "status": "Discharging", "capacity": "80",
         "energy_full": "50000000", "energy_full_design": "60000000", "energy_now": "40000000",
         "power_now": "10000000", "voltage_now": "12000000", "technology": "Li-ion"},
    )  # fmt: skip
    upowerd = next((p for p in map(Path, UPOWERD) if p.exists()), None)
    if upowerd is None:
        raise SystemExit("upower is missing; tools/install/packages check installs it")
    with contextlib.ExitStack() as stack:
        bus = stack.enter_context(
            subprocess.Popen(
                ["dbus-daemon", "--session", "--print-address", "--nofork", "--nopidfile"],
                stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            )
        )  # fmt: skip
        stack.callback(bus.terminate)
        assert bus.stdout is not None
        os.environ["UPOWER_HISTORY_DIR"] = stack.enter_context(tempfile.TemporaryDirectory())
        os.environ["DBUS_SYSTEM_BUS_ADDRESS"] = bus.stdout.readline().decode().strip()
        await stage.sensors.start()
        stage.tell("battery", "on_battery")  # /sys alone
        daemon = stack.enter_context(
            subprocess.Popen([str(upowerd)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        )
        stack.callback(daemon.terminate)

        def told(level: float, on_battery: bool) -> Callable[[], bool]:
            def true() -> bool:
                snapshot = stage.sensors.snapshot(time.monotonic())
                return (snapshot.battery, snapshot.on_battery) == (level, on_battery) and (
                    snapshot.sources["battery"] == snapshot.sources["on_battery"] == "UPower"
                )

            return true

        await stage.until(told(80.0, False))
        bed.set(mains, "online", "0")
        bed.event(mains, "change")
        await stage.until(told(80.0, True))
        bed.set(cell, "energy_now", "9000000")
        bed.set(cell, "capacity", "18")
        bed.event(cell, "change")
        await stage.until(told(18.0, True))
        stage.tell("battery", "on_battery")


SCENES: dict[str, Callable[[Stage], Awaitable[None]]] = {
    "battery": battery, "thermal": thermal, "gpu": gpu, "busy": busy, "upower": upower,
}  # fmt: skip


async def play(name: str) -> None:
    stage = Stage(Testbed())
    try:
        await SCENES[name](stage)
    finally:
        await stage.sensors.stop()


if __name__ == "__main__":
    asyncio.run(play(sys.argv[1]))
