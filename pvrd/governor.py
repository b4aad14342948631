# SPDX-License-Identifier: Apache-2.0
"""The governor: from a snapshot of the machine to what work may take of it.

`decide` is a pure function with an explicit state for its hysteresis, so that recorded snapshots
and a fake clock test it. The sensors (`pvrd/sensors`) fill the snapshot; a value that nothing tells
is None, and `sources` says who told each of the others.

What limits work moves on ladders (`Ladder`): a step up when its threshold to enter was met for a
while without a break, a step down when all was below the threshold to leave for a longer while. One
step at a time, so that the effect of each is seen before the next. What people ask for (a hold,
suspend) counts at once.

Contention is believed in this order: what the compositor says of itself (missed refreshes), the
device's canary, other programs' GPU time, pressure (PSI). The first two can move work to the CPU;
the others only lessen its share. A compositor that misses nothing is not helped by a smaller share:
the canary counts beside it only where the device is nearly all others'.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from pvrd import systemd
from pvrd.config import Config

# Level of contention -> share of the device's time; the last one is the CPU.
SHARES = (1.0, 0.75, 0.5, 0.25, 0.25)
ON_CPU = len(SHARES) - 1
# Level of heat -> share of a slice's workgroups, and of the time (supervisor.orders).
SCALES = (1.0, 0.75, 0.5, 0.25)
# Enter and leave, level by level.
CANARY = ((2.0, 3.0, 4.5, 8.0), (1.5, 2.2, 3.2, 5.0))
MISSED = ((1.0, 3.0, 6.0, 10.0), (0.2, 1.5, 3.0, 5.0))  # refreshes a second
OTHERS = ((0.4, 0.7, 0.9), (0.3, 0.5, 0.75))  # of the GPU's time
PRESSURE = ((50.0,), (25.0,))  # percent of the time that some task waits for a CPU
MEMORY = ((10.0,), (4.0,))  # the same for memory
ALONE = 1.05  # a canary below says that nobody else is at the GPU: misses are not its doing
SHARED, APART = 1.3, 1.1  # canary: slices become short, and long again
OTHERS_SEEN, OTHERS_GONE = 0.05, 0.02
COOLER_C = 2.0  # beyond the margin, before work grows again
CHARGED = 3.0  # percent above battery_low, before precision grows again

# Seconds that a step up and a step down wait.
CONTENTION_S = (0.5, 5.0)
HEAT_S = (1.0, 10.0)
BATTERY_S = (2.0, 5.0)
DESKTOP_S = (0.0, 5.0)
HOLD_S = (0.0, 1.0)
WEDGED_S = (0.0, 5.0)
BACK_S = 10.0  # from the CPU to the GPU; doubles when the GPU was lost again within SOON_S
SOON_S = 60.0
MOST_DOUBLED = 4


@dataclass(frozen=True)
class Snapshot:
    """What is known of the machine at one moment; None where nothing tells."""

    time_s: float  # CLOCK_MONOTONIC
    # The device's own canary: a slice's time beside what the same slice takes alone (1.0: alone).
    canary: float | None = None
    # What the compositor's clients see (pvr-agent, wp_presentation).
    missed_per_s: float | None = None  # refreshes that were missed
    latency_ms: float | None = None  # commit to presentation
    refresh_hz: float | None = None
    others_gpu: float | None = None  # share of the GPU's time that other clients take, 0..1
    psi_cpu: float | None = None  # percent of the last 10 s in which some task waited
    psi_memory: float | None = None
    psi_io: float | None = None
    temperature_c: float | None = None  # of the zone that is nearest to its trip
    margin_c: float | None = None  # degrees to the first passive trip; below 0: beyond it
    battery: float | None = None  # percent
    on_battery: bool | None = None
    power_saver: bool | None = None
    idle: bool | None = None  # nobody is at the seat (logind IdleHint)
    session_active: bool | None = None  # a graphical session is in the foreground
    lid_closed: bool | None = None
    sleeping: bool = False  # the system is about to suspend
    wedged: bool = False  # udev said that the GPU is
    holds: tuple[str, ...] = ()  # reasons of those who keep the GPU free
    sources: Mapping[str, str] = field(default_factory=dict)  # field -> who told
    unknown: Mapping[str, str] = field(default_factory=dict)  # field -> why nothing tells


@dataclass(frozen=True)
class Decision:
    """What work gets."""

    device: str = "gpu"  # gpu or cpu: where new and running work goes
    slice_ms: float = 20.0  # the longest slice
    group_scale: float = 1.0  # of a slice's workgroups, and of either device's time: heat
    precision: str = "full"  # full (FP16, INT8) or low (INT4, small networks), for new jobs
    share: float = 1.0  # of the device's time that all work together may take, 0..1
    refresh_hz: float = 0.0  # of a compositor at work: slices keep out of its way; 0: none is known
    parked: bool = False  # no slice at all: suspend
    release: bool = False  # the GPU's memory is given back too
    reason: str = ""  # one sentence


@dataclass(frozen=True)
class Ladder:
    """A level that moves by steps. Times are those of snapshots, in seconds."""

    level: int = 0
    rising: float | None = None  # since when more was asked for
    falling: float | None = None  # since when less would do
    why: str = ""  # of its level, as it was when that changed

    def step(
        self, now: float, enter: int, leave: int, dwell: tuple[float, float], why: str
    ) -> Ladder:
        """The ladder at `now`.

        Args:
            enter: the highest level whose threshold to enter is met.
            leave: the highest one whose threshold to leave is not passed; at least `enter`.
            dwell: how long before a step up, and before one down. Without one it goes all the way.
            why: the reason for a level that changes now.
        """
        if enter > self.level:
            since = now if self.rising is None else self.rising
            if now - since < dwell[0]:
                return replace(self, rising=since, falling=None)
            level = self.level + 1 if dwell[0] else enter
            return Ladder(level, now if enter > level else None, None, why)
        if leave < self.level:
            since = now if self.falling is None else self.falling
            if now - since < dwell[1]:
                return replace(self, rising=None, falling=since)
            level = self.level - 1 if dwell[1] else leave
            return Ladder(level, None, now if leave < level else None, why if level else "")
        return replace(self, rising=None, falling=None)

    def due(self, dwell: tuple[float, float]) -> float:
        """When it moves if nothing changes until then."""
        if self.rising is not None:
            return self.rising + dwell[0]
        return math.inf if self.falling is None else self.falling + dwell[1]


@dataclass(frozen=True)
class State:
    """What `decide` remembers."""

    contention: Ladder = Ladder()
    heat: Ladder = Ladder()
    battery: Ladder = Ladder()
    desktop: Ladder = Ladder()
    hold: Ladder = Ladder()
    wedged: Ladder = Ladder()
    returned_s: float = -math.inf  # when work was let back to the GPU
    lost: int = 0  # how often in a row the GPU was lost again soon after that
    look_s: float = math.inf  # when to decide again though nothing is heard

    @property
    def contention_dwell(self) -> tuple[float, float]:
        """The dwell at the present level: the GPU is tried again ever more rarely."""
        if self.contention.level < ON_CPU:
            return CONTENTION_S
        return (CONTENTION_S[0], BACK_S * 2.0 ** min(self.lost, MOST_DOUBLED))


@dataclass(frozen=True)
class _Signal:
    """One sensor's opinion of contention."""

    enter: int
    leave: int
    why: str


