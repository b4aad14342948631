# SPDX-License-Identifier: Apache-2.0
"""Bursts of frames: the surface is there while it is needed, and comes again after a failure."""

from __future__ import annotations

import asyncio

from pvrd.agent.measure import Figures, Frame, figures, together
from pvrd.agent.surface import Stuck, Surface, Unknown

FRAMES = 25  # of a burst; one fewer is measured
FRAME_S = 1.0  # a compositor that needs longer for one is said to be stuck
STUCK = "the compositor answers nothing at present"


class Meter:
    """Measures the session's compositor."""

    def __init__(self, window: bool) -> None:
        self._window = window
        self._surface: Surface | None = None
        self._last: Figures | None = None

    def close(self) -> None:
        """Takes the surface away; the next burst makes a new one."""
        self._last = None
        if self._surface is not None:
            self._surface.close()
            self._surface = None

    async def burst(self) -> Figures:
        """Some frames in a row; missed refreshes are those of the last two bursts.

        Raises:
            Unknown, Stuck: as Surface; the surface is gone then.
        """
        try:
            if self._surface is None:
                self._surface = await Surface.open(self._window)
            shown: list[Frame] = []
            for frame in await self._surface.frames(FRAMES, FRAME_S):
                if frame is None:
                    shown.clear()  # those before are no neighbours of the next
                else:
                    shown.append(frame)
        except (Unknown, Stuck, asyncio.CancelledError):
            self.close()
            raise
        found = figures(shown)
        if found.latency_ms is None:
            self.close()
            raise Unknown("the compositor discards the frames: it does not show the surface")
        before, self._last = self._last, found
        return together(before, found)
