# SPDX-License-Identifier: Apache-2.0
"""filter_out: a plane of samples (or two, by turns) enlarged by scale^2 filters of 5x5.

With `step` components by turns, output pixel (scale y + a, scale x + b) of component c is the sum
over 5x5 of filters[scale a + b][5i + j] * plane c at (y - 2 + i, x - 2 + j), border repeated,
rounded, packed. The plane is C_WIDTH x C_HEIGHT pixels; the band's input begins with row C_SRC_Y,
its C_ROWS core rows with C_BAND_Y; rows are `stride` and `out_stride` words apart. Every word of
C_WIDTH pixels that lies within out_stride is written. `rows` and `words`: the most that the
dispatch has to serve (core rows; words of an output row). bits 8 or 16, step 1 or 2, scale 2 to 4.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from kernels import video
from kernels.contract import Bind, Contract, Groups, Variant, ceil_div


def _groups(push: Mapping[str, Any], variant: Variant) -> Groups:
    return ceil_div(push["words"], variant.workgroup[0]), push["scale"] * push["rows"], 1


def reference(params: video.Array, buffers: Mapping[str, Any], push: Mapping[str, Any]) -> None:
    p = [int(v) for v in params]
    bits, step, scale = push["bits"], push["step"], push["scale"]
    each = 4 if bits == 8 else 2
    stride, out_stride = push["stride"] * each, push["out_stride"] * each
    src, dst = video.samples(buffers["src"], bits), video.samples(buffers["dst"], bits)
    src = src[: src.size // stride * stride].reshape(-1, stride)
    dst = dst[: dst.size // out_stride * out_stride].reshape(-1, out_stride)
    filters = video.floats(buffers["filters"])[: 25 * scale * scale].reshape(-1, 5, 5)
    rows, cols = p[video.C_ROWS], p[video.C_WIDTH]
    iy = video.clamped(p[video.C_BAND_Y] - 2, rows + 4, p[video.C_HEIGHT]) - p[video.C_SRC_Y]
    ix = video.clamped(-2, cols + 4, cols)
    for c in range(step):
        window = src[iy[:, None], ix * step + c].astype(np.float32)
        wide = video.shuffled(video.quantise(video.phases(window, filters), bits), scale)
        room = len(range(c, out_stride, step))
        dst[: scale * rows, c : scale * cols * step : step] = wide[:, :room]


OP = Contract(
    name="filter_out",
    bindings=(Bind("src", "r"), Bind("filters", "r"), Bind("dst", "w")),
    push=(
        ("bits", "u32"),
        ("step", "u32"),
        ("scale", "u32"),
        ("stride", "u32"),
        ("out_stride", "u32"),
        ("rows", "u32"),
        ("words", "u32"),
    ),
    variants=(Variant("base", (32, 1, 1)),),
    groups=_groups,
    reference=reference,
)
