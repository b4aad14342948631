# SPDX-License-Identifier: Apache-2.0
"""The governor: from a snapshot of the machine to what work may take of it.

`decide` is a pure function with an explicit state for its hysteresis, so that recorded snapshots
and a fake clock test it. The sensors (`pvrd/sensors`) fill the snapshot; a value that nothing tells
is None, and `sources` says who told each of the others.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


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
    prompt_tokens: int = 0  # of the longest prompt that waits
    sources: Mapping[str, str] = field(default_factory=dict)  # field -> who told


@dataclass(frozen=True)
class Decision:
    """What work gets."""

    device: str = "gpu"  # gpu or cpu: where new and running work goes
    slice_ms: float = 20.0  # the longest slice
    group_scale: float = 1.0  # workgroups of a slice, as a share of what it would have
    precision: str = "full"  # full (FP16, INT8) or low (INT4, small networks), for new jobs
    share: float = 1.0  # of the device's time that all work together may take, 0..1
    preload_tokens: int = 0  # of the KV cache to make ready
    parked: bool = False  # no slice at all: suspend
    release: bool = False  # the GPU's memory is given back too
    reason: str = ""  # one sentence
