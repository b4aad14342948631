# SPDX-License-Identifier: Apache-2.0
"""Samples (kernels/samples.py) of the operations on feature maps."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from kernels import maps, op
from kernels.contract import FORMATS, PARAM_WORDS
from kernels.conv2d import op as conv2d
from kernels.maps import F32, THIN, WIDE, Geometry
from kernels.pointwise.op import PRODUCT
from kernels.samples import Sample


def random_maps(rng: np.random.Generator, g: Geometry, blocks: int, lanes: int) -> F32:
    """A buffer with normal numbers in the maps and zeros around them."""
    buffer = np.zeros(g.nbytes(blocks, lanes) // 4, np.float32)
    view = maps.view(buffer, blocks, lanes, g.push())
    view[:] = rng.standard_normal(view.shape)
    return buffer


def params(**words: int) -> tuple[int, ...]:
    """Parameter words by their names in kernels.maps."""
    out = [0] * PARAM_WORDS
    for name, value in words.items():
        out[getattr(maps, name)] = value
    return tuple(out)


def samples(rng: np.random.Generator) -> Iterator[Sample]:
    """A Sample for each variant."""
    yield from _convolutions(rng)
    yield from _maps(rng)
    yield from _planes(rng)


def _convolutions(rng: np.random.Generator) -> Iterator[Sample]:
    g, cin, cout, k = Geometry(9, 6, 1), 16, 24, 3
    x, r = random_maps(rng, g, 1, WIDE), random_maps(rng, g, 2, WIDE)
    w = rng.standard_normal((cout, cin, k, k), np.float32) / 12
    bias, slope = rng.standard_normal((2, cout)).astype(np.float32)
    push = {"cin": cin, "cout": cout, "k": k, "act": maps.SLOPE, "residual": 1}
    push |= {"xl": WIDE, "yl": WIDE, **g.push()}
    for variant in op("conv2d").variants:
        fmt = variant.name.partition("_")[0]
        packed = conv2d.pack(fmt, w, bias, slope).view(np.uint32)
        arrays = {"x": x, "w": packed, "r": r, "y": np.zeros_like(r)}
        yield Sample("conv2d", variant.name, {"fmt": FORMATS[fmt], **push}, arrays, (), 1)


def _maps(rng: np.random.Generator) -> Iterator[Sample]:
    g, twice = Geometry(5, 3, 1), Geometry(10, 6, 1)
    a, b = random_maps(rng, g, 1, WIDE), random_maps(rng, g, 1, WIDE)
    w = rng.standard_normal(4 * WIDE, np.float32)
    push = {"blocks": 1, "lanes": WIDE, "mode": PRODUCT, "act": maps.SIGMOID, **g.push()}
    arrays = {"a": a, "b": b, "w": w, "y": np.zeros_like(a)}
    yield Sample("pointwise", "base", push, arrays, (), 1)
    push = {"blocks": 1, "lanes": THIN, "num": 2, "den": 1, "taps": 2, "residual": 1}
    push |= {**g.push("x_"), **twice.push()}
    x, r = random_maps(rng, g, 1, THIN), random_maps(rng, twice, 1, THIN)
    filters = np.array([0.25, 0.75, 0.75, 0.25, -1, 0], np.float32)
    arrays = {"x": x, "filters": filters, "r": r, "y": np.zeros_like(r)}
    yield Sample("resize", "base", push, arrays, (), 1)
    push = {"blocks": 1, "lanes": THIN, "xl": WIDE, "channels": 3, "s": 2, "down": 0}
    push |= {"cs": 4, "as": 2, "bs": 1, **g.push("x_"), **twice.push()}
    yield Sample("pixel_shuffle", "base", push, {"x": a, "y": np.zeros_like(r)}, (), 1)


def _planes(rng: np.random.Generator) -> Iterator[Sample]:
    g, width, height, stride = Geometry(8, 6, 1), 12, 10, 4
    window = params(X0=4, Y0=4, CORE_X0=8, CORE_Y0=6, CORE_X1=12, CORE_Y1=10)
    src = rng.integers(0, 256, (8, 4 * stride), np.uint8)
    push = {"bits": 8, "stride": stride, "step": 1, "phase": 0, "half": 1, "centred": 0}
    push |= {"plane_w": width // 2, "plane_h": height // 2, "add": 1, "lanes": THIN, **g.push()}
    tones = {f"{n}{k}": float(v) for n in "co" for k, v in enumerate(rng.standard_normal(3) / 64)}
    y = random_maps(rng, g, 1, THIN)
    yield Sample("maps_in", "base", push | tones, {"src": src, "y": y}, window, 1)
    shades = {n: float(v) for n, v in zip(("c0", "c1", "c2"), 255 * rng.random(3) / 3, strict=True)}
    out: dict[str, float] = {"bits": 8, "stride": stride, "step": 1, "half": 0, "centred": 0}
    out |= {"frame_w": width, "frame_h": height, "s": 1, "lanes": THIN, **g.push(), **shades}
    out |= {"d0": 0.0, "d1": 0.0, "d2": 0.0, "o": 4.0}
    dst = np.zeros((4, 4 * stride), np.uint8)
    yield Sample("maps_out", "base", out, {"x": y, "dst": dst}, window, 1)
    filters = np.concatenate([rng.random(16, np.float32) / 2, [-1, -1, -2, -1]]).astype(np.float32)
    push = {"bits": 8, "stride": stride, "out_stride": 6, "step": 1, "half": 0, "s": 2}
    push |= {"plane_w": width, "plane_h": height, "rows": 8}
    arrays = {"src": src, "filters": filters, "dst": np.zeros((8, 24), np.uint8)}
    yield Sample("plane_scale", "base", push, arrays, window, 1)
