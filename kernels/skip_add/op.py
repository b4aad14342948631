# SPDX-License-Identifier: Apache-2.0
"""skip_add: what an earlier convolution gave is added to a later one's result, then PReLU.

y[t][r][c][x] = act(y[t][r][c][x] + kept[t][r + offset][c][x + offset]) for r < rows and x < xs:
`kept` is that many rings larger, since no convolution pads. act(v) = v where v > 0, else slope[c] *
v. The last `offset` columns of a row read into the next one and mean nothing. Both lie
[tile][row][channel][xs], `tile` floats from tile to tile. xs is a multiple of 16.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from kernels import video
from kernels.contract import Bind, Contract, Groups, Variant, ceil_div


def _groups(push: Mapping[str, Any], variant: Variant) -> Groups:
    vectors = push["channels"] * push["xs"] // 4
    return ceil_div(vectors, variant.workgroup[0]), push["rows"], push["tokens"]


def reference(params: video.Array, buffers: Mapping[str, Any], push: Mapping[str, Any]) -> None:
    channels, rows, offset, xs = (push[k] for k in ("channels", "rows", "offset", "xs"))
    y, kept = video.floats(buffers["y"]), video.floats(buffers["kept"])
    slope = video.floats(buffers["slope"])[:channels, None]
    row = channels * xs
    for tile in range(int(params[video.N_TILES])):
        at = tile * push["tile"]
        value = y[at : at + rows * row].reshape(rows, channels, xs)
        other = kept[at + offset * row + offset :][: rows * row].reshape(rows, channels, xs)
        total = value + other
        value[:] = np.where(total > 0, total, slope * total)


OP = Contract(
    name="skip_add",
    bindings=(Bind("kept", "r"), Bind("slope", "r"), Bind("y", "rw")),
    push=(
        ("channels", "u32"),
        ("rows", "u32"),
        ("offset", "u32"),
        ("xs", "u32"),
        ("tile", "u32"),
    ),
    variants=(Variant("base", (32, 1, 1)),),
    groups=_groups,
    reference=reference,
)
