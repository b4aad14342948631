# SPDX-License-Identifier: Apache-2.0
"""plane_scale: packed samples of a plane -> those of the plane enlarged s times, by separable
filters of 4 taps.

Output sample (i, j) is the sum over a and b of down[i % s][a] * across[j % s][b] * the sample at (i
/ s + down_start[i % s] + a, j / s + across_start[j % s] + b), rounded; beyond the plane its border
repeats. filters: f32 down [s][4], across [s][4], down_start [s], across_start [s]. The src buffer
begins at row max(0, c - 2) and the dst buffer at row s * c of the planes, where c is CORE_Y0, or
half of it in a plane of half size (`half` 1); written are the rows of CORE_Y0 to CORE_Y1, whole.
step 2: the samples of two planes lie there by turns.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from kernels import maps, video
from kernels.contract import Bind, Contract, Variant, ceil_div

TAPS = 4
REACH = 2  # rows that are read above and below


def reference(params: maps.Array, buffers: Mapping[str, Any], push: Mapping[str, Any]) -> None:
    bits, step, s, w, h = (int(push[k]) for k in ("bits", "step", "s", "plane_w", "plane_h"))
    each = 4 if bits == 8 else 2
    src, dst = video.samples(buffers["src"], bits), video.samples(buffers["dst"], bits)
    stride, out_stride = push["stride"] * each, push["out_stride"] * each
    src = src[: src.size // stride * stride].reshape(-1, stride)
    dst = dst[: dst.size // out_stride * out_stride].reshape(-1, out_stride)
    f = buffers["filters"].reshape(-1).view(np.float32)
    down, across = f[: 2 * TAPS * s].reshape(2, s, TAPS)
    starts = f[2 * TAPS * s :][: 2 * s].reshape(2, s).astype(np.int64)
    by = 2 if push["half"] else 1
    y0 = int(params[maps.CORE_Y0]) // by
    y1 = ceil_div(int(params[maps.CORE_Y1]), by)
    i, j = np.arange(s * y0, s * y1), np.arange(s * w)
    rows = np.clip((i // s + starts[0][i % s])[:, None] + np.arange(TAPS), 0, h - 1)
    columns = np.clip((j // s + starts[1][j % s])[:, None] + np.arange(TAPS), 0, w - 1)
    rows -= max(0, y0 - REACH)
    for phase in range(step):
        plane = src[:, phase::step].astype(np.float32)
        tall = np.einsum("itw,it->iw", plane[rows], down[i % s])
        value = np.einsum("ijt,jt->ij", tall[:, columns], across[j % s])
        dst[: len(i), phase : step * s * w : step] = video.quantise(value, bits)


OP = Contract(
    name="plane_scale",
    bindings=(Bind("src", "r"), Bind("filters", "r"), Bind("dst", "w")),
    push=(
        ("bits", "u32"),
        ("stride", "u32"),
        ("out_stride", "u32"),
        ("step", "u32"),
        ("half", "u32"),
        ("s", "u32"),
        ("plane_w", "u32"),
        ("plane_h", "u32"),
        ("rows", "u32"),
    ),
    variants=(Variant("base", (32, 1, 1)),),
    groups=lambda push, variant: (
        ceil_div(push["out_stride"], variant.workgroup[0]),
        push["rows"],
        1,
    ),
    reference=reference,
)
