# SPDX-License-Identifier: Apache-2.0
"""Caps of the element pvrupscale: which sizes go out for those that come in, and the reverse.

A `scale` of 0 stands for any enlargement up to MOST times, each side.
"""

from __future__ import annotations

from typing import Any

import gi

gi.require_version("Gst", "1.0")
from gi.repository import Gst  # noqa: E402

MOST = 8  # times larger, each side
LARGEST = 16384
CAPS = (
    "video/x-raw, format=(string){ I420, NV12 }, width=(int)[ 1, 16384 ], "
    "height=(int)[ 1, 16384 ], framerate=(fraction)[ 0/1, 2147483647/1 ]"
)


def structure_of(caps: Any, index: int = 0) -> Any:
    """A structure of caps, as a copy. gst-python lends it for a `with` alone from 1.26 on."""
    found = caps.get_structure(index)
    if not hasattr(found, "__enter__"):
        return found.copy()
    with found as lent:
        return lent.copy()


def larger(structure: Any, scale: float) -> Any:
    """What may go out where this comes in."""
    if scale:
        return _sizes(structure, lambda v: round(v * scale), lambda v: round(v * scale))
    return _sizes(structure, lambda v: v, lambda v: v * MOST)


def smaller(structure: Any, scale: float) -> Any:
    """What may come in where this goes out."""
    least = scale or MOST
    return _sizes(structure, lambda v: int(v / least), lambda v: int(v / (scale or 1)) + 1)


def _sizes(structure: Any, low: Any, high: Any) -> Any:
    """The structure with width and height mapped: those that are fixed by the two functions to a
    range or a number, others to all."""
    made = structure.copy()
    for field in ("width", "height"):
        fixed, value = structure.get_int(field)
        a, b = (max(low(value), 1), min(high(value), LARGEST)) if fixed else (1, LARGEST)
        text = str(a) if a == b else f"[ {a}, {b} ]"
        made.remove_field(field)
        made = Gst.Structure.from_string(f"{made.to_string()[:-1]}, {field}=(int){text};")[0]
    made.remove_field("pixel-aspect-ratio")
    return made


def enlarged(caps: Any, info: Any, found: Any, scale: float) -> Any:
    """The fixed caps that go out. caps, info (its VideoInfo): what comes in; found: what downstream
    takes. The picture's shape is kept, by its pixels' where the sizes ask for it.
    """
    width, height = info.width, info.height
    fixed = structure_of(found)
    fixed.fixate_field_nearest_int("width", round(width * (scale or 2)))
    times = fixed.get_int("width")[1] / width
    fixed.fixate_field_nearest_int("height", round(height * times))
    out_width, out_height = fixed.get_int("width")[1], fixed.get_int("height")[1]
    par_n, par_d = info.par_n * width * out_height, info.par_d * height * out_width
    made = caps.copy()
    made.set_value("width", out_width)
    made.set_value("height", out_height)
    made.set_value("pixel-aspect-ratio", Gst.Fraction(par_n, par_d))
    return made
