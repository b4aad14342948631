# SPDX-License-Identifier: Apache-2.0
"""What the agents (`pvr-agent`, one in each user's session) say of the compositor in front of them.

Only the agent of the user whose session is in the foreground is believed: another one could keep
the GPU from everybody by claims. Where logind does not tell whose that is, the daemon's own user is
believed and nobody else.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pvrd.sensors.reading import Reading, unknown

FRESH_S = 15.0  # a report counts so long unless it says valid_s
LONGEST_S = 3600.0
# What a report may say -> its unit and the most that makes sense.
FIELDS: Mapping[str, tuple[str, float]] = {
    "missed_per_s": ("1/s", 1000.0),
    "latency_ms": ("ms", 60000.0),
    "refresh_hz": ("Hz", 1000.0),
    "others_gpu": ("share", 1.0),
}


@dataclass
class _Report:
    uid: int
    time_s: float
    valid_s: float
    values: dict[str, float] = field(default_factory=dict)
    why: str = ""  # why there are none
    compositor: str = ""


class Compositor:
    """A small store: the newest report of each agent, by its unique name on the bus."""

    def __init__(self, active_uid: Callable[[], int | None]) -> None:
        self._active_uid = active_uid
        self._reports: dict[str, _Report] = {}

    def report(self, sender: str, uid: int, values: Mapping[str, Any], now: float) -> bool:
        """Keeps what an agent says; True when it is believed at the moment.

        `values`: missed_per_s, latency_ms, refresh_hz, others_gpu (share of the GPU's time that the
        programs of this session take, 0..1), each a number or left out; valid_s, how long it
        counts; compositor, a name; reason, why something is left out ("an X11 session").

        Raises:
            ValueError: one sentence: a number that is none or lies out of its range.
        """
        valid = _number("valid_s", values.get("valid_s", FRESH_S), LONGEST_S)
        kept = {
            name: _number(name, values[name], most)
            for name, (_, most) in FIELDS.items()
            if values.get(name) is not None
        }
        words = {key: _words(values.get(key, "")) for key in ("reason", "compositor")}
        self._reports[sender] = _Report(uid, now, valid, kept, words["reason"], words["compositor"])
        return self.believes(uid)

    def gone(self, sender: str) -> None:
        """The agent left the bus: what it said counts no more."""
        self._reports.pop(sender, None)

    def believes(self, uid: int) -> bool:
        """Is this the user in the foreground?"""
        active = self._active_uid()
        return uid == (os.geteuid() if active is None else active)

    def agents(self) -> int:
        """How many agents have reported and are still there."""
        return len(self._reports)

    def readings(self, now: float) -> list[Reading]:
        """missed_per_s, latency_ms and refresh_hz, and others_gpu when the agent knows it."""
        trusted = [r for r in self._reports.values() if self.believes(r.uid)]
        fresh = [r for r in trusted if now - r.time_s <= r.valid_s]
        report = max(fresh, key=lambda r: r.time_s, default=None)
        if report is None:
            if trusted:
                why = "the agent of the active session has been silent for too long"
            elif self._reports:
                why = "no agent of the active session reports"
            else:
                why = "no pvr-agent reports"
            return [unknown(n, why, u) for n, (u, _) in FIELDS.items() if n != "others_gpu"]
        source = "pvr-agent" + (f", {report.compositor}" if report.compositor else "")
        why = report.why or "pvr-agent does not tell"
        out = []
        for name, (unit, _) in FIELDS.items():
            if name in report.values:
                out.append(Reading(name, report.values[name], source, unit))
            elif name != "others_gpu":
                out.append(unknown(name, why, unit))
        return out


def _number(name: str, value: Any, most: float) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(f"{name} is a number")
    number = float(value)
    if not math.isfinite(number) or not 0 <= number <= most:
        raise ValueError(f"{name} lies in 0 to {most:g}")
    return number


def _words(value: Any) -> str:
    return "".join(c for c in str(value)[:200] if c.isprintable())
