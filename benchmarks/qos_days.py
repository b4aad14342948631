# SPDX-License-Identifier: Apache-2.0
"""The governor on the days of tests/data/days against static policies: work, joules, frames.

    python -m benchmarks.qos_days [--json]

A simulation without chance: the same rows on every machine. What a day does not depend on (load,
who is there) is as recorded; charge and temperature are computed from what the policy draws, so
that the governor sees what it brings about. Batteries: benchmarks/qos_life; what work takes:
benchmarks/qos_power. Beside that

- A chip warms up as tools/days.py has it (9 °C a watt, 95 s). From the trip on the kernel halves
  the clock until it is 2 °C cooler: 0.6 of the voltage squared a switch, so 0.3 of the power.
  0.5 W leak at 60 °C, twice as much for each 30 °C (assumed; a rule of thumb).
- A device works for the share of the time that its worker is told (supervisor.orders), at full
  power, and rests for what is left: workgroups alone, which are fewer in a slice but come one slice
  after the other, change nothing.
- A compositor that wants `load` of the GPU misses refreshes for what load and ours exceed it by.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator
from dataclasses import replace

from benchmarks import common, qos_life
from benchmarks.qos_life import read
from benchmarks.qos_power import BOARD, LAPTOP, Machine, Policy, Sum, always, governed
from pvrd.supervisor import orders

TRIP_C, AMBIENT_C, WARMER_C, A_WATT_C, SECONDS = 80.0, 26.0, 6.0, 9.0, 95.0
REST_W, WORK_W = 1.2, 5.0
SLOWED, SLOWED_W, COOLER_C = 0.5, 0.3, 2.0
LEAK_W, LEAK_AT_C, LEAK_TWICE_C = 0.5, 60.0, 30.0
REFRESH_HZ, OURS = 60.0, 0.6  # of the GPU, that pvrd takes of one that it has for itself


def heat(policy: Policy, machine: Machine = BOARD) -> Sum:
    """A board that works in stretches; where the recorded chip was at work, there is work."""
    found, temperature, slowed, last = Sum(), 41.0, False, 0.0
    for seen in read("thermal"):
        step, last = seen.time_s - last, seen.time_s
        if not step:
            continue
        at = replace(seen, temperature_c=temperature, margin_c=TRIP_C - temperature)
        decision = policy(at)
        slowed = temperature >= TRIP_C - (COOLER_C if slowed else 0.0)
        scale = float(orders(decision, "gpu")["share"]) if seen.canary is not None else 0.0
        leak = LEAK_W * 2 ** ((temperature - LEAK_AT_C) / LEAK_TWICE_C)
        work = WORK_W * scale * (SLOWED_W if slowed else 1.0)
        room = AMBIENT_C + WARMER_C * seen.time_s / 1800
        target = room + A_WATT_C * (REST_W + work + leak)
        temperature += (target - temperature) * (1 - math.exp(-step / SECONDS))
        if scale:
            speed = scale * (SLOWED if slowed else 1.0)
            tokens = 1000 * step * speed / machine.unit_ms(decision)
            found.add(machine, decision, tokens, step * (work + leak))
        found.hot_s += step * (temperature >= TRIP_C)
    return found


def bursts(policy: Policy, machine: Machine = LAPTOP) -> Sum:
    """A desktop with something to draw now and then."""
    found, last = Sum(), 0.0
    for seen in read("bursts"):
        step, last = seen.time_s - last, seen.time_s
        decision = policy(seen)
        cpu = decision.device == "cpu"
        load, wanted = seen.others_gpu or 0.0, OURS * decision.share
        ours = 0.0 if cpu else wanted
        got = wanted if cpu else min(wanted, max(wanted / (wanted + load), 1 - load))
        if not seen.idle:
            found.missed += step * REFRESH_HZ * max(0.0, load + ours - 1)
        tokens = 1000 * step * got / machine.unit_ms(decision)
        found.add(machine, decision, tokens, tokens * machine.joules(decision))
    return found


def rows() -> Iterator[common.Row]:
    """Of all days."""
    yield from qos_life.rows()
    ours, full = heat(governed()), heat(always("full"))
    yield common.row("thermal work", "tokens/J", ours.per_joule, full.per_joule, "static")
    yield common.row("thermal tokens", "tokens", ours.units, full.units, "static")
    ratio = full.hot_s / ours.hot_s if ours.hot_s else None
    yield common.Row("thermal beyond the trip", "seconds", ours.hot_s, full.hot_s, "static", ratio)
    ours, full = bursts(governed()), bursts(always("full"))
    ratio = full.missed / ours.missed if ours.missed else None
    yield common.Row("bursts missed", "refreshes", ours.missed, full.missed, "static", ratio)
    yield common.row("bursts tokens", "tokens", ours.units, full.units, "static")
    yield common.row("bursts work", "tokens/J", ours.per_joule, full.per_joule, "static")


def measure(_: argparse.Namespace) -> list[common.Row]:
    return list(rows())


if __name__ == "__main__":
    sys.exit(common.main((__doc__ or "").splitlines()[0], measure))
