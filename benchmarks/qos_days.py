# SPDX-License-Identifier: Apache-2.0
"""The governor on the days of tests/data/days against static policies: work, joules, frames.

    python -m benchmarks.qos_days [--json]

A simulation without chance: the same rows on every machine. What a day does not depend on (load,
who is there) is as recorded; charge and temperature are computed from what the policy draws, so
that the governor sees what it brings about. The model (`Machine`) and where its figures are from:

- A decoder is bound by memory: a token takes the bytes of its weights by the bandwidth, at one
  power. Full precision is 8.5 bits a weight (int8 with a scale for 32), low is 5 (4 bits with scale
  and minimum for 32), as kernels/weights.py packs them.
- `board`: the article's 0.5B model on a GX6250, 45 ms a token in 4 bits at +0.8 W (requirements,
  A11). `laptop`: an 8B model at 90 GB/s (LPDDR5-5600, 128 bits) within 15 W (the usual base power
  of such chips); 50 Wh.
- The CPU takes 1 / 0.45 as many joules a token and 2.24 times as long (the article's A9).
- The rest of the laptop draws what the day's charge fell by.
- A chip warms up as tools/days.py has it (9 °C a watt, 95 s). From the trip on the kernel halves
  the clock until it is 2 °C cooler: 0.6 of the voltage squared a switch, so 0.3 of the power.
  0.5 W leak at 60 °C, twice as much for each 30 °C (assumed; a rule of thumb).
- A compositor that wants `load` of the GPU misses refreshes for what load and ours exceed it by.

A13's claim is 18 % more battery life for 2.3 ms a token.
"""

from __future__ import annotations

import argparse
import itertools
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from benchmarks import common
from pvrd import config
from pvrd.governor import Decision, Snapshot, State, decide
from pvrd.sensors import recording

DAYS = common.ROOT / "tests/data/days"
FULL_BITS, LOW_BITS = 8.5, 5.0
CPU_JOULES, CPU_TIME = 1 / 0.45, 2.24
BATTERY_WH, WANTED_S = 50.0, 2.0  # tokens a second that are wanted of a laptop, on the average
TRIP_C, AMBIENT_C, WARMER_C, A_WATT_C, SECONDS = 80.0, 26.0, 6.0, 9.0, 95.0
REST_W, WORK_W = 1.2, 5.0
SLOWED, SLOWED_W, COOLER_C = 0.5, 0.3, 2.0
LEAK_W, LEAK_AT_C, LEAK_TWICE_C = 0.5, 60.0, 30.0
REFRESH_HZ, OURS = 60.0, 0.6  # of the GPU, that pvrd takes of one that it has for itself
CLAIM_LIFE, CLAIM_MS = 1.18, 2.3
LONGEST_H = 48.0

Policy = Callable[[Snapshot], Decision]


@dataclass(frozen=True)
class Machine:
    """What a token takes."""

    low_ms: float
    watts: float

    def token_ms(self, decision: Decision) -> float:
        """Milliseconds of the device for a token."""
        bits = LOW_BITS if decision.precision == "low" else FULL_BITS
        return self.low_ms * bits / LOW_BITS * (CPU_TIME if decision.device == "cpu" else 1)

    def joules(self, decision: Decision) -> float:
        """Of a token."""
        gpu = replace(decision, device="gpu")
        more = CPU_JOULES if decision.device == "cpu" else 1.0
        return self.watts * self.token_ms(gpu) / 1000 * more


BOARD = Machine(45.0, 0.8)
LAPTOP = Machine(1000 * 8.03e9 * LOW_BITS / 8 / 90e9, 15.0)


def governed() -> Policy:
    """The governor with its defaults."""
    settings = config.Config({key: rule.default for key, rule in config.KEYS.items()})
    state = State()

    def policy(snapshot: Snapshot) -> Decision:
        nonlocal state
        decision, state = decide(snapshot, state, settings)
        return decision

    return policy


def always(precision: str) -> Policy:
    """The GPU at one precision, whatever happens; asleep it does nothing either."""
    return lambda snapshot: Decision(precision=precision, parked=snapshot.sleeping)


