# SPDX-License-Identifier: Apache-2.0
"""shuffle_out: a network's maps and its filtered input -> samples of the enlarged band (pixel
shuffle).

Output sample (scale Y + a, scale X + b), with p = scale a + b and core pixel (y, x) of tile t at
column X = (COL0 + t) * tw + x and row Y = BAND_Y + y of the plane, is f[t][y][p][x] + sum over 5x5
of base[p][5i + j] * x[t][y + halo - 2 + i][x + halo - 2 + j], times the largest sample, rounded,
packed into words as component `component` of `step` that lie by turns (component 1 after 0: it
joins what that wrote). A row of f has scale^2 maps, filled up to a multiple of 4; rows of x are
`x_row` floats apart, and the first xs of them are what is filtered. `plane` is the parameter word
of the plane's width; its height and first row of the band follow: WIDTH or C_WIDTH. Output rows are
`stride` words apart, the first is row scale * BAND_Y; words past the stride are not written. tw is
a multiple of 4.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from kernels import video
from kernels.contract import Bind, Contract, Groups, Variant, ceil_div


def _groups(push: Mapping[str, Any], variant: Variant) -> Groups:
    return ceil_div(push["tw"] // 4, variant.workgroup[0]), push["th"], push["tokens"]


def reference(params: video.Array, buffers: Mapping[str, Any], push: Mapping[str, Any]) -> None:
    p = [int(v) for v in params]
    bits, scale, step, component = (push[k] for k in ("bits", "scale", "step", "component"))
    tw, th, halo, xs, x_row = (push[k] for k in ("tw", "th", "halo", "xs", "x_row"))
    width, height, band_y = p[push["plane"] : push["plane"] + 3]
    stride = push["stride"] * (4 if bits == 8 else 2)
    dst = video.samples(buffers["dst"], bits)
    dst = dst[: dst.size // stride * stride].reshape(-1, stride)
    f, x = video.floats(buffers["f"]), video.floats(buffers["x"])
    phases, channels = scale * scale, ceil_div(scale * scale, 4) * 4
    base = video.floats(buffers["base"])[: 25 * phases].reshape(phases, 5, 5)
    rows = min(th, height - band_y)
    for tile in range(p[video.N_TILES]):
        x0 = (p[video.COL0] + tile) * tw
        cols = min(tw, width - x0)
        if cols <= 0 or rows <= 0:
            continue
        window = x[tile * push["x_tile"] :][: (th + 2 * halo) * x_row].reshape(-1, x_row)
        window = window[halo - 2 : halo + 2 + rows, halo - 2 : halo + 2 + cols]
        maps = f[tile * push["f_tile"] :][: rows * channels * xs].reshape(rows, channels, xs)
        maps = maps[:, :phases, :cols].transpose(1, 0, 2)
        top = np.float32((1 << bits) - 1)
        out = ((video.phases(window, base) + maps) * top).astype(np.float32)
        wide = video.shuffled(video.quantise(out, bits), scale)
        line = dst[: scale * rows, scale * x0 * step + component :: step]
        line[:, : scale * cols] = wide[:, : line.shape[1]]


OP = Contract(
    name="shuffle_out",
    bindings=(Bind("f", "r"), Bind("x", "r"), Bind("base", "r"), Bind("dst", "rw")),
    push=(
        ("bits", "u32"),
        ("scale", "u32"),
        ("step", "u32"),
        ("component", "u32"),
        ("plane", "u32"),
        ("stride", "u32"),
        ("tw", "u32"),
        ("th", "u32"),
        ("halo", "u32"),
        ("xs", "u32"),
        ("x_row", "u32"),
        ("f_tile", "u32"),
        ("x_tile", "u32"),
    ),
    variants=tuple(Variant(f"x{n}", (32, 1, 1), {"SCALE": str(n)}) for n in (2, 3, 4)),
    groups=_groups,
    reference=reference,
)
