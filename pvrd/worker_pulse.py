# SPDX-License-Identifier: Apache-2.0
"""How a worker is: how long it may be silent, and what the ends of those before it say."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pvrd.config import Config

SOFTWARE_SLICE_S, SLICE_S = 30.0, 1.0
FIRST_SLICE_S = 10.0  # before anything was measured
SOFTWARE_PIPELINE_S, PIPELINE_S = 120.0, 30.0
QUIET_PINGS = 10  # a worker with nothing to do is asked so many times more rarely
BY_OTHERS = ("it was killed by signal 9", "it was killed by signal 15")  # says nothing of a kernel
MOST_ENDED_BY = 64  # what a hello has room for


class Pulse:
    """Of one worker, from its start at `now` on. Times are those of the event loop."""

    def __init__(self, now: float) -> None:
        self.heard = self.said = now  # the last words of both sides
        self.greeted = False  # its hello came
        self.busy = False  # it makes pipelines
        self._slice = FIRST_SLICE_S / 10

    def hears(self, message: Mapping[str, Any], now: float) -> None:
        """A message came: how long did its slice take? Long ones are forgotten slowly."""
        if not self.busy:
            self._slice = max(now - max(self.heard, self.said), 0.95 * self._slice)
        self.heard = now
        self.busy = message["t"] == "busy" and message.get("on") is True

    def deadline(self, config: Config, software: bool, loading: bool) -> float:
        """How long the thread that runs slices may be silent, in seconds."""
        if not self.greeted:
            return config.number("deadlines.hello_s")
        if self.busy or loading:
            configured = config.number("deadlines.pipeline_s")
            return configured or (SOFTWARE_PIPELINE_S if software else PIPELINE_S)
        configured = config.number("deadlines.slice_s")
        if configured:
            return configured
        floor = SOFTWARE_SLICE_S if software else SLICE_S
        return min(max(floor, 10 * self._slice), SOFTWARE_PIPELINE_S)

    def every(self, config: Config, waited_for: bool) -> float:
        """Seconds of silence after which it is asked. What it hangs in while nobody waits for it
        does no harm, and an idle daemon sleeps.
        """
        every = config.number("deadlines.ping_s")
        return every if waited_for or self.busy or not self.greeted else QUIET_PINGS * every


class Past:
    """How the workers before ended, as far as that may be a kernel's doing: for a hello."""

    def __init__(self) -> None:
        self.trying = ""  # the kernel that the driver's compiler has, or its self-test
        self._previous: dict[str, Any] = {}
        self._ended_by: dict[str, str] = {}  # kernels over which workers ended, and how
        self._blamed = ""  # what an end on purpose says of the kernel that was tried

    def forget(self) -> None:
        """The configuration changed: kernels get another chance."""
        self._ended_by.clear()

    def hears(self, message: Mapping[str, Any], busy: bool) -> None:
        """A message came."""
        if message["t"] != "pong":
            self.trying = str(message.get("kernel") or "")[:100] if busy else ""

    def blame(self, reason: str) -> None:
        """It is ended on purpose, but what it tries may be the reason."""
        self._blamed = reason
        self._note(reason)

    def spared(self) -> None:
        """It was ended on purpose."""
        self._previous = {"how": self._blamed[:200]} if self._blamed else {"spared": True}
        self._blamed = ""

    def ended(self, how: str, silent: bool) -> None:
        """It ended by itself, or was killed: `silent`, because it did not answer."""
        self._previous = {}
        if how not in BY_OTHERS:
            self._previous = {"how": how[:200], "silent": silent}
            self._note(how)

    def never(self) -> None:
        """There was no device for it."""
        self._previous = {}

    def _note(self, how: str) -> None:
        if self.trying and len(self._ended_by) < MOST_ENDED_BY:
            self._ended_by[self.trying] = how[:200]

    def told(self) -> dict[str, Any]:
        """`previous` of a hello."""
        return {**self._previous, "ended_by": dict(self._ended_by)}
