# SPDX-License-Identifier: Apache-2.0
"""shuffle_out: the network's four maps and the filtered luma -> samples of the enlarged band (pixel
shuffle x2).

Output sample (2Y + a, 2X + b), with p = 2a + b and core pixel (y, x) of tile t at frame column X =
(COL0 + t) * tw + x and frame row Y = BAND_Y + y, is f[t][y][p][x] + sum over 5x5 of base[p][5i + j]
* luma[t][y + halo - 2 + i][x + halo - 2 + j], times the largest sample, rounded, packed into words.
Output rows are `stride` words apart, the first is frame row 2 * BAND_Y. Pixels beyond WIDTH or
HEIGHT may be left unwritten; words past the stride are. tw is a multiple of 4.
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
    bits, tw, th, halo, xs = (push[k] for k in ("bits", "tw", "th", "halo", "xs"))
    stride = push["stride"] * (4 if bits == 8 else 2)
    dst = video.samples(buffers["dst"], bits)
    dst = dst[: dst.size // stride * stride].reshape(-1, stride)
    f, luma = video.floats(buffers["f"]), video.floats(buffers["luma"])
    base = video.floats(buffers["base"])[:100].reshape(4, 5, 5)
    rows = min(th, p[video.HEIGHT] - p[video.BAND_Y])
    for tile in range(p[video.N_TILES]):
        x0 = (p[video.COL0] + tile) * tw
        cols = min(tw, p[video.WIDTH] - x0)
        if cols <= 0 or rows <= 0:
            continue
        window = luma[tile * push["luma_tile"] :][: (th + 2 * halo) * xs].reshape(-1, xs)
        window = window[halo - 2 : halo + 2 + rows, halo - 2 : halo + 2 + cols]
        maps = f[tile * push["f_tile"] :][: rows * 4 * xs].reshape(rows, 4, xs)[:, :, :cols]
        top = np.float32((1 << bits) - 1)
        out = (video.phases_x2(window, base) + maps.transpose(1, 0, 2)) * top
        q = video.quantise(out.astype(np.float32), bits).reshape(2, 2, rows, cols)
        dst[: 2 * rows, 2 * x0 : 2 * (x0 + cols)] = q.transpose(2, 0, 3, 1).reshape(2 * rows, -1)


OP = Contract(
    name="shuffle_out",
    bindings=(Bind("f", "r"), Bind("luma", "r"), Bind("base", "r"), Bind("dst", "w")),
    push=(
        ("bits", "u32"),
        ("stride", "u32"),
        ("tw", "u32"),
        ("th", "u32"),
        ("halo", "u32"),
        ("xs", "u32"),
        ("f_tile", "u32"),
        ("luma_tile", "u32"),
    ),
    variants=(Variant("base", (32, 1, 1)),),
    groups=_groups,
    reference=reference,
)
