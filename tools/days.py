# SPDX-License-Identifier: Apache-2.0
"""Days of a machine, as snapshots of its sensors: made up for tests, or recorded.

    python -m tools.days make [FOLDER]      the days of tests/data/days, written anew
    python -m tools.days record OUT [--seconds N] [--every S]
                                            this machine's sensors, without a daemon

The made-up ones follow simple models with fixed seeds, so that every machine makes the same files:
a battery that is drained by a load, a chip that warms up as a resistor and a capacitor do, a
compositor that has something to draw now and then. They are open loops: what a governor would do
about them does not change them.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import math
import random
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from pvrd import config
from pvrd.governor import Snapshot
from pvrd.sensors import Sensors, recording

TREE = Path(__file__).resolve().parents[1]
REFRESH_HZ = 60.0
HOUR = 3600.0


def battery() -> Iterator[Snapshot]:
    """From eight to six on a laptop: unplugged at nine, a lunch, a suspend, the last fifth of the
    charge, plugged in at half past four. A line a minute.
    """
    chance = random.Random(8)
    level, sleep = 100.0, False
    for minute in range(10 * 60 + 1):
        hour = 8 + minute / 60
        plugged = hour < 9 or hour >= 16.5
        lunch = 12 <= hour < 12.75
        closed = 14 <= hour < 14.25
        asleep, sleep = sleep, closed
        if asleep and closed:
            level -= 0.01
            continue  # nothing runs that could write a line
        busy = not lunch and chance.random() < 0.4
        rate = 40.0 if plugged else -(16.0 if busy else 9.0)  # percent an hour
        level = min(100.0, level + rate / 60)
        yield Snapshot(
            time_s=minute * 60.0,
            others_gpu=0.0 if lunch else round(chance.uniform(0.02, 0.25 if busy else 0.08), 3),
            psi_cpu=round(chance.uniform(5, 30) if busy else chance.uniform(0, 3), 2),
            psi_memory=0.0,
            psi_io=round(chance.uniform(0, 4), 2),
            temperature_c=round(48 + (12 if busy else 0) + chance.uniform(-2, 2), 1),
            margin_c=round(47 - (12 if busy else 0) + chance.uniform(-2, 2), 1),
            battery=round(level, 1),
            on_battery=not plugged,
            power_saver=not plugged and level < 15,
            idle=lunch,
            session_active=True,
            lid_closed=closed,
            sleeping=closed,
        )


def thermal() -> Iterator[Snapshot]:
    """Half an hour on a board without a fan: work in stretches, in a room that gets warmer, so that
    its zone passes the passive trip at 80 degrees twice. A line every 2 s.
    """
    chance = random.Random(80)
    trip, resistance, seconds = 80.0, 9.0, 95.0  # °C, °C a watt, of the time constant
    temperature = 41.0
    for step in range(900):
        now = step * 2.0
        room = 26.0 + 6.0 * now / 1800
        watts = 1.2 + (5.0 if _within(now, (60, 480), (700, 1020), (1200, 1230)) else 0.0)
        temperature += (room + resistance * watts - temperature) * (1 - math.exp(-2.0 / seconds))
        seen = round(temperature + chance.uniform(-0.4, 0.4), 1)
        yield Snapshot(
            time_s=now,
            canary=round(chance.uniform(1.0, 1.1), 2) if watts > 2 else None,
            temperature_c=seen,
            margin_c=round(trip - seen, 1),
            idle=False,
            session_active=True,
        )


def bursts() -> Iterator[Snapshot]:
    """Ten minutes at a desktop of 60 Hz: windows that open, a minute of a game, a scroll now and
    then, and nobody there at the end. Two lines a second.
    """
    chance = random.Random(60)
    busy_until, next_burst, heavy = 0.0, 6.0, 0.0
    for step in range(1200):
        now = step / 2
        game = 240 <= now < 300
        idle = now >= 520
        if now >= next_burst and not game and not idle:
            busy_until = now + chance.choice((0.5, 1.0, 1.5, 4.0))
            heavy = chance.uniform(0.45, 0.95)
            next_burst = busy_until + chance.uniform(8, 35)
        load = 0.0 if idle else 0.03
        if game:
            load = chance.uniform(0.88, 0.98)
        elif now < busy_until:
            load = min(0.98, heavy * chance.uniform(0.9, 1.1))
        # A slice that shares a device in turns takes 1 / (1 - load) of its time alone; frames are
        # missed where the two together do not fit into a refresh.
        canary = round(min(20.0, 1 / (1 - load) * chance.uniform(0.97, 1.06)), 2)
        missed = max(0.0, (load - 0.6) * 0.8 * REFRESH_HZ * chance.uniform(0.5, 1.0))
        yield Snapshot(
            time_s=now,
            canary=canary,
            missed_per_s=None if idle else round(missed, 1),
            latency_ms=None if idle else round(1000 / REFRESH_HZ * (1 + missed / 20), 2),
            refresh_hz=None if idle else REFRESH_HZ,
            others_gpu=round(load, 3),
            psi_cpu=round(chance.uniform(0, 5 + 20 * load), 2),
            idle=idle,
            session_active=True,
            holds=("a game",) if 250 <= now < 300 else (),
        )


DAYS = {"battery": battery, "thermal": thermal, "bursts": bursts}


def _within(now: float, *spans: tuple[float, float]) -> bool:
    return any(begin <= now < end for begin, end in spans)


def content(name: str) -> str:
    """The file of a made-up day."""
    lines = [recording.dump(snapshot) for snapshot in DAYS[name]()]
    return "\n".join([f"# Made by tools/days.py: {name}", *lines]) + "\n"


def make(folder: Path) -> None:
    """Writes all of them."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in DAYS:
        (folder / f"{name}.jsonl").write_text(content(name), encoding="utf-8")


async def record(out: Path, seconds: float, every: float) -> None:
    """Writes a line whenever a sensor has news, and every `every` seconds; time begins at 0."""
    news = asyncio.Event()
    values = {key: rule.default for key, rule in config.KEYS.items()}
    no_bus: Any = SimpleNamespace(address=None)
    sensors = Sensors(no_bus, config.Config(values), news.set)
    await sensors.start()
    sensors.work(True)
    began = time.monotonic()
    try:
        with open(out, "w", encoding="utf-8") as file:
            file.write("# Recorded by tools/days.py\n")
            while (now := time.monotonic()) - began < seconds:
                snapshot = replace(sensors.snapshot(now), time_s=round(now - began, 3))
                file.write(recording.dump(snapshot) + "\n")
                file.flush()
                news.clear()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(news.wait(), every)
    finally:
        await sensors.stop()


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    making = commands.add_parser("make", help="write the made-up days")
    making.add_argument("folder", type=Path, nargs="?", default=TREE / "tests/data/days")
    recording_ = commands.add_parser("record", help="record this machine's sensors")
    recording_.add_argument("out", type=Path)
    recording_.add_argument("--seconds", type=float, default=HOUR)
    recording_.add_argument("--every", type=float, default=10.0)
    arguments = parser.parse_args()
    try:
        if arguments.command == "make":
            make(arguments.folder)
        else:
            asyncio.run(record(arguments.out, arguments.seconds, arguments.every))
    except OSError as e:
        print(f"{e.filename}: {e.strerror}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
