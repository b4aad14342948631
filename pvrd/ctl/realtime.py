# SPDX-License-Identifier: Apache-2.0
"""`pvrctl upscale --realtime`: the pace of a stream, as the moments and deadlines of its frames."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from pvrd.ctl import errors

if TYPE_CHECKING:
    import argparse

    from pvrd.client_video import Done

DUE = 3  # frames' time, from a frame's moment to its deadline: a slot less than a session has
LEAST_FPS, MOST_FPS = 0.001, 1000.0


def rate(text: str) -> float:
    """Frames a second, as a number or as y4m has it: 30000:1001.

    Raises:
        ValueError: it is none.
    """
    above, _, below = text.partition(":")
    value = float(above) / float(below or 1) if float(below or 1) else 0.0
    if not LEAST_FPS <= value <= MOST_FPS:
        raise ValueError
    return value


rate.__name__ = f"number of frames a second ({LEAST_FPS:g} to {MOST_FPS:g})"


class Pace:
    """A frame's moment is one period after the last one's, or when it came, where that is later by
    more than a period: a source that stops, or a reader that does, moves all that follow.
    """

    def __init__(self, fps: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.fps = fps
        self._period = 1.0 / fps
        self._clock = clock
        self._next: float | None = None
        self._due: dict[int, float] = {}
        self.late = self.dropped = self.lower = 0

    def left(self) -> float:
        """Seconds until the next frame's moment, 0 when it has come."""
        return 0.0 if self._next is None else max(0.0, self._next - self._clock())

    def goes(self, seq: int) -> int:
        """The frame is submitted now; its deadline in ns of CLOCK_MONOTONIC."""
        now = self._clock()
        moment = now if self._next is None else max(self._next, now - self._period)
        self._next = moment + self._period
        self._due[seq] = moment + DUE * self._period
        return int(self._due[seq] * 1e9)

    def came(self, done: Done) -> None:
        """A frame came back, or was dropped."""
        late = self._clock() > self._due.pop(done.seq)
        self.dropped += done.dropped
        self.late += late and not done.dropped
        self.lower += done.level > 0 and not done.dropped

    def record(self) -> dict[str, Any]:
        """What --json adds."""
        counts = {"late": self.late, "dropped": self.dropped, "lower": self.lower}
        return {"realtime": round(self.fps, 3), **counts}


def words(record: dict[str, Any]) -> str:
    """What Pace.record tells, for people; "" where all went well, or nothing was in real time."""
    told = (
        ("lower", "by less than the model's own network"),
        ("late", "late"),
        ("dropped", "left out (the one before stands in)"),
    )
    return "".join(f", {record[name]} {what}" for name, what in told if record.get(name))


def asked(args: argparse.Namespace, header_rate: str) -> Pace | None:
    """The pace that --realtime asks for: --fps, else the stream's own; None without --realtime.

    Raises:
        CtlError: the stream names none.
    """
    if not args.realtime:
        return None
    try:
        return Pace(args.fps or rate(header_rate))
    except ValueError:
        raise errors.CtlError(
            "The clip does not say how many frames a second it has: say --fps.",
            errors.USAGE,
            "InvalidArgument",
        ) from None
