# SPDX-License-Identifier: Apache-2.0
"""chroma_in: chroma samples of a 4:2:0 band and the luma around them -> float tiles.

y[tile][row][channel][x], five channels: the chroma sample at row C_BAND_Y - halo + row, column
(COL0 + tile) * tw - halo + x of its plane (component `component` of `step` that lie by turns), and
the luma samples (2m, 2n), (2m, 2n + 1), (2m + 1, 2n), (2m + 1, 2n + 1) for a chroma sample (m, n);
all times `scale`. Chroma coordinates are held to C_WIDTH x C_HEIGHT, then luma's to WIDTH x HEIGHT:
borders repeat. For row < th + 2 halo and x < xs. Rows are `stride` and `luma_stride` words apart,
the first are C_SRC_Y and SRC_Y; tiles lie `y_tile` floats apart.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from kernels import video
from kernels.contract import Bind, Contract, Variant

CHANNELS = 5


def reference(params: video.Array, buffers: Mapping[str, Any], push: Mapping[str, Any]) -> None:
    p = [int(v) for v in params]
    bits, step, component = push["bits"], push["step"], push["component"]
    rows, xs, halo = push["th"] + 2 * push["halo"], push["xs"], push["halo"]

    def plane(name: str, words: int) -> video.Array:
        each = words * (4 if bits == 8 else 2)
        flat = video.samples(buffers[name], bits)
        return flat[: flat.size // each * each].reshape(-1, each)

    chroma, luma = plane("src", push["stride"]), plane("luma", push["luma_stride"])
    y = video.floats(buffers["y"])
    m = video.clamped(p[video.C_BAND_Y] - halo, rows, p[video.C_HEIGHT])[:, None]
    for tile in range(p[video.N_TILES]):
        n = video.clamped((p[video.COL0] + tile) * push["tw"] - halo, xs, p[video.C_WIDTH])
        values = [chroma[m - p[video.C_SRC_Y], n * step + component]]
        for a in (0, 1):
            for b in (0, 1):
                ly = np.minimum(2 * m + a, p[video.HEIGHT] - 1) - p[video.SRC_Y]
                values.append(luma[ly, np.minimum(2 * n + b, p[video.WIDTH] - 1)])
        out = np.stack(values, axis=1).astype(np.float32) * np.float32(push["scale"])
        y[tile * push["y_tile"] :][: out.size] = out.reshape(-1)


OP = Contract(
    name="chroma_in",
    bindings=(Bind("src", "r"), Bind("luma", "r"), Bind("y", "w")),
    push=(
        ("bits", "u32"),
        ("step", "u32"),
        ("component", "u32"),
        ("stride", "u32"),
        ("luma_stride", "u32"),
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
