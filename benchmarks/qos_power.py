# SPDX-License-Identifier: Apache-2.0
"""The model of power behind benchmarks/qos_days and qos_life: what work takes, and the policies.

- Writing text is bound by memory: a token takes its weights' bytes by the bandwidth, at one power,
  so its energy goes with the bytes. Measured so where memory is what bounds it: Llama 3.2 1B on a
  Raspberry Pi 4 takes 17.6 J a token in 16 bits and 3.75 J in 3.4 (Q3_K_S), 79 % less
  (arXiv 2504.03360). Our own decode of such a shape writes 13.5 tokens/s in 16 bits, 28.9 in 8.5
  and 42.6 in 5 on two CPUs (docs/text.md): 3.2 and 1.5 times, where the bytes are 3.2 and 1.7.
  Where unpacking bounds it nothing is saved: small models by bitsandbytes on large GPUs take 12 to
  29 % more in 4 bits than in 16 (hongping-zh.github.io).
- Bits a weight: 16, 8.5 (int8 with a scale for 32) or 5 (4 bits with scale and minimum for 32), as
  kernels/weights.py packs them.
- `laptop`: an 8B model at 90 GB/s (LPDDR5-5600, 128 bits) within 15 W (the usual base power of such
  chips; an M1 Pro's package was seen to take 18 to 22 W for 8B and below 2 W between answers).
- `board`: the article's 0.5B model on a GX6250, 45 ms a token in 4 bits at +0.8 W (requirements,
  A11).
- `film`: 1920x1080 at 24 frames/s to twice that size by the balanced network, or the fast one.
  Multiplications at the peak of a laptop's GPU (1,024 lanes at 2.25 GHz within 28 W, Core Ultra
  155H). No GPU reaches its peak: a frame takes more than this, and the network's share with it.
- The CPU takes 1 / 0.45 as many joules a token and 2.24 times as long (the article's A9).
- No device takes anything for work that it does not do: a GPU that nobody uses is turned off by its
  driver, and memory that holds a model is refreshed like any other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from engine.video.network import Shape
from pvrd import config
from pvrd.governor import Decision, Snapshot, State, decide

HALF_BITS, FULL_BITS, LOW_BITS = 16.0, 8.5, 5.0
CPU_JOULES, CPU_TIME = 1 / 0.45, 2.24

Policy = Callable[[Snapshot], Decision]


@dataclass(frozen=True)
class Machine:
    """What a piece of work takes, a token or a frame: milliseconds in full and in low precision,
    and watts meanwhile.
    """

    full_ms: float
    low_ms: float
    watts: float

    def unit_ms(self, decision: Decision) -> float:
        """Milliseconds of the device for one."""
        takes = self.low_ms if decision.precision == "low" else self.full_ms
        return takes * (CPU_TIME if decision.device == "cpu" else 1)

    def joules(self, decision: Decision) -> float:
        """Of one."""
        gpu = replace(decision, device="gpu")
        more = CPU_JOULES if decision.device == "cpu" else 1.0
        return self.watts * self.unit_ms(gpu) / 1000 * more

    @property
    def saved(self) -> float:
        """Share of the energy that low precision saves."""
        return 1 - self.low_ms / self.full_ms


def text(low_ms: float, watts: float, full_bits: float = FULL_BITS) -> Machine:
    """A machine that writes: a token's milliseconds in low precision, and bits in full."""
    return Machine(low_ms * full_bits / LOW_BITS, low_ms, watts)


LAPTOP_MS = 1000 * 8.03e9 * LOW_BITS / 8 / 90e9
LAPTOP, LAPTOP_HALVES = text(LAPTOP_MS, 15.0), text(LAPTOP_MS, 15.0, HALF_BITS)
BOARD, BOARD_HALVES = text(45.0, 0.8), text(45.0, 0.8, HALF_BITS)


def _frame_ms(luma: Shape) -> float:
    """A frame of 1920x1080 by this network and the chroma's, at the peak of `film`'s GPU."""
    chroma = Shape(5, 8, 1, 2)  # for both planes
    each = [sum(9 * a * b for a, b in shape.convs) for shape in (luma, chroma)]
    work = 1920 * 1080 * (each[0] + 2 * each[1] / 4)
    return 1000 * work / (1024 * 2.25e9)


FILM = Machine(_frame_ms(Shape(1, 16, 7, 2)), _frame_ms(Shape(1, 8, 6, 2)), 28.0)


def governed(**changed: float) -> Policy:
    """The governor with its defaults, but for these of its settings."""
    values = {key: rule.default for key, rule in config.KEYS.items()}
    values |= {f"governor.{key}": value for key, value in changed.items()}
    settings = config.Config(values)
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
    """What a policy came to. Units are tokens or frames."""

    units: float = 0.0
    joules: float = 0.0  # of the work
    rest: float = 0.0  # joules of all else
    busy_ms: float = 0.0  # of the device, for all units
    full: float = 0.0  # units at full precision
    missed: float = 0.0  # refreshes
    hot_s: float = 0.0  # beyond the trip
    hours: float = 0.0
    charge: list[float] = field(default_factory=list)

    def add(self, machine: Machine, decision: Decision, units: float, joules: float) -> None:
        self.units += units
        self.joules += joules
        self.busy_ms += units * machine.unit_ms(decision)
        self.full += units * (decision.precision == "full")

    @property
    def per_joule(self) -> float:
        return self.units / self.joules if self.joules else 0.0

    @property
    def unit_ms(self) -> float:
        return self.busy_ms / self.units if self.units else 0.0

    @property
    def share(self) -> float:
        """Of the energy, that the work took."""
        return self.joules / (self.joules + self.rest) if self.joules else 0.0