def _levels(value: float, thresholds: tuple[Sequence[float], Sequence[float]]) -> tuple[int, int]:
    enter, leave = thresholds
    return sum(value >= t for t in enter), sum(value > t for t in leave)


def _signals(snapshot: Snapshot) -> list[_Signal]:
    """All that is known of contention, the most trusted first."""
    out = []
    canary, missed, others = snapshot.canary, snapshot.missed_per_s, snapshot.others_gpu
    if canary is not None:
        why = f"slices take {canary:.1f} times as long as alone (canary)"
        enter, leave = _levels(canary, CANARY)
        if missed is not None:
            most, still = _levels(missed, MISSED)
            enter = enter if enter == ON_CPU else min(enter, most)
            leave = leave if leave == ON_CPU else min(leave, still)
        out.append(_Signal(enter, leave, why))
    if missed is not None:
        enter, leave = _levels(missed, MISSED)
        if canary is not None and canary < ALONE:
            enter, leave = min(enter, 1), min(leave, 1)
        why = f"the compositor misses {missed:.0f} refreshes a second"
        out.append(_Signal(enter, leave, why))
    if others is not None:
        why = f"other programs take {100 * others:.0f} % of the GPU"
        out.append(_Signal(*_levels(others, OTHERS), why))
    for what, value, thresholds in (
        ("a CPU", snapshot.psi_cpu, PRESSURE),
        ("memory", snapshot.psi_memory, MEMORY),
    ):
        # Pressure alone harms nobody: it may be our own, or that of a machine that works alone.
        if value is not None and snapshot.session_active and not snapshot.idle:
            why = f"tasks wait for {what} {value:.0f} % of the time"
            out.append(_Signal(*_levels(value, thresholds), why))
    return out


