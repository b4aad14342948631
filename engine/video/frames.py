# SPDX-License-Identifier: Apache-2.0
"""Formats of frames and how their planes lie (docs/architecture.md, "Frame ring layout")."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from engine.errors import InvalidArgument

Bytes = npt.NDArray[np.uint8]

LARGEST = 16384  # samples of an input's side
ALIGN = 64  # strides

# What the planes of each pixel format hold: luma, chroma at half size (u, v, or both by turns),
# chroma at full size, and, in pictures only, alpha.
PLANES: dict[str, tuple[str, ...]] = {
    "gray": ("y",),
    "i420": ("y", "half", "half"),
    "nv12": ("y", "pairs"),
    "i444": ("y", "full", "full"),
    "graya": ("y", "alpha"),
    "i444a": ("y", "full", "full", "alpha"),
}


@dataclass(frozen=True)
class Plane:
    """Where a plane lies: bytes from the start of the slot, bytes from row to row, samples of a
    row, rows.
    """

    offset: int
    stride: int
    width: int
    height: int

    @property
    def nbytes(self) -> int:
        return self.stride * self.height


@dataclass(frozen=True)
class FrameFormat:
    """A frame: sizes in luma samples. Samples of depth 16 are little-endian and use the whole
    range.
    """

    width: int
    height: int
    pixel: str = "i420"
    depth: int = 8
    siting: str = "left"
    full_range: bool = False
    matrix: str = ""  # 601, 709, 2020, "" (by the height), or rgb: the planes are red, green, blue

    def __post_init__(self) -> None:
        if not (1 <= self.width <= LARGEST and 1 <= self.height <= LARGEST):
            raise InvalidArgument(
                f"A frame of {self.width}x{self.height} is outside of 1x1 to {LARGEST}x{LARGEST}."
            )
        if self.pixel not in PLANES:
            raise InvalidArgument(f"The pixel format {self.pixel!r} is not known.")
        if self.depth not in (8, 16):
            raise InvalidArgument(f"Samples of {self.depth} bits are not taken: 8 or 16.")
        if self.siting not in ("left", "centre"):
            raise InvalidArgument(
                f"The chroma siting {self.siting!r} is not known: left or centre."
            )
        if self.matrix not in ("", "601", "709", "2020", "rgb"):
            raise InvalidArgument(f"The matrix {self.matrix!r} is not known: 601, 709 or 2020.")

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> FrameFormat:
        """The format of a message.

        Raises:
            InvalidArgument: a field is missing, unknown or out of range.
        """
        try:
            return cls(
                int(data["width"]),
                int(data["height"]),
                str(data.get("pixel", "i420")),
                int(data.get("depth", 8)),
                str(data.get("siting", "left")),
                bool(data.get("full_range", False)),
                str(data.get("matrix") or ""),
            )
        except (KeyError, TypeError, ValueError):
            raise InvalidArgument("The frame format is not understood.") from None

    @property
    def sample_bytes(self) -> int:
        return self.depth // 8

    @property
    def roles(self) -> tuple[str, ...]:
        """What each plane holds, a word of PLANES."""
        return PLANES[self.pixel]

    def sized(self, width: int, height: int) -> FrameFormat:
        """The same format in another size, which may be larger than LARGEST."""
        out = replace(self, width=1, height=1)
        object.__setattr__(out, "width", width)
        object.__setattr__(out, "height", height)
        return out

    def scaled(self, scale: int) -> FrameFormat:
        """The format of the enlarged frame."""
        return self.sized(self.width * scale, self.height * scale)

    def pixels(self, role: str) -> tuple[int, int]:
        """Pixels across and down of a plane; one of "pairs" has two samples a pixel."""
        if role in ("half", "pairs"):
            return (self.width + 1) // 2, (self.height + 1) // 2
        return self.width, self.height

    @functools.lru_cache(maxsize=256)  # noqa: B019 - a format is a value
    def planes(self, start: int = 0) -> tuple[Plane, ...]:
        """The planes one after the other from byte `start` on."""
        found = []
        for role in self.roles:
            w, h = self.pixels(role)
            w *= 2 if role == "pairs" else 1
            stride = -(-w * self.sample_bytes // ALIGN) * ALIGN
            found.append(Plane(start, stride, w, h))
            start += stride * h
        return tuple(found)


def planes_of(layout: Sequence[Mapping[str, Any]], fmt: FrameFormat) -> tuple[Plane, ...]:
    """The planes that a message describes.

    Raises:
        InvalidArgument: they are not those of the format.
    """
    try:
        found = tuple(
            Plane(*(int(p[k]) for k in ("offset", "stride", "width", "height"))) for p in layout
        )
    except (KeyError, TypeError, ValueError):
        raise InvalidArgument("The layout of the planes is not understood.") from None
    wanted = fmt.planes()
    if [(p.stride, p.width, p.height) for p in found] != [
        (p.stride, p.width, p.height) for p in wanted
    ]:
        raise InvalidArgument("The layout of the planes does not fit the format.")
    return found


def views(memory: Any, planes: Sequence[Plane], start: int = 0) -> list[Bytes]:
    """The planes of a slot that begins at byte `start` of mapped memory: uint8 [height, stride], no
    copies.

    Raises:
        InvalidArgument: a plane lies outside.
    """
    flat = (
        np.frombuffer(memory, np.uint8)
        if not isinstance(memory, np.ndarray)
        else memory.reshape(-1)
    )
    found = []
    for p in planes:
        begin = start + p.offset
        if begin < 0 or begin + p.nbytes > flat.size:
            raise InvalidArgument("A plane lies outside of the ring.")
        found.append(flat[begin : begin + p.nbytes].reshape(p.height, p.stride))
    return found


def empty(fmt: FrameFormat) -> list[Bytes]:
    """Planes of zeros for a frame."""
    return [np.zeros((p.height, p.stride), np.uint8) for p in fmt.planes()]


def samples(plane: Bytes, width: int, depth: int) -> npt.NDArray[Any]:
    """[height, stride] bytes as [height, width] samples, a view."""
    return plane.view(np.uint8 if depth == 8 else np.dtype("<u2"))[:, :width]
