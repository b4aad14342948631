# SPDX-License-Identifier: Apache-2.0
"""Joules that work takes, over what the machine takes without it.

Sources, the first that is there: RAPL (powercap: CPU packages, and DRAM where it is counted), hwmon
(energy counters, else power sensors), a battery that is being discharged (power_supply). Where
there is none, or it may not be read, nothing is known: no figure is made up.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

SYS = Path("/sys")
IDLE_S = 2.0  # of the baseline
_TICK_S = 0.02  # between readings of a power sensor


def _number(file: Path) -> float | None:
    try:
        return float(file.read_text())
    except (OSError, ValueError):
        return None


class Counter:
    """Joules since some moment, by counters that run around at a maximum."""

    def __init__(self, name: str, files: list[tuple[Path, float]]) -> None:
        """`files`: a counter in microjoules each, and its maximum; 0: none."""
        self.name = name
        self._files = files

    def measure(self, work: Callable[[], object]) -> tuple[float, float]:
        """Joules and seconds of some work, which is shorter than a counter's round."""
        before, begin = [_number(file) or 0.0 for file, _ in self._files], time.perf_counter()
        work()
        took = time.perf_counter() - begin
        total = 0.0
        for (file, most), was in zip(self._files, before, strict=True):
            now = _number(file) or 0.0
            total += now - was if now >= was else now - was + most
        return total / 1e6, took


class Sensors:
    """Joules by power sensors in microwatts, read again and again by a thread."""

    def __init__(self, name: str, read: Callable[[], float]) -> None:
        self.name = name
        self._read = read

    def measure(self, work: Callable[[], object]) -> tuple[float, float]:
        """Joules and seconds of some work."""
        joules, done = 0.0, threading.Event()

        def watch() -> None:
            nonlocal joules
            at = time.perf_counter()
            over = False
            while not over:
                watts = self._read() / 1e6
                over = done.wait(_TICK_S)
                now = time.perf_counter()
                joules, at = joules + watts * (now - at), now

        thread = threading.Thread(target=watch)
        begin = time.perf_counter()
        thread.start()
        try:
            work()
        finally:
            took = time.perf_counter() - begin
            done.set()
            thread.join()
        return joules, took


def _rapl(root: Path) -> Counter | None:
    files = []
    for zone in sorted((root / "class/powercap").glob("*rapl:*")):
        try:
            name = (zone / "name").read_text().strip()
        except OSError:
            continue
        # A package holds its cores and graphics; DRAM is counted beside it.
        if not name.startswith(("package", "dram")) or _number(zone / "energy_uj") is None:
            continue
        files.append((zone / "energy_uj", _number(zone / "max_energy_range_uj") or 0.0))
    return Counter("RAPL", files) if files else None


def _hwmon(root: Path) -> Counter | Sensors | None:
    folders = sorted((root / "class/hwmon").glob("hwmon*"))
    found = [file for folder in folders for file in sorted(folder.glob("energy*_input"))]
    counters = [(file, 0.0) for file in found if _number(file) is not None]
    if counters:
        return Counter("hwmon", counters)
    found = [file for folder in folders for file in sorted(folder.glob("power*_input"))]
    power = [file for file in found if _number(file) is not None]
    if power:
        return Sensors("hwmon", lambda: sum(_number(file) or 0.0 for file in power))
    return None


def _battery(root: Path) -> Sensors | None:
    for supply in sorted((root / "class/power_supply").glob("*")):
        try:
            draining = (supply / "status").read_text().strip() == "Discharging"
        except OSError:
            continue
        if draining and (read := _drain(supply)) is not None:
            return Sensors("battery", read)
    return None


def _drain(supply: Path) -> Callable[[], float] | None:
    """What reads the microwatts that a battery gives."""
    power, current, voltage = (supply / f"{name}_now" for name in ("power", "current", "voltage"))
    if _number(power) is not None:
        return lambda: _number(power) or 0.0
    if _number(current) is not None and _number(voltage) is not None:
        return lambda: (_number(current) or 0.0) * (_number(voltage) or 0.0) / 1e6
    return None


class Meter:
    """The machine's meter, and what it shows when nothing is done."""

    def __init__(self, root: Path = SYS, idle_s: float = IDLE_S) -> None:
        """Measures the baseline; other work in that time spoils it."""
        self._source = _rapl(root) or _hwmon(root) or _battery(root)
        self._idle_w = 0.0
        if self._source is not None:
            joules, took = self._source.measure(lambda: time.sleep(idle_s))
            self._idle_w = joules / took

    def __str__(self) -> str:
        if self._source is None:
            return "unknown (no RAPL, hwmon or battery that can be read)"
        return f"{self._source.name}, over an idle baseline of {self._idle_w:.1f} W"

    def joules(self, work: Callable[[], object]) -> float | None:
        """What some work takes over the baseline; None where it is not known. The work is done in
        any case.
        """
        if self._source is None:
            work()
            return None
        joules, took = self._source.measure(work)
        return max(0.0, joules - self._idle_w * took)