def _contention(state: State, snapshot: Snapshot) -> State:
    now, signals = snapshot.time_s, _signals(snapshot)
    enter = max((s.enter for s in signals), default=0)
    leave = max((s.leave for s in signals), default=0)
    old = state.contention
    if enter > old.level:
        why = next(s.why for s in signals if s.enter > old.level)
    else:  # it is about to be one level less: who keeps it there?
        why = next((s.why for s in signals if s.leave >= old.level - 1), "the GPU was taken lately")
    new = old.step(now, enter, leave, state.contention_dwell, why)
    lost, returned_s = state.lost, state.returned_s
    if new.level == ON_CPU > old.level:
        lost = lost + 1 if now - returned_s < SOON_S else 0
    elif old.level == ON_CPU > new.level:
        returned_s = now
    return replace(state, contention=new, lost=lost, returned_s=returned_s)


def _heat(ladder: Ladder, snapshot: Snapshot, margin: float) -> Ladder:
    left = snapshot.margin_c
    if left is None:
        return ladder.step(snapshot.time_s, 0, 0, HEAT_S, "the temperature is not known any more")
    limits = (margin, margin / 2, 0.0)
    enter = sum(left <= limit for limit in limits)
    leave = sum(left < limit + COOLER_C for limit in limits)
    where = f"{left:.0f} degrees below" if left > 0 else f"{-left:.0f} degrees beyond"
    why = f"the chip is {where} the temperature at which it is slowed down"
    return ladder.step(snapshot.time_s, enter, max(enter, leave), HEAT_S, why)


def _battery(ladder: Ladder, snapshot: Snapshot, low: float) -> Ladder:
    charge = snapshot.battery if snapshot.on_battery is not False else None
    enter = leave = bool(snapshot.power_saver)
    why = "the power saver profile is on"
    if charge is not None and low > 0:
        leave = leave or charge < low + CHARGED
        if charge < low:
            enter, why = True, f"the battery is at {charge:.0f} %"
    return ladder.step(snapshot.time_s, int(enter), int(leave), BATTERY_S, why)


def _desktop(ladder: Ladder, snapshot: Snapshot) -> Ladder:
    """Is somebody there whose picture would stutter? What is not known counts as nobody, unless a
    compositor or another user of the GPU shows.
    """
    canary, others = snapshot.canary, snapshot.others_gpu
    why = ""
    if snapshot.idle is not True:
        if snapshot.session_active:
            why = "a graphical session is active"
        elif snapshot.session_active is None and snapshot.refresh_hz is not None:
            why = "a compositor is at work"
    sure = bool(why)
    if not why and canary is not None and canary >= SHARED:
        why = "the GPU is shared (canary)"
    if not why and others is not None and others >= OTHERS_SEEN:
        why = "other programs use the GPU"
    kept = (canary is not None and canary > APART) or (others is not None and others > OTHERS_GONE)
    enter = int(bool(why))
    return ladder.step(snapshot.time_s, enter, max(enter, int(sure or kept)), DESKTOP_S, why)


def _asked(ladder: Ladder, now: float, on: bool, dwell: tuple[float, float], why: str) -> Ladder:
    new = ladder.step(now, int(on), int(on), dwell, why)
    return replace(new, why=why) if on else new  # another hold may have taken over


