# SPDX-License-Identifier: Apache-2.0
"""luma_in: samples of a band -> float tiles with their halo.

y[tile][row][x] = scale * sample at frame row BAND_Y - halo + row, column (COL0 + tile) * tw - halo
+ x, border repeated, for row < th + 2 halo and x < xs. Input rows are `stride` words apart, the
first is frame row SRC_Y. Tiles lie `y_tile` floats apart.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from kernels import video
from kernels.contract import Bind, Contract, Variant


def reference(params: video.Array, buffers: Mapping[str, Any], push: Mapping[str, Any]) -> None:
    p = [int(v) for v in params]
    stride = push["stride"] * (4 if push["bits"] == 8 else 2)
    rows, xs, halo = push["th"] + 2 * push["halo"], push["xs"], push["halo"]
    src = video.samples(buffers["src"], push["bits"])
    src = src[: src.size // stride * stride].reshape(-1, stride)
    y = video.floats(buffers["y"])
    iy = video.clamped(p[video.BAND_Y] - halo, rows, p[video.HEIGHT]) - p[video.SRC_Y]
    for tile in range(p[video.N_TILES]):
        ix = video.clamped((p[video.COL0] + tile) * push["tw"] - halo, xs, p[video.WIDTH])
        values = src[iy[:, None], ix].astype(np.float32) * np.float32(push["scale"])
        y[tile * push["y_tile"] :][: rows * xs] = values.reshape(-1)


OP = Contract(
    name="luma_in",
    bindings=(Bind("src", "r"), Bind("y", "w")),
    push=(
        ("bits", "u32"),
        ("stride", "u32"),
        ("tw", "u32"),
        ("th", "u32"),
        ("halo", "u32"),
        ("xs", "u32"),
        ("y_tile", "u32"),
        ("scale", "f32"),
    ),
    variants=(Variant("base", (32, 1, 1)),),
    groups=video.groups_of_rows,
    reference=reference,
)
