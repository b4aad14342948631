# SPDX-License-Identifier: Apache-2.0
"""From presentation feedback to figures: pure functions over the frames of a burst."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

# An agent that waited so long for a processor (as a share of a refresh) may have been too late for
# the next one: whose fault a miss is then, nobody can tell.
LATE = 0.3
# Without a counter of refreshes, a gap counts as so many as it reaches to within this share of one.
NEAR = 0.25
MOST_MISSED = 3600  # of one frame: a minute at 60 Hz; more is a suspended machine, not a load


@dataclass(frozen=True)
class Frame:
    """One commit and its presentation; times in ns of the compositor's presentation clock."""

    committed: int
    presented: int
    refresh: int  # ns to the next refresh, 0 where the compositor does not tell
    seq: int  # its counter of refreshes, 0 where it has none
    waited: int = 0  # ns that the agent waited for a processor since the commit before


@dataclass(frozen=True)
class Figures:
    """What a burst shows; None where the compositor does not tell."""

    frames: int  # that were measured
    missed: int | None
    missed_per_s: float | None  # refreshes that went by while a frame was ready
    latency_ms: float | None  # median from commit to presentation
    refresh_hz: float | None
    seconds: float = 0.0  # from the first presentation to the last


def together(before: Figures | None, now: Figures) -> Figures:
    """The figures of `now`, its missed refreshes over both: one of a short burst alone would be
    several a second.
    """
    if before is None or before.missed is None or now.missed is None or now.refresh_hz is None:
        return now
    missed, seconds = before.missed + now.missed, before.seconds + now.seconds
    return replace(now, missed_per_s=min(missed / seconds, now.refresh_hz))


def figures(burst: Sequence[Frame]) -> Figures:
    """Figures of frames in a row, each committed when the compositor asked for it.

    The first one only says where the refreshes lie: a compositor that slept needs longer for it.
    """
    frames = list(burst[1:])
    if not frames:
        return Figures(0, None, None, None, None)
    told = [frame.refresh for frame in frames if frame.refresh > 0]
    refresh = statistics.median(told) if told else 0.0
    latency = statistics.median(frame.presented - frame.committed for frame in frames) / 1e6
    seconds = (frames[-1].presented - burst[0].presented) / 1e9
    if not refresh or seconds <= 0:
        return Figures(len(frames), None, None, latency, None)
    pairs = zip(burst, frames, strict=False)
    missed = sum(missed_refreshes(before, after, refresh) for before, after in pairs)
    hertz = 1e9 / refresh
    return Figures(len(frames), missed, min(missed / seconds, hertz), latency, hertz, seconds)


def missed_refreshes(before: Frame, after: Frame, refresh: float) -> int:
    """Refreshes that went by although `after` was there in time for them.

    What the agent itself was late, because others had the processors, is not counted.
    """
    late = max(0.0, after.waited / refresh)
    if before.seq and after.seq > before.seq:
        passed = after.seq - before.seq
    else:
        passed = int((after.presented - before.presented) / refresh + NEAR)
    ours = int(late) + (1 if late % 1.0 > LATE else 0)
    return min(max(0, passed - 1 - ours), MOST_MISSED)
