# SPDX-License-Identifier: Apache-2.0
"""How long a battery lasts with the governor, and how long it could (A13: 18 % longer for 2.3 ms).

    python -m benchmarks.qos_life [--json]

From full to empty, with the same work at any time whoever decides: a static policy (the GPU at full
precision), the governor, and bounds. A day is a use of a machine (`USES`); what its rest takes is
as recorded in tests/data/days/battery.jsonl (what the charge fell by, of 50 Wh) or told.

A13's rule is full precision above 20 % and low below. So the charge from 100 to 20 lasts as long as
it does with the static policy, whatever the governor is worth, and only the last fifth longer: with
`share` of the energy going to work, of which low precision saves `saved`,

    life = 0.8 + 0.2 / (1 - share * saved)        by that rule (`bound`)
    life = 1 / (1 - share * saved)                in low precision all the time
    life = 1 / (1 - share)                        if work took nothing at all

and 18 % need share * saved >= 0.474: of FP16 to 4 bits (saved 0.69) a share of 69 %, of int8 to
4 bits (0.41) more than there is. The power model is benchmarks/qos_power's.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace

from benchmarks import common, qos_power
from benchmarks.qos_power import Machine, Policy, Sum, always, governed
from pvrd.governor import Snapshot
from pvrd.sensors import recording

DAYS = common.ROOT / "tests/data/days"
CLAIM, RULE = 1.18, 0.2  # A13: so many times as long; low from this share of the charge on
LONGEST_H = 48.0


@dataclass(frozen=True)
class Use:
    """A day: what works, how much of it is wanted a second (math.inf: as much as full precision
    can), and what the rest takes, in watts; None: as recorded.
    """

    name: str
    machine: Machine
    wanted: float
    battery_wh: float = 50.0
    rest_w: float | None = None

    @property
    def rate(self) -> float:
        """Units of work a second, by any policy."""
        return min(self.wanted, 1000 / self.machine.full_ms)


WITHOUT_PAUSE = float("inf")
DESK = Use("desk", qos_power.LAPTOP, 2.0)
USES = (
    DESK,
    Use("desk, FP16", qos_power.LAPTOP_HALVES, 2.0),
    Use("writing, int8", qos_power.LAPTOP, WITHOUT_PAUSE),
    Use("writing, FP16", qos_power.LAPTOP_HALVES, WITHOUT_PAUSE),
    Use("film", qos_power.FILM, 24.0),
    Use("board, FP16", qos_power.BOARD_HALVES, WITHOUT_PAUSE, 10.0, 1.2),
)


@functools.cache
def read(name: str) -> tuple[Snapshot, ...]:
    """A recorded day."""
    return tuple(recording.read(DAYS / f"{name}.jsonl"))


def life(policy: Policy, use: Use = DESK) -> Sum:
    """From full to empty: the hours of the day without a plug, again and again."""
    day = [s for s in read("battery") if s.on_battery and not s.sleeping]
    rests = [
        max(0.0, (a.battery or 0) - (b.battery or 0)) / (b.time_s - a.time_s)
        for a, b in itertools.pairwise(day)
        if b.time_s - a.time_s <= 60 and not b.lid_closed
    ]
    whole = 3600 * use.battery_wh
    level, now, found = 100.0, 0.0, Sum()
    while level > 0 and now < LONGEST_H * 3600:
        at = int(now / 60)
        seen = replace(
            day[at % len(day)], time_s=now, battery=level, power_saver=level < 15, on_battery=True
        )
        decision = policy(seen)
        units = 60 * min(use.rate, 1000 / use.machine.unit_ms(decision))
        joules = units * use.machine.joules(decision)
        watts = whole / 100 * rests[at % len(rests)] if use.rest_w is None else use.rest_w
        level -= 100 * (60 * watts + joules) / whole
        found.add(use.machine, decision, units, joules)
        found.rest += 60 * watts
        found.charge.append(level)
        now += 60
    found.hours = now / 3600
    return found


def bound(share: float, saved: float, low: float = RULE) -> float:
    """Times as long as with the static policy, by full precision down to `low` of the charge."""
    return 1 - low + low / (1 - share * saved)


def share_for(claim: float, saved: float) -> float:
    """Share of the energy that work has to take for A13's rule to reach a claim; above 1: none."""
    return (1 - RULE / (claim - 1 + RULE)) / saved


def low_for(claim: float, share: float, saved: float) -> float:
    """From which share of the charge on low precision reaches a claim; above 1: from none."""
    return (claim - 1) / (1 / (1 - share * saved) - 1)


def rows() -> Iterator[common.Row]:
    """A table of all uses: the governor against the static policy and against its bound."""
    for use in USES:
        static, ours = life(always("full"), use), life(governed(), use)
        saved = use.machine.saved
        yield common.row(f"{use.name}: life", "h", ours.hours, static.hours, "static")
        most = bound(static.share, saved) * static.hours
        yield common.row(f"{use.name}: of its bound", "h", ours.hours, most, "bound of A13's rule")
        low = life(always("low"), use)
        yield common.row(f"{use.name}: low all day", "h", low.hours, static.hours, "static")
        free = static.hours / (1 - static.share)
        yield common.row(f"{use.name}: work for nothing", "h", free, static.hours, "static")
        needed = 100 * min(1.0, share_for(CLAIM, saved))
        share = 100 * static.share
        name = f"{use.name}: work of the energy"
        yield common.row(name, "%", share, needed, "for the claim")
        yield common.row(f"{use.name}: work", "1/J", ours.per_joule, static.per_joule, "static")
        yield common.row(f"{use.name}: a unit", "ms", ours.unit_ms, static.unit_ms, "static")
        low_from = low_for(CLAIM, static.share, saved)
        if RULE < low_from < 1:
            sooner = life(governed(battery_low=100 * low_from), use)
            name = f"{use.name}: battery_low = {100 * low_from:.0f}"
            yield common.row(name, "h", sooner.hours, static.hours, "static")


def measure(_: argparse.Namespace) -> list[common.Row]:
    return list(rows())


if __name__ == "__main__":
    sys.exit(common.main((__doc__ or "").splitlines()[0], measure))
