# SPDX-License-Identifier: Apache-2.0
"""pixel_shuffle: channels to pixels, or back, on feature maps (kernels/maps.py).

Up (`down` 0): y[c] at (row, column) is x[c * cs + a * as + b * bs] at (row / s, column / s), with a
and b what the divisions leave. Down (`down` 1): y[c * cs + a * as + b * bs] at (row, column) is
x[c] at (row * s + a, column * s + b). `channels` counts c. Other channels of y become 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from kernels import maps
from kernels.contract import Bind, Contract, Variant


def reference(params: maps.Array, buffers: Mapping[str, Any], push: Mapping[str, Any]) -> None:
    s, count = int(push["s"]), int(push["channels"])
    blocks, lanes, xl = int(push["blocks"]), int(push["lanes"]), int(push["xl"])
    most = (count - 1) * push["cs"] + (s - 1) * (push["as"] + push["bs"]) + 1
    used = count if push["down"] else most
    x = maps.view(buffers["x"], -(-used // xl), xl, push, "x_")
    planes = x.transpose(0, 3, 1, 2).reshape(-1, *x.shape[1:3])
    out = np.zeros((blocks * lanes, push["h"], push["w"]), np.float32)
    for c in range(count):
        for a in range(s):
            for b in range(s):
                deep = c * push["cs"] + a * push["as"] + b * push["bs"]
                if push["down"]:
                    out[deep] = planes[c, a::s, b::s]
                else:
                    out[c, a::s, b::s] = planes[deep]
    shaped = out.reshape(blocks, lanes, push["h"], push["w"]).transpose(0, 2, 3, 1)
    maps.view(buffers["y"], blocks, lanes, push)[:] = shaped


OP = Contract(
    name="pixel_shuffle",
    bindings=(Bind("x", "r"), Bind("y", "w")),
    push=(
        ("blocks", "u32"),
        ("lanes", "u32"),
        ("xl", "u32"),
        ("channels", "u32"),
        ("s", "u32"),
        ("down", "u32"),
        ("cs", "u32"),
        ("as", "u32"),
        ("bs", "u32"),
        *maps.geometry("x_"),
        *maps.geometry(),
    ),
    variants=(Variant("base", (32, 1, 1)),),
    groups=maps.groups_of_pixels(1),
    reference=reference,
)
