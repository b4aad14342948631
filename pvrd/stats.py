# SPDX-License-Identifier: Apache-2.0
"""Counters of the daemon, as GetStatistics answers them."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pvrd.bus import Variant
from pvrd.bus_values import V
from pvrd.worker import Worker


@dataclass
class Stats:
    """Since the start of the daemon."""

    started: float = field(default_factory=time.monotonic)
    sessions: int = 0
    jobs_done: int = 0
    jobs_failed: int = 0
    jobs_cancelled: int = 0
    frames_done: int = 0
    frames_dropped: int = 0
    frames_degraded: int = 0
    frames_reissued: int = 0
    tokens: int = 0
    pictures: int = 0
    tiles: int = 0
    tiles_fallback: int = 0
    tiles_cpu: int = 0
    tiles_reused: int = 0


def rss() -> int:
    """Resident bytes of this process."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def typed(stats: Stats, sessions: int, running: int, waiting: int) -> dict[str, Variant]:
    """The daemon's own part of GetStatistics."""
    return {
        "uptime_s": V("d", time.monotonic() - stats.started),
        "rss_bytes": V("t", rss()),
        "sessions": V("u", sessions),
        "sessions_opened": V("t", stats.sessions),
        "jobs": V(
            "a{sv}",
            {
                "running": V("t", running),
                "waiting": V("t", waiting),
                "done": V("t", stats.jobs_done),
                "failed": V("t", stats.jobs_failed),
                "cancelled": V("t", stats.jobs_cancelled),
            },
        ),
        "frames": V(
            "a{sv}",
            {
                "done": V("t", stats.frames_done),
                "dropped": V("t", stats.frames_dropped),
                "degraded": V("t", stats.frames_degraded),
                "reissued": V("t", stats.frames_reissued),
            },
        ),
        "tokens": V("t", stats.tokens),
        "pictures": V("t", stats.pictures),
        "tiles": V("t", stats.tiles),
        "tiles_fallback": V("t", stats.tiles_fallback),
        "tiles_cpu": V("t", stats.tiles_cpu),
        "tiles_reused": V("t", stats.tiles_reused),
    }


def worker_typed(worker: Worker, reported: Mapping[str, Any]) -> Variant:
    """A worker's part: what we counted over its generations and what it counts itself."""
    out = {
        "state": V("s", worker.state),
        "generation": V("u", worker.generation),
        "restarts": V("u", worker.counters.restarts),
        "jobs": V("u", worker.counters.jobs),
        "frames": V("t", worker.counters.frames),
        "tokens": V("t", worker.counters.tokens),
        "last_exit": V("s", worker.counters.last_exit),
        "models": V("as", [loading.model.name for loading in worker.models.values()]),
    }
    times = reported.get("times")
    if isinstance(times, dict):
        parts = {str(k)[:16]: float(v) for k, v in list(times.items())[:16]
                 if isinstance(v, (int, float))}  # fmt: skip
        out["times_ms"] = V("a{sd}", parts)
    counters = reported.get("counters")
    numbers = {"rss": reported.get("rss"), **(counters if isinstance(counters, dict) else {})}
    for key, value in numbers.items():
        if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 64:
            out.setdefault(str(key), V("t", value))
    return V("a{sv}", out)
