# SPDX-License-Identifier: Apache-2.0
"""resample: packed samples of a plane -> another size, by separable filters of any ratio.

Output pixel (y, x) is the sum over i < taps_down and j < taps_across of down[y].w[i] *
across[x].w[j] * the sample at (down[y].at + i, across[x].at + j), rounded, packed; the same for
each of `step` components that lie by turns. down and across: for each row or column of the whole
output a record of u32 at, then f32 w[taps]; all that they name lies inside of the plane. Five
parameter words from `plane` on (WIDTH or C_WIDTH): the input's width in pixels and its height, the
output row that the dst buffer begins with, the input row that the src buffer begins with, output
rows. Rows are `stride` and `out_stride` words apart; written are `width` pixels a row, in whole
words. `rows`: the most that the dispatch has to serve.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from kernels import video
from kernels.contract import Bind, Contract, Groups, Variant, ceil_div


def table(at: video.Array, weights: video.Array) -> video.Array:
    """The records [n, 1 + taps] as u32 of positions [n] and weights [n, taps]."""
    words = np.ascontiguousarray(weights, np.float32).view(np.uint32)
    return np.concatenate([np.asarray(at, np.uint32)[:, None], words], axis=1)


def _records(words: video.Array, taps: int, first: int, count: int) -> tuple[Any, Any]:
    """Positions [count, taps] and weights [count, taps] of some records."""
    rows = words.reshape(-1).view(np.uint32)[first * (taps + 1) :][: count * (taps + 1)]
    rows = rows.reshape(count, taps + 1)
    at = rows[:, :1].astype(np.int64) + np.arange(taps)
    return at, np.ascontiguousarray(rows[:, 1:]).view(np.float32)


def _groups(push: Mapping[str, Any], variant: Variant) -> Groups:
    return ceil_div(push["out_stride"], variant.workgroup[0]), push["rows"], 1


def reference(params: video.Array, buffers: Mapping[str, Any], push: Mapping[str, Any]) -> None:
    p = [int(v) for v in params]
    bits, step, width = push["bits"], push["step"], push["width"]
    _, _, out_y, src_y, rows = p[push["plane"] : push["plane"] + 5]
    each = 4 if bits == 8 else 2
    stride, out_stride = push["stride"] * each, push["out_stride"] * each
    src, dst = video.samples(buffers["src"], bits), video.samples(buffers["dst"], bits)
    src = src[: src.size // stride * stride].reshape(-1, stride)
    dst = dst[: dst.size // out_stride * out_stride].reshape(-1, out_stride)
    iy, wy = _records(buffers["down"], push["taps_down"], out_y, rows)
    ix, wx = _records(buffers["across"], push["taps_across"], 0, width)
    for c in range(step):
        lines = np.zeros((rows, src[:, c::step].shape[1]), np.float32)
        for i in range(push["taps_down"]):
            lines += wy[:, i, None] * src[iy[:, i] - src_y, c::step]
        out = np.zeros((rows, width), np.float32)
        for j in range(push["taps_across"]):
            out += wx[:, j] * lines[:, ix[:, j]]
        dst[:rows, c : width * step : step] = video.quantise(out, bits)


OP = Contract(
    name="resample",
    bindings=(Bind("src", "r"), Bind("down", "r"), Bind("across", "r"), Bind("dst", "w")),
    push=(
        ("bits", "u32"),
        ("step", "u32"),
        ("plane", "u32"),
        ("stride", "u32"),
        ("out_stride", "u32"),
        ("width", "u32"),
        ("taps_down", "u32"),
        ("taps_across", "u32"),
        ("rows", "u32"),
    ),
    variants=(Variant("base", (32, 1, 1)),),
    groups=_groups,
    reference=reference,
)
