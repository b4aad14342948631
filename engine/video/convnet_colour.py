# SPDX-License-Identifier: Apache-2.0
"""Planes of frames and the maps of a network: which plane is what of the input, and how the result
becomes planes again.

A network of three channels sees red, green and blue in 0..1. Frames of luma and chroma are taken
there, and back, by the matrix of the format; chroma of half size is interpolated bilinearly on the
way and averaged on the way back. A network of one channel sees luma as it is, over the range of the
samples; chroma is then enlarged bicubically, and so is alpha always.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from engine.video.frames import FrameFormat
from kernels.plane_scale.op import REACH, TAPS

MATRICES = {"601": (0.299, 0.114), "709": (0.2126, 0.0722), "2020": (0.2627, 0.0593)}
HIGH = 720  # frames of so many rows and more are BT.709 where nobody says it
FILTER_BYTES = 512  # of a table of filters
_CENTRE, _LEFT = 0, 1  # the tables of `plane_filters`

Floats = tuple[float, ...]


@dataclass(frozen=True)
class Plane:
    """A plane of frames of `frame_width` x `frame_height`: `width` x `height` pixels with `step`
    samples each, of `bits`, in rows of `stride` words (enlarged: `out_stride`).

    `tones`: for each of the pixel's samples what kernels/maps_in takes (c0..c2, o0..o2), or nothing
    where the network does not see the plane. `shades` and `offset`: what kernels/maps_out takes, or
    nothing: the plane is enlarged by the filters of table `filters`.
    """

    role: str
    bits: int
    step: int
    half: bool
    centred: bool
    width: int
    height: int
    frame_width: int
    frame_height: int
    stride: int
    out_stride: int
    tones: tuple[Floats, ...] = ()
    shades: Floats = ()
    offset: float = 0.0

    @property
    def filters(self) -> int:
        return _LEFT if self.half and not self.centred else _CENTRE

    def in_rows(self, window: int) -> int:
        """Rows of the input buffer for a window of so many frame rows."""
        return (window // 2 + 1 if self.half else window) + 2 * REACH

    def out_rows(self, window: int, scale: int) -> int:
        """Rows of the output buffer."""
        return scale * ((window + 1) // 2 if self.half else window)

    def rows(self, begin: int, end: int, reach: int) -> tuple[int, int]:
        """The plane's rows for frame rows begin..end-1 with `reach` of its own rows around."""
        if self.half:
            begin, end = begin // 2, (end + 1) // 2
        return max(0, min(begin - reach, self.height - 1)), min(self.height, end + reach)


def planes(fmt: FrameFormat, scale: int, colours: int) -> tuple[Plane, ...]:
    """The planes of a format for a network of 1 or 3 channels."""
    found = []
    sizes = zip(fmt.roles, fmt.planes(), fmt.scaled(scale).planes(), strict=True)
    tones, shades = _luma(fmt) if colours == 1 else _colours(fmt)
    for i, (role, small, large) in enumerate(sizes):
        width, height = fmt.pixels(role)
        half = role in ("half", "pairs")
        found.append(
            Plane(
                role,
                fmt.depth,
                2 if role == "pairs" else 1,
                half,
                fmt.siting == "centre",
                width,
                height,
                fmt.width,
                fmt.height,
                small.stride // 4,
                large.stride // 4,
                tones.get(i, ()),
                *shades.get(i, ((), 0.0)),
            )
        )
    return tuple(found)


Tones = dict[int, tuple[Floats, ...]]
Shades = dict[int, tuple[Floats, float]]
_NONE = (0.0, 0.0, 0.0)


def _luma(fmt: FrameFormat) -> tuple[Tones, Shades]:
    top = float((1 << fmt.depth) - 1)
    return {0: ((1 / top, 0, 0, *_NONE),)}, {0: ((top, 0, 0, *_NONE), 0.0)}


def _codes(fmt: FrameFormat) -> tuple[float, float, float, float]:
    """Black and the range of luma, the middle and the range of chroma, in sample values."""
    unit, top = float(1 << (fmt.depth - 8)), float((1 << fmt.depth) - 1)
    if fmt.full_range:
        return 0.0, top, 128 * unit, top
    return 16 * unit, 219 * unit, 128 * unit, 224 * unit


def _colours(fmt: FrameFormat) -> tuple[Tones, Shades]:
    if fmt.matrix == "rgb" and "full" in fmt.roles:
        top = float((1 << fmt.depth) - 1)
        rows = np.eye(3)
        tones: Tones = {k: ((*(rows[k] / top), *_NONE),) for k in range(3)}
        return tones, {k: ((*(rows[k] * top), *_NONE), 0.0) for k in range(3)}
    kr, kb = MATRICES.get(fmt.matrix) or MATRICES["709" if fmt.height >= HIGH else "601"]
    kg = 1 - kr - kb
    black, luma, middle, chroma = _codes(fmt)
    to_y = np.array([kr, kg, kb])
    to_u, to_v = np.array([-kr, -kg, 1 - kb]), np.array([1 - kr, -kg, -kb])
    to_u, to_v = to_u / (2 * (1 - kb)), to_v / (2 * (1 - kr))
    from_u = np.array([0, -2 * kb * (1 - kb) / kg, 2 * (1 - kb)])
    from_v = np.array([2 * (1 - kr), -2 * kr * (1 - kr) / kg, 0])

    def tone(weights: npt.NDArray[np.float64], middle: float, reach: float) -> Floats:
        return (*(weights / reach), *(-middle / reach * weights))

    y = tone(np.ones(3), black, luma)
    u, v = tone(from_u, middle, chroma), tone(from_v, middle, chroma)
    shade_y, shade_u, shade_v = to_y * luma, to_u * chroma, to_v * chroma
    tones = {0: (y,)}
    shades: Shades = {0: ((*shade_y, *_NONE), black)}
    if "pairs" in fmt.roles:
        tones[1] = (u, v)
        shades[1] = ((*shade_u, *shade_v), middle)
    elif "half" in fmt.roles or "full" in fmt.roles:
        tones |= {1: (u,), 2: (v,)}
        shades |= {1: ((*shade_u, *_NONE), middle), 2: ((*shade_v, *_NONE), middle)}
    return tones, shades


def plane_filters(scale: int) -> npt.NDArray[np.uint8]:
    """The tables of kernels/plane_scale: bicubic, samples in the middle of their place or, across,
    at its left end.
    """
    tables = np.zeros((2, FILTER_BYTES // 4), np.float32)
    middle = _phases(scale, (np.arange(scale) + 0.5) / scale - 0.5)
    left = _phases(scale, np.arange(scale) / scale)
    for table, (weights, starts) in ((0, middle), (1, left)):
        flat = [middle[0].reshape(-1), weights.reshape(-1), middle[1], starts]
        numbers = np.concatenate(flat)
        tables[table, : numbers.size] = numbers
    return tables.reshape(-1).view(np.uint8)


def _phases(
    scale: int, place: npt.NDArray[np.float64], a: float = -0.5
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    below = np.floor(place)
    x = np.abs(place[:, None] - (below[:, None] + np.arange(-1, TAPS - 1)))
    near = ((a + 2) * x - (a + 3)) * x * x + 1
    far = ((x - 5) * x + 8) * x * a - 4 * a
    return np.where(x <= 1, near, far), below - 1
