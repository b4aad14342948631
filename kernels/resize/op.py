# SPDX-License-Identifier: Apache-2.0
"""resize: feature maps (kernels/maps.py) at another size by a fixed ratio num/den, by nearest,
bilinear, bicubic or whatever else is a separable filter of a few taps.

Of output sample i of a row or column the phase is p = i % num; it is the sum over t of
weight[p][t] * x[(i / num) * den + start[p] + t], where indices beyond the border repeat it. With
`residual` 1 r is added. filters: f32 weights [num][taps], then start [num] as f32.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from kernels import maps
from kernels.contract import Bind, Contract, Variant
from kernels.maps import F32

MOST_TAPS = 8


def along(
    filters: F32, push: Mapping[str, Any], size: int, source: int, begin: int = 0
) -> tuple[Any, F32]:
    """Indices and weights, [size, taps], of an axis with `source` samples before, from sample
    `begin` on.
    """
    num, den, taps = (int(push[k]) for k in ("num", "den", "taps"))
    i = np.arange(begin, begin + size)
    start = filters[num * taps :][:num].astype(np.int64)
    at = (i // num * den + start[i % num])[:, None] + np.arange(taps)
    return np.clip(at, 0, source - 1), filters[: num * taps].reshape(num, taps)[i % num]


def reference(params: maps.Array, buffers: Mapping[str, Any], push: Mapping[str, Any]) -> None:
    blocks, lanes = int(push["blocks"]), int(push["lanes"])
    # A piece (kernels/maps_pieces.py) begins at `top` and `left`, its x at `x_top` of x_all rows.
    top, left, x_top = (int(push.get(k, 0)) for k in ("top", "left", "x_top"))
    x = maps.view(buffers["x"], blocks, lanes, push, "x_")
    filters = buffers["filters"].reshape(-1).view(np.float32)
    rows, down = along(filters, push, push["h"], push.get("x_all", push["x_h"]), top)
    columns, across = along(filters, push, push["w"], push["x_w"], left)
    tall = np.einsum("bytxl,yt->byxl", x[:, rows - x_top], down)
    out = np.einsum("byxtl,xt->byxl", tall[:, :, columns], across)
    if push["residual"]:
        out = out + maps.view(buffers["r"], blocks, lanes, push)
    maps.view(buffers["y"], blocks, lanes, push)[:] = out


OP = Contract(
    name="resize",
    bindings=(Bind("x", "r"), Bind("filters", "r"), Bind("r", "r"), Bind("y", "w")),
    push=(
        ("blocks", "u32"),
        ("lanes", "u32"),
        ("num", "u32"),
        ("den", "u32"),
        ("taps", "u32"),
        ("residual", "u32"),
        *maps.geometry("x_"),
        *maps.geometry(),
    ),
    variants=(Variant("base", (32, 1, 1)),),
    groups=maps.groups_of_pixels(1),
    reference=reference,
)