@dataclass
class Sum:
    """What a policy came to."""

    tokens: float = 0.0
    joules: float = 0.0
    busy_ms: float = 0.0  # of the device, for all tokens
    full: float = 0.0  # tokens at full precision
    missed: float = 0.0  # refreshes
    hot_s: float = 0.0  # beyond the trip
    hours: float = 0.0
    charge: list[float] = field(default_factory=list)

    def add(self, machine: Machine, decision: Decision, tokens: float, joules: float) -> None:
        self.tokens += tokens
        self.joules += joules
        self.busy_ms += tokens * machine.token_ms(decision)
        self.full += tokens * (decision.precision == "full")

    @property
    def per_joule(self) -> float:
        return self.tokens / self.joules if self.joules else 0.0

    @property
    def token_ms(self) -> float:
        return self.busy_ms / self.tokens if self.tokens else 0.0


def read(name: str) -> list[Snapshot]:
    """A day."""
    return list(recording.read(DAYS / f"{name}.jsonl"))


def life(policy: Policy, machine: Machine = LAPTOP) -> Sum:
    """From full to empty: the hours of the day without a plug, again and again."""
    day = [s for s in read("battery") if s.on_battery and not s.sleeping]
    rests = [
        max(0.0, (a.battery or 0) - (b.battery or 0)) / (b.time_s - a.time_s)
        for a, b in itertools.pairwise(day)
        if b.time_s - a.time_s <= 60 and not b.lid_closed
    ]
    level, now, found = 100.0, 0.0, Sum()
    while level > 0 and now < LONGEST_H * 3600:
        at = int(now / 60)
        seen = replace(
            day[at % len(day)], time_s=now, battery=level, power_saver=level < 15, on_battery=True
        )
        decision = policy(seen)
        tokens = min(60 * WANTED_S, 60_000 / machine.token_ms(decision))
        joules = tokens * machine.joules(decision)
        level -= 60 * rests[at % len(rests)] + 100 * joules / (3600 * BATTERY_WH)
        found.add(machine, decision, tokens, joules)
        found.charge.append(level)
        now += 60
    found.hours = now / 3600
    return found


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
        scale = decision.group_scale if seen.canary is not None else 0.0
        leak = LEAK_W * 2 ** ((temperature - LEAK_AT_C) / LEAK_TWICE_C)
        work = WORK_W * scale * (SLOWED_W if slowed else 1.0)
        room = AMBIENT_C + WARMER_C * seen.time_s / 1800
        target = room + A_WATT_C * (REST_W + work + leak)
        temperature += (target - temperature) * (1 - math.exp(-step / SECONDS))
        if scale:
            speed = scale * (SLOWED if slowed else 1.0)
            tokens = 1000 * step * speed / machine.token_ms(decision)
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
        tokens = 1000 * step * got / machine.token_ms(decision)
        found.add(machine, decision, tokens, tokens * machine.joules(decision))
    return found


def rows() -> Iterator[common.Row]:
    """Of all days."""
    ours, full, low = (life(p) for p in (governed(), always("full"), always("low")))
    yield common.row("battery life, governor", "h", ours.hours, full.hours, "full precision")
    yield common.row("battery life, governor", "h", ours.hours, low.hours, "low precision")
    claim = CLAIM_LIFE * full.hours
    yield common.row("battery life, governor", "h", ours.hours, claim, "A13's claim")
    yield common.row("battery work", "tokens/J", ours.per_joule, full.per_joule, "full precision")
    yield common.row("battery token", "ms", ours.token_ms, full.token_ms, "full precision")
    part = 100 * ours.full / ours.tokens
    yield common.Row("battery tokens of full precision", "%", part, 100.0, "full precision", None)
    ours, full = heat(governed()), heat(always("full"))
    yield common.row("thermal work", "tokens/J", ours.per_joule, full.per_joule, "static")
    yield common.row("thermal tokens", "tokens", ours.tokens, full.tokens, "static")
    ratio = full.hot_s / ours.hot_s if ours.hot_s else None
    yield common.Row("thermal beyond the trip", "seconds", ours.hot_s, full.hot_s, "static", ratio)
    ours, full = bursts(governed()), bursts(always("full"))
    ratio = full.missed / ours.missed if ours.missed else None
    yield common.Row("bursts missed", "refreshes", ours.missed, full.missed, "static", ratio)
    yield common.row("bursts tokens", "tokens", ours.tokens, full.tokens, "static")
    yield common.row("bursts work", "tokens/J", ours.per_joule, full.per_joule, "static")


def measure(_: argparse.Namespace) -> list[common.Row]:
    return list(rows())


if __name__ == "__main__":
    sys.exit(common.main((__doc__ or "").splitlines()[0], measure))
