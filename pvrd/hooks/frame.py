# SPDX-License-Identifier: Apache-2.0
"""A live frame: its shape, what it is on its way, and what comes back (pvrd/hooks/frames.py)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pvrd.client_video import Planes, VideoSession


@dataclass(frozen=True)
class Shape:
    """The frames that come: sizes in pixels; pixel i420, nv12, i444 or gray, 8 bits."""

    width: int
    height: int
    pixel: str = "i420"
    siting: str = "left"
    full_range: bool = False

    def planes(self, width: int = 0, height: int = 0) -> list[tuple[int, int]]:
        """(rows, samples) of each plane, of this size or another."""
        w, h = width or self.width, height or self.height
        half = ((h + 1) // 2, (w + 1) // 2)
        return [(h, w)] + {
            "gray": [],
            "i420": [half, half],
            "nv12": [(half[0], 2 * half[1])],
            "i444": [(h, w)] * 2,
        }[self.pixel]


@dataclass(frozen=True)
class Result:
    """An enlarged frame; the planes are its own until the next take(). `device` is empty where it
    was scaled plainly here, `degraded` says that pvrd made it by less than its network."""

    ticket: Any
    planes: Planes  # or what `plain` made of them, where device is empty
    device: str
    degraded: bool


@dataclass
class Entry:
    """A frame that was fed and not taken yet."""

    ticket: Any
    seq: int = 0
    video: VideoSession | None = None  # where it is under way, in `slot`
    slot: int = 0
    planes: Planes | None = None  # its own copy where there was no session
    due: float = 0.0  # CLOCK_MONOTONIC seconds, 0: any time will do
    flushed: bool = False
