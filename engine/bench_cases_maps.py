# SPDX-License-Identifier: Apache-2.0
"""Calls of the operations on feature maps (engine/bench_cases.py): a window of 128x128 with 64
channels, 3 in and out, enlarged twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from engine.bench_cases import Case
from kernels import maps
from kernels.contract import FORMATS, PARAM_WORDS, Variant
from kernels.conv2d import op as conv2d
from kernels.maps import THIN, WIDE, Geometry
from kernels.pointwise.op import SUM

SIDE, CHANNELS, BLOCKS = 128, 64, 4
_MAPS, _TWICE = Geometry(SIDE, SIDE, 1), Geometry(2 * SIDE, 2 * SIDE, 1)
_FLOATS = np.random.default_rng(20261130).standard_normal(1 << 16).astype(np.float32)
_WHOLE = np.zeros(PARAM_WORDS, np.uint32)
_WHOLE[[maps.CORE_X1, maps.CORE_Y1]] = SIDE
_PARAMS = tuple(int(v) for v in _WHOLE)
_SHAPE = f"{SIDE}x{SIDE}"


def _conv2d(op: str, v: Variant, shown: str, quick: bool) -> Iterator[Case]:
    fmt = v.name.partition("_")[0]
    for k in (3,) if quick else (3, 1):
        w = _FLOATS[: CHANNELS * CHANNELS * k * k].reshape(CHANNELS, CHANNELS, k, k) / 64
        packed = conv2d.pack(fmt, w, _FLOATS[:CHANNELS], _FLOATS[:CHANNELS])
        push: dict[str, Any] = {"fmt": FORMATS[fmt], "cin": CHANNELS, "cout": CHANNELS, "k": k}
        push |= {"act": maps.SLOPE, "residual": 0, "xl": WIDE, "yl": WIDE, **_MAPS.push()}
        whole = _MAPS.nbytes(BLOCKS, WIDE)
        sizes = {"x": whole, "w": packed.nbytes, "r": whole, "y": whole}
        moved = 2 * 4 * CHANNELS * SIDE * SIDE + packed.nbytes
        count = 2 * CHANNELS * CHANNELS * k * k * SIDE * SIDE
        shape = f"{k}x{k} {CHANNELS}->{CHANNELS} {_SHAPE}"
        data = {"x": _FLOATS, "w": packed}
        yield Case(op, v, shown, shape, push, _PARAMS, 1, sizes, moved, count, data)


def _pointwise(op: str, v: Variant, shown: str, quick: bool) -> Iterator[Case]:
    whole = _MAPS.nbytes(BLOCKS, WIDE)
    push = {"blocks": BLOCKS, "lanes": WIDE, "mode": SUM, "act": maps.SLOPE, **_MAPS.push()}
    sizes = {"a": whole, "b": whole, "w": 16 * CHANNELS, "y": whole}
    samples = CHANNELS * SIDE * SIDE
    data = {"a": _FLOATS, "b": _FLOATS, "w": _FLOATS}
    yield Case(op, v, shown, _SHAPE, push, _PARAMS, 1, sizes, 12 * samples, 5 * samples, data)


def _resize(op: str, v: Variant, shown: str, quick: bool) -> Iterator[Case]:
    push = {"blocks": 1, "lanes": THIN, "num": 2, "den": 1, "taps": 2, "residual": 0}
    push |= {**_MAPS.push("x_"), **_TWICE.push()}
    whole = _TWICE.nbytes(1, THIN)
    sizes = {"x": _MAPS.nbytes(1, THIN), "filters": 24, "r": whole, "y": whole}
    filters = np.array([0.25, 0.75, 0.75, 0.25, -1, 0], np.float32)
    samples = 4 * THIN * SIDE * SIDE
    data = {"x": _FLOATS, "filters": filters}
    yield Case(op, v, shown, _SHAPE, push, _PARAMS, 1, sizes, 5 * samples, 12 * samples, data)


def _pixel_shuffle(op: str, v: Variant, shown: str, quick: bool) -> Iterator[Case]:
    push = {"blocks": 1, "lanes": THIN, "xl": WIDE, "channels": 3, "s": 2, "down": 0}
    push |= {"cs": 4, "as": 2, "bs": 1, **_MAPS.push("x_"), **_TWICE.push()}
    sizes = {"x": _MAPS.nbytes(1, WIDE), "y": _TWICE.nbytes(1, THIN)}
    samples = 4 * THIN * SIDE * SIDE
    data = {"x": _FLOATS}
    yield Case(op, v, shown, _SHAPE, push, _PARAMS, 1, sizes, 7 * samples, samples, data)


def _plane(s: int) -> dict[str, Any]:
    return {"bits": 8, "stride": s * SIDE // 4, "step": 1, "half": 0, "centred": 0}


def _maps_in(op: str, v: Variant, shown: str, quick: bool) -> Iterator[Case]:
    push = {**_plane(1), "phase": 0, "plane_w": SIDE, "plane_h": SIDE, "add": 0, "lanes": THIN}
    push |= {**_MAPS.push(), **{f"{n}{k}": 1 / 255 for n in "co" for k in range(3)}}
    sizes = {"src": SIDE * SIDE, "y": _MAPS.nbytes(1, THIN)}
    pixels = SIDE * SIDE
    yield Case(op, v, shown, _SHAPE, push, _PARAMS, 1, sizes, 17 * pixels, 6 * pixels)


def _maps_out(op: str, v: Variant, shown: str, quick: bool) -> Iterator[Case]:
    push = {**_plane(2), "frame_w": 2 * SIDE, "frame_h": 2 * SIDE, "s": 2, "lanes": THIN}
    push |= {**_TWICE.push(), "c0": 80.0, "c1": 80.0, "c2": 80.0, "o": 0.0}
    push |= {"d0": 0.0, "d1": 0.0, "d2": 0.0}
    sizes = {"x": _TWICE.nbytes(1, THIN), "dst": 4 * SIDE * SIDE}
    pixels = 4 * SIDE * SIDE
    data = {"x": _FLOATS}
    yield Case(op, v, shown, _SHAPE, push, _PARAMS, 1, sizes, 17 * pixels, 10 * pixels, data)


def _plane_scale(op: str, v: Variant, shown: str, quick: bool) -> Iterator[Case]:
    push = {"bits": 8, "stride": SIDE // 4, "out_stride": SIDE // 2, "step": 1, "half": 0, "s": 2}
    push |= {"plane_w": SIDE, "plane_h": SIDE, "rows": 2 * SIDE}
    sizes = {"src": SIDE * SIDE, "filters": 80, "dst": 4 * SIDE * SIDE}
    filters = np.concatenate([np.full(16, 0.25), [-1, -1, -1, -1]]).astype(np.float32)
    moved, count = 5 * SIDE * SIDE, 4 * 40 * SIDE * SIDE
    data = {"filters": filters}
    yield Case(op, v, shown, _SHAPE, push, _PARAMS, 1, sizes, moved, count, data)


MAKERS: Mapping[str, Callable[[str, Variant, str, bool], Iterator[Case]]] = {
    "conv2d": _conv2d,
    "pointwise": _pointwise,
    "resize": _resize,
    "pixel_shuffle": _pixel_shuffle,
    "maps_in": _maps_in,
    "maps_out": _maps_out,
    "plane_scale": _plane_scale,
}
