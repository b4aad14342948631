# SPDX-License-Identifier: Apache-2.0
"""conv3x3: a 3x3 convolution without padding and PReLU, on tiles of float channels.

x and y lie [tile][row][channel][xs]: a row of one channel after the other, so that neighbours in x
are neighbours in memory on every device; tiles are `x_tile` and `y_tile` floats apart. y[r, o, i] =
act(bias[o] + sum w[c, 3a + b, o] * x[r + a, c, i + b]) for r < rows and i < xs: the two last
columns of a row read into the next one and mean nothing, and each buffer has PAD floats of room
behind its last tile. act(v) = v where v > 0, else slope[o] * v; slope 1 is no activation. w:
[cin][9][cout], then bias [cout], then slope [cout]. cout is 4 or a multiple of 8, xs a multiple of
16.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from kernels import video
from kernels.contract import Bind, Contract, Groups, Variant, ceil_div

PAD = 64


def variant_for(cout: int) -> str:
    """The baseline variant that does so many channels."""
    return "oc8" if cout % 8 == 0 else "oc4"


def _groups(push: Mapping[str, Any], variant: Variant) -> Groups:
    each = int(variant.defines["OC"])
    return (
        ceil_div(push["xs"] // 4, variant.workgroup[0]),
        push["rows"],
        push["tokens"] * (push["cout"] // each),
    )


def reference(params: video.Array, buffers: Mapping[str, Any], push: Mapping[str, Any]) -> None:
    cin, cout, rows, xs = (push[k] for k in ("cin", "cout", "rows", "xs"))
    x, y, w = (video.floats(buffers[k]) for k in ("x", "y", "w"))
    taps = w[: cin * 9 * cout].reshape(cin, 3, 3, cout)
    bias, slope = w[cin * 9 * cout :][: 2 * cout].reshape(2, cout, 1)
    for tile in range(int(params[video.N_TILES])):
        at = tile * push["x_tile"]
        flat = x[at : at + (rows + 2) * cin * xs + 2]
        out = np.broadcast_to(bias, (rows, cout, xs)).astype(np.float32)
        for a in range(3):
            for b in range(3):
                part = flat[a * cin * xs + b :][: rows * cin * xs].reshape(rows, cin, xs)
                out += taps[:, a, b].T @ part
        out = np.where(out > 0, out, slope * out)
        y[tile * push["y_tile"] :][: out.size] = out.reshape(-1)


OP = Contract(
    name="conv3x3",
    bindings=(Bind("x", "r"), Bind("w", "r"), Bind("y", "w")),
    push=(
        ("cin", "u32"),
        ("cout", "u32"),
        ("rows", "u32"),
        ("xs", "u32"),
        ("x_tile", "u32"),
        ("y_tile", "u32"),
    ),
    variants=(
        Variant("oc8", (32, 1, 1), {"OC": "8"}),
        Variant("oc4", (32, 1, 1), {"OC": "4"}),
    ),
    groups=_groups,
    reference=reference,
)
