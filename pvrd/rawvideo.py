# SPDX-License-Identifier: Apache-2.0
"""Raw video, planes without any header, by the names that ffmpeg gives the formats."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from pvrd.y4m import MAX_SIDE, Gather, Y4mError

# Name -> kind of planes, bits of a sample, and whether these are the upper ones of two bytes.
FORMATS = {
    "yuv420p": ("i420", 8, False),
    "nv12": ("nv12", 8, False),
    "yuv444p": ("i444", 8, False),
    "gray": ("gray", 8, False),
    "yuv420p10le": ("i420", 10, False),
    "yuv420p12le": ("i420", 12, False),
    "yuv420p16le": ("i420", 16, False),
    "yuv444p10le": ("i444", 10, False),
    "yuv444p12le": ("i444", 12, False),
    "gray10le": ("gray", 10, False),
    "gray12le": ("gray", 12, False),
    "gray16le": ("gray", 16, False),
    "p010le": ("nv12", 10, True),
}


@dataclass(frozen=True)
class RawHeader:
    """What a header would say: size in pixels, the format by ffmpeg's name."""

    width: int
    height: int
    name: str
    siting: str = "left"
    full_range: bool = False

    @property
    def pixel(self) -> str:
        """The kind of planes: i420, nv12, i444 or gray."""
        return FORMATS[self.name][0]

    @property
    def bits(self) -> int:
        """Bits of a sample; above 8 it takes two bytes."""
        return FORMATS[self.name][1]

    @property
    def upper(self) -> bool:
        """Are the bits of a sample the upper ones of its two bytes?"""
        return FORMATS[self.name][2]

    @property
    def planes(self) -> tuple[tuple[int, int], ...]:
        """(samples in a row, rows) of each plane."""
        whole = (self.width, self.height)
        half = ((self.width + 1) // 2, (self.height + 1) // 2)
        return {
            "gray": (whole,),
            "i420": (whole, half, half),
            "nv12": (whole, (2 * half[0], half[1])),
            "i444": (whole,) * 3,
        }[self.pixel]

    @property
    def frame_bytes(self) -> int:
        """Bytes of one frame."""
        return sum(w * h for w, h in self.planes) * (1 if self.bits == 8 else 2)

    def sized(self, width: int, height: int) -> RawHeader:
        """The same format in another size."""
        return replace(self, width=width, height=height)

    def line(self) -> bytes:
        """What stands before the first frame: nothing."""
        return b""


def parse(text: str) -> RawHeader:
    """`WxH` or `WxH:FORMAT`, as 1280x720:yuv420p10le.

    Raises:
        ValueError: it is none, or a format that pvrd does not take.
    """
    size, _, name = text.partition(":")
    width, _, height = size.lower().partition("x")
    header = RawHeader(int(width), int(height), name or "yuv420p")
    if header.name not in FORMATS or not (
        1 <= header.width <= MAX_SIDE and 1 <= header.height <= MAX_SIDE
    ):
        raise ValueError
    return header


class RawReader:
    """Takes a raw stream apart, as y4m.Reader does with y4m."""

    params = b""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._target: Gather | None = None
        self._begun = False
        self.frames = 0

    def fileno(self) -> int:
        """The descriptor, to poll before step()."""
        return self._fd

    def begin(self, target: Sequence[memoryview]) -> None:
        """The memory for the next frame."""
        self._target = Gather(target)
        self._begun = False

    def step(self) -> bool | None:
        """One read, as y4m.Reader.step.

        Raises:
            Y4mError: the stream ends within the frame.
        """
        assert self._target is not None
        if self._target.read(self._fd) == 0:
            if not self._begun:
                return None
            raise Y4mError(f"The clip ends within frame {self.frames}.")
        self._begun = True
        if not self._target.done:
            return False
        self.frames += 1
        return True