def decide(snapshot: Snapshot, state: State, config: Config) -> tuple[Decision, State]:
    """What work gets, and what to remember. Pure: time is the snapshot's.

    `look_s` of the new state is when to ask again though nothing changed.
    """
    now = snapshot.time_s
    held = "the GPU is held: " + ", ".join(snapshot.holds[:3])
    if len(snapshot.holds) > 3:
        held += f" and {len(snapshot.holds) - 3} more"
    wedged = snapshot.sources.get("wedged", "the kernel says that the GPU is wedged")
    state = replace(
        state,
        hold=_asked(state.hold, now, bool(snapshot.holds), HOLD_S, held),
        wedged=_asked(state.wedged, now, snapshot.wedged, WEDGED_S, wedged),
    )
    if config.flag("governor.enabled"):
        state = replace(
            _contention(state, snapshot),
            heat=_heat(state.heat, snapshot, config.number("governor.thermal_margin_c")),
            battery=_battery(state.battery, snapshot, config.number("governor.battery_low")),
            desktop=_desktop(state.desktop, snapshot),
        )
    else:
        calm = Ladder()
        state = replace(state, contention=calm, heat=calm, battery=calm, desktop=calm, lost=0)
    due = (
        state.contention.due(state.contention_dwell), state.heat.due(HEAT_S),
        state.battery.due(BATTERY_S), state.desktop.due(DESKTOP_S), state.hold.due(HOLD_S),
        state.wedged.due(WEDGED_S),
    )  # fmt: skip
    state = replace(state, look_s=min(due))
    return _decision(snapshot, state, config), state


def _decision(snapshot: Snapshot, state: State, config: Config) -> Decision:
    contention, heat = state.contention.level, state.heat.level
    gone = bool(state.hold.level or state.wedged.level)
    slow, fast = config.number("governor.slice_idle_ms"), config.number("governor.slice_ms")
    short = bool(state.desktop.level or contention or heat > 1)
    reasons = [
        "the system goes to sleep" if snapshot.sleeping else "",
        state.wedged.why, state.hold.why, state.contention.why, state.heat.why, state.battery.why,
        state.desktop.why,
    ]  # fmt: skip
    return Decision(
        device="cpu" if gone or contention == ON_CPU else "gpu",
        slice_ms=min(slow, fast) if short else slow,
        group_scale=SCALES[heat],
        precision="low" if state.battery.level else "full",
        share=SHARES[contention],
        refresh_hz=round(snapshot.refresh_hz or 0.0, 2) if state.desktop.level else 0.0,
        parked=snapshot.sleeping,
        release=gone or snapshot.sleeping,
        reason="; ".join(reason for reason in reasons if reason),
    )


class Governor:
    """`decide` with its memory. Each change of the decision goes to the journal, once."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.decision = Decision(slice_ms=config.number("governor.slice_idle_ms"))
        self.state = State()

    def decide(self, snapshot: Snapshot) -> Decision:
        """The decision for this snapshot."""
        old = self.decision
        self.decision, self.state = decide(snapshot, self.state, self.config)
        if self.decision != old:
            self._log(old)
        return self.decision

    def _log(self, old: Decision) -> None:
        new = self.decision
        before, now = describe(old), describe(new)
        changes = [
            f"{key} {now[key]}" for key in now if key != "reason" and now[key] != before[key]
        ]
        reason = new.reason or "nothing asks for less"
        less = new.device != old.device or new.parked or new.precision != old.precision
        systemd.log(
            systemd.NOTICE if less else systemd.INFO,
            f"governor: {', '.join(changes) or 'as before'}: {reason}",
            MESSAGE_ID=systemd.MESSAGE_DECISION, PVRD_DEVICE=new.device, PVRD_REASON=reason,
        )  # fmt: skip


def describe(decision: Decision) -> dict[str, Any]:
    """A decision for people and for D-Bus."""
    return {
        "device": decision.device,
        "slice_ms": decision.slice_ms,
        "group_scale": decision.group_scale,
        "precision": decision.precision,
        "share": decision.share,
        "refresh_hz": decision.refresh_hz,
        "parked": decision.parked,
        "release": decision.release,
        "reason": decision.reason,
    }
