# SPDX-License-Identifier: Apache-2.0
"""maps_in: packed samples of one plane -> its part of a network's input (kernels/maps.py).

The window's sample (row, column) becomes c<k> * v + o<k> in channel k, or is added to what is there
(`add` 1). v is the plane's value there, on the scale of its samples: of a plane of half size
(`half` 1) the bilinear interpolation, whose samples lie between the luma samples in both directions
(`centred` 1) or vertically alone. The src buffer begins at row Y0 of the plane, or at row max(0, Y0
/ 2 - 1) of one of half size; X0 and Y0 are even. Beyond plane_w x plane_h the border repeats. step
2: every second sample, from `phase` on. Channels 3.. become 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from kernels import maps, video
from kernels.contract import Bind, Contract, Variant


def axis(begin: int, count: int, size: int, half: int, centred: int) -> tuple[Any, Any, Any]:
    """Two indices and the second's weight, for samples begin.. of an axis of the frame."""
    at = np.arange(begin, begin + count)
    if not half:
        i = np.clip(at, 0, size - 1)
        return i, i, np.zeros(count, np.float32)
    place = at / 2 - (0.25 if centred else 0)
    low = np.floor(place).astype(np.int64)
    share = (place - low).astype(np.float32)
    return np.clip(low, 0, size - 1), np.clip(low + 1, 0, size - 1), share


def reference(params: maps.Array, buffers: Mapping[str, Any], push: Mapping[str, Any]) -> None:
    bits, step, half = int(push["bits"]), int(push["step"]), int(push["half"])
    stride = push["stride"] * (4 if bits == 8 else 2)
    src = video.samples(buffers["src"], bits)
    src = src[: src.size // stride * stride].reshape(-1, stride)[:, push["phase"] :: step]
    x0, y0 = int(params[maps.X0]), int(params[maps.Y0])
    first = max(0, y0 // 2 - 1) if half else y0
    ya, yb, ys = axis(y0, push["h"], push["plane_h"], half, 1)
    xa, xb, xs = axis(x0, push["w"], push["plane_w"], half, push["centred"])
    ya, yb = (ya - first)[:, None], (yb - first)[:, None]
    f = src.astype(np.float32)
    above = f[ya, xa] + xs * (f[ya, xb] - f[ya, xa])
    below = f[yb, xa] + xs * (f[yb, xb] - f[yb, xa])
    value = above + ys[:, None] * (below - above)
    y = maps.view(buffers["y"], 1, int(push["lanes"]), push)[0]
    if not push["add"]:
        y[:] = 0
    for k in range(3):
        y[:, :, k] += np.float32(push[f"c{k}"]) * value + np.float32(push[f"o{k}"])


OP = Contract(
    name="maps_in",
    bindings=(Bind("src", "r"), Bind("y", "rw")),
    push=(
        ("bits", "u32"),
        ("stride", "u32"),
        ("step", "u32"),
        ("phase", "u32"),
        ("half", "u32"),
        ("centred", "u32"),
        ("plane_w", "u32"),
        ("plane_h", "u32"),
        ("add", "u32"),
        ("lanes", "u32"),
        *maps.geometry(),
        ("c0", "f32"),
        ("c1", "f32"),
        ("c2", "f32"),
        ("o0", "f32"),
        ("o1", "f32"),
        ("o2", "f32"),
    ),
    variants=(Variant("base", (32, 1, 1)),),
    groups=lambda push, variant: (-(-push["w"] // variant.workgroup[0]), push["h"], 1),
    reference=reference,
)
