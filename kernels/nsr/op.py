# SPDX-License-Identifier: Apache-2.0
"""nsr: a whole luma network in one call, from samples of a band to samples of the enlarged band.

The same as luma_in, conv3x3 for each of the `layers` convolutions (1 -> C, C -> C .., C -> scale^2
maps) and shuffle_out, but nothing between them leaves the chip: a workgroup streams a strip of
columns row by row and keeps, for each layer, the two last rows of its input. (Line buffers, as in
the layer fusion of Alwani et al., "Fused-layer CNN accelerators", 2016.) So nothing is computed
twice from row to row; from strip to strip the network's radius, `layers` columns on each side, is.

Output sample (s * Y + a, s * X + b) of core pixel (Y, X) is map p = s * a + b there plus the sum
over 5x5 of base[p] times the luma around it, times the largest sample, rounded. Input rows are
`stride` words apart, output rows `out_stride`; the first ones are frame rows SRC_Y and scale *
BAND_Y. A tile is tw x th core pixels at frame column (COL0 + t) * tw; tw is a multiple of 4. Pixels
beyond WIDTH or HEIGHT may be left unwritten; words past the stride are.

w: see `pack`. Activations between layers are halves in GLSL; sums are float32.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from kernels import video
from kernels.contract import Bind, Contract, Groups, Variant, ceil_div

# Weights [cin, 3, 3, cout], bias, slope [cout].
Layer = tuple[video.Array, video.Array, video.Array]

LUMA_ROWS = 16  # rows of luma on chip: those that the first layer and the filter need
# Rows that a workgroup streams: more of them are less in vain, but a frame has to fill the device.
SEGMENT = 64
BASE_TAPS = 25
MATRIX = 16  # side of the cooperative matrices


def map_groups(scale: int) -> int:
    """The last layer's maps lie in groups of four: all for x2, else one for each output row."""
    return 1 if scale == 2 else scale


