# SPDX-License-Identifier: Apache-2.0
"""nsr_chroma: a whole chroma network in one call, as nsr (kernels/nsr) is for luma.

The same as chroma_in, conv3x3 for each of the `layers` convolutions (5 -> C .. -> scale^2 maps,
filled up to a multiple of 4) and shuffle_out; w: what these have, one after the other. A tile is tw
x th samples of the chroma plane, of which component `component` of `step` that lie by turns; tw is
a multiple of 4. There is no GLSL: on a GPU each layer is a call.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import numpy as np

from kernels import video
from kernels.chroma_in import op as chroma_in
from kernels.contract import Bind, Contract, Groups, Variant, ceil_div
from kernels.nsr import op as nsr
from kernels.shuffle_out import op as shuffle_out


def reference(params: video.Array, buffers: Mapping[str, Any], push: Mapping[str, Any]) -> None:
    tw, th, c, halo, scale = (push[k] for k in ("tw", "th", "channels", "layers", "scale"))
    tiles, rows, xs = int(params[video.N_TILES]), th + 2 * halo, tw + 2 * halo
    inputs, maps = chroma_in.CHANNELS, ceil_div(scale * scale, 4) * 4
    x_tile, f_tile = rows * inputs * xs, th * maps * xs
    y, f = np.zeros(tiles * x_tile, np.float32), np.zeros((tiles, th, maps, xs), np.float32)
    both = {**push, "halo": halo, "xs": xs}
    into = {"src": buffers["src"], "luma": buffers["luma"], "y": y}
    unit = 1 / ((1 << push["bits"]) - 1)
    chroma_in.reference(params, into, both | {"y_tile": x_tile, "scale": unit})
    for tile in range(tiles):
        x = y.reshape(tiles, rows, inputs, xs)[tile].transpose(1, 0, 2)
        flat = video.floats(buffers["w"])
        for cin, cout in pairwise([inputs, *[c] * (halo - 1), maps]):
            taps = flat[: 9 * cin * cout].reshape(cin, 3, 3, cout)
            bias, slope = flat[9 * cin * cout :][: 2 * cout].reshape(2, cout)
            x = nsr.activated(nsr.convolved(x, taps) + bias[:, None, None], slope)
            flat = flat[taps.size + 2 * cout :]
        f[tile, :, :, :tw] = x.transpose(1, 0, 2)
    out = {"f": f, "x": y, "base": flat, "dst": buffers["dst"]}
    sizes = {"f_tile": f_tile, "x_tile": x_tile, "x_row": inputs * xs, "plane": video.C_WIDTH}
    shuffle_out.reference(params, out, both | sizes | {"stride": push["out_stride"]})


def _groups(push: Mapping[str, Any], variant: Variant) -> Groups:
    return 1, 1, 1


OP = Contract(
    name="nsr_chroma",
    bindings=(
        Bind("src", "r"),
        Bind("luma", "r"),
        Bind("w", "r"),
        Bind("dst", "rw"),
    ),
    push=(
        *nsr.OP.push,
        ("step", "u32"),
        ("component", "u32"),
        ("luma_stride", "u32"),
    ),
    variants=(Variant("f32", (1, 1, 1)),),
    groups=_groups,
    reference=reference,
)
