# SPDX-License-Identifier: Apache-2.0
"""pointwise: an activation, a scale for each channel, a sum or a product of two values, on feature
maps (kernels/maps.py).

y = act(v), where v = s * a + t, plus u * b (mode SUM), or times b (mode PRODUCT). The constants
hold for a channel each; w: f32 s, t, u, slope, each as long as the channels of all blocks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from kernels import maps
from kernels.contract import Bind, Contract, Variant

ALONE, SUM, PRODUCT = range(3)


def reference(params: maps.Array, buffers: Mapping[str, Any], push: Mapping[str, Any]) -> None:
    blocks, lanes = int(push["blocks"]), int(push["lanes"])
    a, b, y = (maps.view(buffers[n], blocks, lanes, push) for n in ("a", "b", "y"))
    w = buffers["w"].reshape(-1).view(np.float32)[: 4 * blocks * lanes]
    s, t, u, slope = w.reshape(4, blocks, 1, 1, lanes)
    v = s * a + t
    if push["mode"] == SUM:
        v = v + u * b
    elif push["mode"] == PRODUCT:
        v = v * b
    y[:] = maps.activated(push["act"], v, slope, 0.0)


OP = Contract(
    name="pointwise",
    bindings=(Bind("a", "r"), Bind("b", "r"), Bind("w", "r"), Bind("y", "w")),
    push=(
        ("blocks", "u32"),
        ("lanes", "u32"),
        ("mode", "u32"),
        ("act", "u32"),
        *maps.geometry(),
    ),
    variants=(Variant("base", (32, 1, 1)),),
    groups=maps.groups_of_pixels(1),
    reference=reference,
)