def padded_maps(scale: int) -> tuple[video.Array, int]:
    """For each map of the last layer where it lies among 4 * map_groups, and that number."""
    p = np.arange(scale * scale)
    return (p if scale == 2 else p // scale * 4 + p % scale), 4 * map_groups(scale)


def pack(layers: Sequence[Layer], base: video.Array) -> video.F32:
    """Weights as the kernel reads them. base: [scale^2, 5, 5].

    For each layer [cin][9][cout], bias [cout], slope [cout], the last one's cout padded to 4 *
    map_groups; base as [map_groups][25][4]. Then from a multiple of 64 floats on, for cooperative
    matrices, each layer between the first and the last: halves [3][across][16][16], bias and slope
    as [16][16] with equal rows. Rows of a matrix are what is summed over, columns what comes out:
    16 channels of a pixel (`across` are the three taps of a row), or 8 channels of two (across: of
    the input the first and the second two).
    """
    scale = round(len(base) ** 0.5)
    place, outs = padded_maps(scale)
    parts: list[video.F32] = []
    matrices: list[video.F32] = []
    for i, (taps, bias, slope) in enumerate(layers):
        if i == len(layers) - 1:
            taps, bias, slope = (spread(a, place, outs) for a in (taps, bias, slope))
        cin, _, _, cout = taps.shape
        parts += [taps.reshape(cin * 9, cout), bias, slope]
        if 0 < i < len(layers) - 1:
            matrices += [_products(taps), _rows(bias), _rows(slope)]
    parts.append(pack_base(base))
    flat = np.concatenate([p.reshape(-1) for p in parts]).astype(np.float32)
    room = np.zeros(-flat.size % 64, np.float32)
    return np.concatenate([flat, room, *(m.reshape(-1) for m in matrices)])


def words(channels: int, layers: int) -> int:
    """At least as many floats as `pack` gives at x2."""
    hidden = (layers - 2) * (9 * channels + 2) * channels
    matrices = (layers - 2) * (9 * MATRIX**2 // 2 + 2 * MATRIX**2)
    return 11 * channels + hidden + 4 * (9 * channels + 2 + BASE_TAPS) + 64 + matrices


def pack_base(base: video.Array) -> video.F32:
    """[scale^2, 5, 5] as [map_groups][25][4]."""
    place, outs = padded_maps(round(len(base) ** 0.5))
    filters = spread(base.reshape(-1, BASE_TAPS).T, place, outs)  # [25, outs]
    return filters.reshape(BASE_TAPS, -1, 4).transpose(1, 0, 2)


def spread(a: video.F32, place: video.Array, outs: int) -> video.F32:
    """The last axis with its entries at `place` among `outs`, zeros between."""
    out = np.zeros((*a.shape[:-1], outs), np.float32)
    out[..., place] = a
    return out


def _products(taps: video.F32) -> video.F32:
    """The matrices of a layer: two halves a float."""
    channels, pixels = taps.shape[0], MATRIX // taps.shape[0]
    out = np.zeros((3, pixels + 2, channels, pixels, channels), np.float16)
    for p in range(pixels):
        out[:, p : p + 3, :, p] = taps.transpose(1, 2, 0, 3)
    return out.reshape(-1).view(np.float32)


def _rows(v: video.F32) -> video.F32:
    return np.tile(v, (MATRIX, MATRIX // v.size)).astype(np.float32)


def unpack(w: video.F32, channels: int, layers: int, scale: int) -> tuple[list[Layer], video.F32]:
    """The float32 part of `pack` as it was given: layers and base."""
    place, outs = padded_maps(scale)
    sizes = [1, *[channels] * (layers - 1), outs]
    found: list[Layer] = []
    at = 0
    for cin, cout in pairwise(sizes):
        taps = w[at : at + cin * 9 * cout].reshape(cin, 3, 3, cout)
        bias, slope = w[at + taps.size :][: 2 * cout].reshape(2, cout)
        at += taps.size + 2 * cout
        found.append((taps, bias, slope))
    taps, bias, slope = found[-1]
    found[-1] = taps[..., place], bias[place], slope[place]
    filters = w[at:][: BASE_TAPS * outs].reshape(-1, BASE_TAPS, 4).transpose(0, 2, 1)
    return found, filters.reshape(outs, 5, 5)[place]


def columns(variant: Variant, layers: int) -> int:
    """Columns of the window that a workgroup streams: as many as its shared memory holds and its
    invocations do at once.
    """
    d = {k: int(v) for k, v in variant.defines.items()}
    rows = 2 * (layers - 1) + d["ROWS"]
    if "MATRIX" in d:
        step = MATRIX * MATRIX // d["CHANNELS"]
        fits = d["CELLS"] // (rows * d["CHANNELS"] // 4) // step * step
    else:
        fits = d["CELLS"] // (rows * d["CHANNELS"] // 2) * 4
    return min(d["COLUMNS"], fits)


def strip(variant: Variant, layers: int, scale: int) -> int:
    """Core columns of a workgroup: whole words of output. 0 and less: the network does not fit."""
    unit = 4 if scale == 3 else 2
    return (columns(variant, layers) - 2 * layers) // unit * unit


def fits(variant: Variant, layers: int, scale: int) -> bool:
    """Can the variant run a network of so many convolutions?"""
    rows = int(variant.defines["ROWS"])
    return layers + rows + 2 <= LUMA_ROWS and strip(variant, layers, scale) > 0


def _groups(push: Mapping[str, Any], variant: Variant) -> Groups:
    core = strip(variant, push["layers"], push["scale"])
    return ceil_div(push["tw"], core), ceil_div(push["th"], SEGMENT), push["tokens"]


def convolved(x: video.F32, taps: video.F32) -> video.F32:
    """[cin, rows, cols] by [cin, 3, 3, cout], without padding."""
    (cin, rows, cols), cout = x.shape, taps.shape[3]
    rows, cols = rows - 2, cols - 2
    near = np.empty((cin, 3, 3, rows, cols), np.float32)
    for a in range(3):
        for b in range(3):
            near[:, a, b] = x[:, a : a + rows, b : b + cols]
    y: video.F32 = taps.reshape(-1, cout).T @ near.reshape(-1, rows * cols)
    return y.reshape(cout, rows, cols)


def activated(x: video.F32, slope: video.F32) -> video.F32:
    """PReLU over the first axis."""
    y: video.F32 = np.where(x > 0, x, slope[:, None, None] * x)
    return y


def _network(window: video.F32, layers: Sequence[Layer]) -> video.F32:
    """Maps [scale^2, rows, cols] of a window of luma."""
    x = window[None]
    for taps, bias, slope in layers:
        x = activated(convolved(x, taps) + bias[:, None, None], slope)
    return x


def _image(buffer: video.Array, stride: int, bits: int) -> video.Array:
    """Samples as [rows, samples of a stride of so many words], a view."""
    flat, each = video.samples(buffer, bits), stride * 32 // bits
    return flat[: flat.size // each * each].reshape(-1, each)


# A window of luma -> maps [scale^2, rows, cols] and the filters [scale^2, 5, 5].
Maps = Callable[[video.F32], tuple[video.F32, video.F32]]


def enlarge(
    params: video.Array, buffers: Mapping[str, Any], push: Mapping[str, Any], maps: Maps
) -> None:
    """The references of operations that take a band through a network."""
    p = [int(v) for v in params]
    bits, tw, th, n, s = (push[k] for k in ("bits", "tw", "th", "layers", "scale"))
    src, dst = (
        _image(buffers[name], push[stride], bits)
        for name, stride in (("src", "stride"), ("dst", "out_stride"))
    )
    top = np.float32((1 << bits) - 1)
    rows = min(th, p[video.HEIGHT] - p[video.BAND_Y])
    for tile in range(p[video.N_TILES]):
        x0 = (p[video.COL0] + tile) * tw
        cols = min(tw, p[video.WIDTH] - x0)
        if cols <= 0 or rows <= 0:
            continue
        iy = video.clamped(p[video.BAND_Y] - n, rows + 2 * n, p[video.HEIGHT]) - p[video.SRC_Y]
        ix = video.clamped(x0 - n, cols + 2 * n, p[video.WIDTH])
        window = src[iy[:, None], ix].astype(np.float32) / top
        found, base = maps(window)
        around = window[n - 2 : n + 2 + rows, n - 2 : n + 2 + cols]
        out = ((video.phases(around, base) + found) * top).astype(np.float32)
        q = video.shuffled(video.quantise(out, bits), s)
        dst[: s * rows, s * x0 : s * (x0 + cols)] = q


def reference(params: video.Array, buffers: Mapping[str, Any], push: Mapping[str, Any]) -> None:
    w = video.floats(buffers["w"])
    layers, base = unpack(w, push["channels"], push["layers"], push["scale"])
    enlarge(params, buffers, push, lambda window: (_network(window, layers), base))


def _plain(
    suffix: str, channels: int, threads: int, columns: int, rows: int, shared: int
) -> Variant:
    """In float32. columns / 4 * channels / 8 * rows is the number of invocations."""
    cells = (shared - 4 * LUMA_ROWS * columns) // 16
    defines = {"CHANNELS": channels, "COLUMNS": columns, "ROWS": rows, "CELLS": cells}
    given = {k: str(v) for k, v in defines.items()}
    return Variant(
        f"c{channels}{suffix}", (threads, 1, 1), given, shared=shared, baseline=not suffix
    )


def _matrix(channels: int, columns: int, rows: int, shared: int) -> Variant:
    """By cooperative matrices: a subgroup for each matrix of places in a row."""
    cells = (shared - 4 * LUMA_ROWS * columns) // 8 - 8
    defines = {"CHANNELS": channels, "COLUMNS": columns, "ROWS": rows, "CELLS": cells, "MATRIX": 1}
    given = {k: str(v) for k, v in defines.items()}
    threads = 32 * columns * channels // MATRIX**2
    needs = frozenset({"coopmat", "fp16", "memory_model", "storage16", "subgroup_basic"})
    name = f"c{channels}_coopmat"
    return Variant(name, (threads, 1, 1), given, needs, shared=shared, baseline=False)


def variant_for(channels: int) -> str:
    """The baseline variant for a network of so many channels."""
    return f"c{channels}"


OP = Contract(
    name="nsr",
    bindings=(Bind("src", "r"), Bind("w", "r"), Bind("dst", "w")),
    push=(
        ("bits", "u32"),
        ("stride", "u32"),
        ("out_stride", "u32"),
        ("tw", "u32"),
        ("th", "u32"),
        ("channels", "u32"),
        ("layers", "u32"),
        ("scale", "u32"),
    ),
    variants=(
        _plain("", 8, 32, 64, 2, 16384),
        _plain("", 16, 32, 32, 2, 16384),
        _plain("_wide", 8, 128, 128, 4, 32768),
        _plain("_wide", 16, 128, 64, 4, 32768),
        _matrix(8, 160, 4, 49152),
        _matrix(16, 80, 4, 49152),
    ),
    groups=_groups,
    reference=reference,
)
