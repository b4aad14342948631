# SPDX-License-Identifier: Apache-2.0
"""Battery, mains and power profile: UPower's word, else the kernel's.

UPower knows which batteries power the machine and which a mouse. Without it /sys/class/power_supply
is read: supplies whose scope is Device (a mouse's) do not count.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pvrd.bus import Connection
from pvrd.sensors.reading import Reading, entries, text, unknown, whole
from pvrd.sensors.service import Service

UPOWER = "org.freedesktop.UPower"
UPOWER_PATH = "/org/freedesktop/UPower"
DISPLAY = f"{UPOWER_PATH}/devices/DisplayDevice"
DEVICE = f"{UPOWER}.Device"
# The service's name since 0.20, and the one before.
PROFILES = (
    ("org.freedesktop.UPower.PowerProfiles", "/org/freedesktop/UPower/PowerProfiles"),
    ("net.hadess.PowerProfiles", "/net/hadess/PowerProfiles"),
)
_BATTERY, _UPS = 2, 3  # UPower's types


@dataclass(frozen=True)
class Supplies:
    """What /sys/class/power_supply says of the machine itself."""

    percent: float | None  # of all batteries together; None without one
    on_battery: bool | None  # None when nothing tells
    names: tuple[str, ...] = ()


def read_supplies(folder: Path) -> Supplies:
    """Batteries and mains. Several batteries count by what they hold when full."""
    levels: list[float] = []
    fulls: list[tuple[str, int]] = []
    names: list[str] = []
    discharging = False
    online: list[bool] = []
    for path in entries(folder):
        kind = text(path / "type")
        if kind not in ("Battery", "Mains", "USB") or text(path / "scope") == "Device":
            continue
        if kind == "Battery":
            level = whole(path / "capacity")
            if text(path / "present") == "0" or level is None:
                continue
            levels.append(float(min(max(level, 0), 100)))
            fulls += [
                (unit, full)
                for unit in ("energy_full", "charge_full")
                if (full := whole(path / unit) or 0) > 0
            ][:1]
            discharging = discharging or text(path / "status") == "Discharging"
        else:
            state = whole(path / "online")
            if state is None:
                continue
            online.append(state != 0)
        names.append(path.name)
    on_battery: bool | None = None
    if levels:
        on_battery = not any(online) if online else discharging
    elif online:
        on_battery = False
    return Supplies(_together(levels, fulls), on_battery, tuple(names))


def _together(levels: list[float], fulls: list[tuple[str, int]]) -> float | None:
    if not levels:
        return None
    if len(fulls) == len(levels) and len({unit for unit, _ in fulls}) == 1:
        weights = [full for _, full in fulls]
    else:  # Wh and Ah, or nothing: evenly
        weights = [1] * len(levels)
    return sum(a * b for a, b in zip(levels, weights, strict=True)) / sum(weights)


class Battery:
    """UPower and power-profiles-daemon while they run, else the kernel's files."""

    def __init__(
        self,
        on_change: Callable[[], None],
        folder: Path = Path("/sys/class/power_supply"),
        profile: Path = Path("/sys/firmware/acpi/platform_profile"),
    ) -> None:
        self._on_change = on_change
        self._folder = folder
        self._profile = profile
        self._upower: Service | None = None
        self._profiles: list[tuple[Service, str]] = []
        self._supplies = Supplies(None, None)
        self._platform: str | None = None

    async def start(self, connection: Connection) -> None:
        """Watches the services on the system bus.

        Raises:
            BusError: the bus refuses.
        """
        self._upower = Service(connection, UPOWER, self._on_change)
        await self._upower.start()
        await self._upower.watch(UPOWER_PATH, UPOWER)
        await self._upower.watch(DISPLAY, DEVICE)
        for name, path in PROFILES:
            service = Service(connection, name, self._on_change)
            self._profiles.append((service, path))
            await service.start()
            await service.watch(path, name)

    def stop(self) -> None:
        """Asks the services no more; the kernel's files stay."""
        for service in [self._upower, *(s for s, _ in self._profiles)]:
            if service is not None:
                service.stop()
        self._upower = None
        self._profiles = []

    def read(self) -> bool:
        """Reads the kernel's files; True when they say something else than before."""
        supplies, platform = read_supplies(self._folder), text(self._profile)
        changed = (supplies, platform) != (self._supplies, self._platform)
        self._supplies, self._platform = supplies, platform
        return changed

    @property
    def lid_closed(self) -> Reading | None:
        """What UPower says of the lid; None when it does not."""
        own = self._own()
        if not own.get("LidIsPresent"):
            return None
        return Reading("lid_closed", bool(own.get("LidIsClosed")), "UPower")

    def readings(self) -> list[Reading]:
        """battery (percent of all), on_battery, power_saver."""
        return [self._level(), self._on_battery(), self._power_saver()]

    def _own(self) -> dict[str, Any]:
        return {} if self._upower is None else self._upower.get(UPOWER_PATH, UPOWER)

    def _files(self) -> str:
        return f"{self._folder}: {', '.join(self._supplies.names)}"

    def _level(self) -> Reading:
        display = {} if self._upower is None else self._upower.get(DISPLAY, DEVICE)
        percent = display.get("Percentage")
        if display.get("IsPresent") and isinstance(percent, float):
            if display.get("Type") in (_BATTERY, _UPS):
                return Reading("battery", percent, "UPower", "%")
        elif self._supplies.percent is not None:
            return Reading("battery", round(self._supplies.percent, 1), self._files(), "%")
        return unknown("battery", "there is no battery", "%")

    def _on_battery(self) -> Reading:
        told = self._own().get("OnBattery")
        if isinstance(told, bool):
            return Reading("on_battery", told, "UPower")
        if self._supplies.on_battery is not None:
            return Reading("on_battery", self._supplies.on_battery, self._files())
        return unknown("on_battery", f"neither UPower nor {self._folder} tells")

    def _power_saver(self) -> Reading:
        for service, path in self._profiles:
            profile = service.get(path, service.name).get("ActiveProfile")
            if isinstance(profile, str):
                return Reading("power_saver", profile == "power-saver", service.name)
        if self._platform is not None:
            return Reading("power_saver", self._platform == "low-power", str(self._profile))
        return unknown("power_saver", "neither power-profiles-daemon nor the firmware tells")
