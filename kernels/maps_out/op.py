# SPDX-License-Identifier: Apache-2.0
"""maps_out: a network's result (kernels/maps.py) -> packed samples of one plane of the enlarged
frame.

The maps are held to 0..1 first. A sample of the plane is c0, c1, c2 times the channels plus o, on
the scale of samples; in a plane of half size (`half` 1) the channels are means of two rows and of
two columns (`centred` 1) or, with the column on the sample and its neighbours, of 1/4, 1/2, 1/4;
beyond the frame's frame_w x frame_h samples its border repeats. step 2: samples by turns are those
of the first constants and of d0, d1, d2, o. The dst buffer begins at the plane's row of CORE_Y0.
Written are samples of the core part of the frame (in the enlarged frame: times s) alone, in whole
words.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from kernels import maps, video
from kernels.contract import Bind, Contract, Variant, ceil_div


def core(params: maps.Array, push: Mapping[str, Any]) -> tuple[int, int, int, int]:
    """x0, y0, x1, y1: pixels of the plane that are written."""
    x0, y0, x1, y1 = (
        int(params[i]) * int(push["s"])
        for i in (maps.CORE_X0, maps.CORE_Y0, maps.CORE_X1, maps.CORE_Y1)
    )
    if push["half"]:
        return x0 // 2, y0 // 2, ceil_div(x1, 2), ceil_div(y1, 2)
    return x0, y0, x1, y1


def reference(params: maps.Array, buffers: Mapping[str, Any], push: Mapping[str, Any]) -> None:
    bits, step, s = int(push["bits"]), int(push["step"]), int(push["s"])
    stride = push["stride"] * (4 if bits == 8 else 2)
    dst = video.samples(buffers["dst"], bits)
    dst = dst[: dst.size // stride * stride].reshape(-1, stride)
    x = maps.view(buffers["x"], 1, int(push["lanes"]), push)[0, :, :, :3]
    x = np.clip(np.where(np.isfinite(x), x, 0), 0, 1).astype(np.float32)
    x0, y0, x1, y1 = core(params, push)
    left, top = s * int(params[maps.X0]), s * int(params[maps.Y0])

    def at(rows: Any, columns: Any) -> Any:
        rows = np.clip(np.clip(rows, 0, push["frame_h"] - 1) - top, 0, push["h"] - 1)
        columns = np.clip(np.clip(columns, 0, push["frame_w"] - 1) - left, 0, push["w"] - 1)
        return x[rows[:, None], columns]

    i, j = np.arange(y0, y1), np.arange(x0, x1)
    if not push["half"]:
        mean = at(i, j)
    else:
        taps = ((0, 0.5), (1, 0.5)) if push["centred"] else ((-1, 0.25), (0, 0.5), (1, 0.25))
        mean = sum(
            np.float32(0.5 * share) * at(2 * i + down, 2 * j + across)
            for down in (0, 1)
            for across, share in taps
        )
    for phase, names in enumerate((("c0", "c1", "c2"), ("d0", "d1", "d2"))[:step]):
        value = mean @ np.array([push[n] for n in names], np.float32) + np.float32(push["o"])
        dst[: y1 - y0, step * x0 + phase : step * x1 : step] = video.quantise(value, bits)


def _groups(push: Mapping[str, Any], variant: Variant) -> tuple[int, int, int]:
    halves = 2 if push["half"] else 1
    samples = ceil_div(push["w"], halves) * push["step"] + 8
    words = ceil_div(samples * push["bits"], 32)
    return ceil_div(words, variant.workgroup[0]), ceil_div(push["h"], halves), 1


OP = Contract(
    name="maps_out",
    bindings=(Bind("x", "r"), Bind("dst", "w")),
    push=(
        ("bits", "u32"),
        ("stride", "u32"),
        ("step", "u32"),
        ("half", "u32"),
        ("centred", "u32"),
        ("frame_w", "u32"),
        ("frame_h", "u32"),
        ("s", "u32"),
        ("lanes", "u32"),
        *maps.geometry(),
        ("c0", "f32"),
        ("c1", "f32"),
        ("c2", "f32"),
        ("d0", "f32"),
        ("d1", "f32"),
        ("d2", "f32"),
        ("o", "f32"),
    ),
    variants=(Variant("base", (32, 1, 1)),),
    groups=_groups,
    reference=reference,
)
