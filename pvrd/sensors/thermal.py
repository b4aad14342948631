# SPDX-License-Identifier: Apache-2.0
"""Thermal zones: how far the nearest one is from the temperature at which the kernel throttles.

Source: the kernel's Documentation/driver-api/thermal/sysfs-api.rst. A `passive` trip point is where
it slows devices down; `hot` and `critical` are too late to be of use.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pvrd.sensors.reading import Reading, entries, text, unknown, whole

STALE_S = 30.0  # what was read before that is not believed


@dataclass(frozen=True)
class Zone:
    """One zone as it was read. Degrees Celsius; `trip_c` None: no passive trip."""

    name: str
    kind: str
    temperature_c: float
    trip_c: float | None

    @property
    def margin_c(self) -> float | None:
        """Degrees to the trip; below 0 beyond it."""
        return None if self.trip_c is None else self.trip_c - self.temperature_c


def read_zones(folder: Path) -> list[Zone]:
    """The zones that tell their temperature."""
    zones = []
    for path in entries(folder):
        if not path.name.startswith("thermal_zone"):
            continue
        millis = whole(path / "temp")
        if millis is None or text(path / "mode") == "disabled":
            continue
        zones.append(
            Zone(path.name, text(path / "type") or "?", millis / 1000, _passive_trip(path))
        )
    return zones


def _passive_trip(path: Path) -> float | None:
    trips = []
    for kind in entries(path):
        if kind.name.startswith("trip_point_") and kind.name.endswith("_type"):
            if text(kind) != "passive":
                continue
            millis = whole(kind.with_name(kind.name.removesuffix("type") + "temp"))
            if millis is not None and millis > 0:  # 0 and below: the trip is turned off
                trips.append(millis / 1000)
    return min(trips, default=None)


class Thermal:
    """The zones. `read` is slow on some boards (a bus to a chip): call it beside the loop."""

    def __init__(self, folder: Path = Path("/sys/class/thermal")) -> None:
        self._folder = folder
        self._zones: list[Zone] = []
        self._time_s: float | None = None

    def read(self, now: float) -> bool:
        """Reads all zones; True when the nearest one's whole degrees changed."""
        before = self._nearest()
        self._zones = read_zones(self._folder)
        self._time_s = now
        after = self._nearest()
        if before is None or after is None:
            return before is not after
        return (before.name, round(before.temperature_c)) != (
            after.name, round(after.temperature_c),
        )  # fmt: skip

    def readings(self, now: float) -> list[Reading]:
        """temperature_c and margin_c of the zone nearest to its trip, and which zone that is."""
        if self._time_s is None or now - self._time_s > STALE_S:
            return _nothing("the zones are read while work runs")
        zone = self._nearest()
        if zone is None:
            return _nothing(f"{self._folder} has no zone")
        source = f"{self._folder}/{zone.name} ({zone.kind})"
        margin = (
            unknown("margin_c", "no zone has a passive trip point", "°C")
            if zone.margin_c is None
            else Reading("margin_c", round(zone.margin_c, 3), source, "°C")
        )
        return [Reading("temperature_c", zone.temperature_c, source, "°C"), margin]

    def _nearest(self) -> Zone | None:
        """The zone nearest to its passive trip; where none has one, the hottest."""
        tripped = [z for z in self._zones if z.margin_c is not None]
        if tripped:
            return min(tripped, key=lambda z: (z.margin_c or 0.0, z.name))
        return max(self._zones, key=lambda z: z.temperature_c, default=None)


def _nothing(why: str) -> list[Reading]:
    return [unknown("temperature_c", why, "°C"), unknown("margin_c", why, "°C")]
