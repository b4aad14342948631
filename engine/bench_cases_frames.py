# SPDX-License-Identifier: Apache-2.0
"""Calls of the operations on frames (engine/bench_cases.py): a tile of 128x128 of the model
nsr-balanced, and whole frames where an operation takes them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import numpy as np

from engine.backends.base import Array
from engine.bench_cases import Case
from kernels import video
from kernels.contract import PARAM_WORDS, Variant, ceil_div
from kernels.nsr import op as nsr
from kernels.resample.op import table

TILE, HALO, CHANNELS = 128, 7, 16  # of nsr-balanced
_FLOATS = np.random.default_rng(20261130).standard_normal(1 << 16).astype(np.float32)


def _words(**words: int) -> tuple[int, ...]:
    out = [0] * PARAM_WORDS
    for name, value in words.items():
        out[getattr(video, name)] = value
    return tuple(out)


_XS = ceil_div(TILE + 2 * HALO, 16) * 16
_LUMA = (TILE + 2 * HALO) * _XS  # floats of a tile's window
_MAPS = CHANNELS * _LUMA
_FRAME = {"bits": 8, "tw": TILE, "th": TILE, "halo": HALO, "xs": _XS}
_ONE = _words(N_TILES=1, WIDTH=TILE, HEIGHT=TILE)


def _luma_in(op: str, v: Variant, shown: str, quick: bool) -> Iterator[Case]:
    push = {**_FRAME, "stride": TILE // 4, "y_tile": _LUMA, "scale": 1 / 255}
    sizes = {"src": TILE * TILE, "y": 4 * _LUMA + 256}
    shape, moved = f"{TILE}x{TILE}", TILE * TILE + 4 * _LUMA
    yield Case(op, v, shown, shape, push, _ONE, 1, sizes, moved, _LUMA)


def _conv3x3(op: str, v: Variant, shown: str, quick: bool) -> Iterator[Case]:
    rows = TILE + 2 * HALO - 2
    outs = (CHANNELS, 4) if shown == "c" else (4 if v.name.startswith("oc4") else CHANNELS,)
    for cout in outs:
        push: dict[str, float | int] = {"cin": CHANNELS, "cout": cout, "rows": rows, "xs": _XS}
        push |= {"x_tile": _MAPS, "y_tile": _MAPS}
        sizes = {
            "x": 4 * _MAPS + 256,
            "w": 4 * (9 * CHANNELS * cout + 2 * cout),
            "y": 4 * _MAPS + 256,
        }
        moved = 4 * rows * _XS * (CHANNELS + cout) + sizes["w"]
        count = 2 * 9 * CHANNELS * cout * rows * _XS
        shape = f"{CHANNELS}->{cout} {TILE}x{TILE}"
        data: dict[str, Array] = {"x": _FLOATS, "w": _FLOATS / 64}
        yield Case(op, v, shown, shape, push, _ONE, 1, sizes, moved, count, data)


def _nsr(op: str, v: Variant, shown: str, quick: bool) -> Iterator[Case]:
    channels = int(v.defines["CHANNELS"])
    layers = HALO if channels == CHANNELS else HALO - 1
    macs = 9 * channels + (layers - 2) * 9 * channels**2 + 9 * channels * 4 + 100
    for width, height in ((TILE, TILE), (480, 270)) if quick else ((TILE, TILE), (1920, 1080)):
        push: dict[str, float | int] = {"bits": 8, "stride": width // 4, "out_stride": width // 2}
        push |= {"tw": width, "th": height, "channels": channels, "layers": layers, "scale": 2}
        sizes = {"src": width * height, "w": 4 * nsr.words(channels, layers)}
        sizes["dst"] = 4 * width * height
        params = _words(N_TILES=1, WIDTH=width, HEIGHT=height)
        data: dict[str, Array] = {"w": _FLOATS / 64}
        moved, count = 5 * width * height + 4 * macs, 2 * macs * width * height
        yield Case(op, v, shown, f"{width}x{height}", push, params, 1, sizes, moved, count, data)


def _shuffle_out(op: str, v: Variant, shown: str, quick: bool) -> Iterator[Case]:
    for scale in (2, 3, 4) if shown == "c" else (int(v.name.removeprefix("x")),):
        samples = scale * scale * TILE * TILE
        push = {**_FRAME, "scale": scale, "step": 1, "component": 0, "plane": video.WIDTH}
        push |= {"stride": scale * TILE // 4, "x_row": _XS, "f_tile": _MAPS, "x_tile": _LUMA}
        sizes = {"f": 4 * _MAPS + 256, "x": 4 * _LUMA + 256, "base": 1600, "dst": samples}
        data: dict[str, Array] = {
            "f": _FLOATS / 64,
            "x": np.abs(_FLOATS) / 8,
            "base": _FLOATS[:400] / 25,
        }
        moved, count = 5 * samples + 4 * TILE * TILE, 52 * samples
        shape = f"{TILE}x{TILE} x{scale}"
        yield Case(op, v, shown, shape, push, _ONE, 1, sizes, moved, count, data)


_HALF = {"C_WIDTH": TILE // 2, "C_HEIGHT": TILE // 2, "C_ROWS": TILE // 2}


def _filter_out(op: str, v: Variant, shown: str, quick: bool) -> Iterator[Case]:
    side, words = TILE // 2, TILE // 4
    push = {"bits": 8, "step": 1, "scale": 2, "stride": side // 4, "out_stride": words}
    push |= {"rows": side, "words": words}
    sizes = {"src": side * side, "filters": 400, "dst": TILE * TILE}
    data = {"filters": _FLOATS[:100] / 25}
    moved, count = side * side * 5, side * side * 4 * 50
    shape, params = f"{side}x{side}", _words(**_HALF)
    yield Case(op, v, shown, shape, push, params, 1, sizes, moved, count, data)


def _resample(op: str, v: Variant, shown: str, quick: bool) -> Iterator[Case]:
    out, taps = TILE * 3 // 4, 8
    places = np.arange(out) * (TILE - taps) // out
    records = table(places, np.full((out, taps), 1 / taps))
    push = {"bits": 8, "step": 1, "plane": video.WIDTH, "stride": TILE // 4}
    push |= {"out_stride": out // 4, "width": out, "taps_down": taps, "taps_across": taps}
    push |= {"rows": out}
    sizes = {"src": TILE * TILE, "down": records.nbytes, "across": records.nbytes}
    sizes["dst"] = out * out
    data: dict[str, Array] = {"down": records, "across": records}
    params = _words(WIDTH=TILE, HEIGHT=TILE, COL0=out)  # the fifth word is the number of rows
    moved, count = TILE * TILE + out * out, 2 * taps * out * (TILE + out)
    shape = f"{TILE}x{TILE} to {out}x{out}"
    yield Case(op, v, shown, shape, push, params, 1, sizes, moved, count, data)


def _chroma_in(op: str, v: Variant, shown: str, quick: bool) -> Iterator[Case]:
    side, words = TILE // 2, TILE // 4
    push: dict[str, float | int] = {"bits": 8, "step": 1, "component": 0, "stride": side // 4}
    push |= {"luma_stride": words, "tw": side, "th": side, "halo": 0, "xs": side}
    push |= {"y_tile": 5 * side * side, "scale": 1 / 255}
    sizes = {"src": side * side, "luma": TILE * TILE, "y": 20 * side * side}
    params = _words(N_TILES=1, WIDTH=TILE, HEIGHT=TILE, **_HALF)
    moved, count = sum(sizes.values()), 5 * side * side
    yield Case(op, v, shown, f"{side}x{side}", push, params, 1, sizes, moved, count)


def _skip_add(op: str, v: Variant, shown: str, quick: bool) -> Iterator[Case]:
    push = {"channels": CHANNELS, "rows": TILE, "offset": 2, "xs": _XS, "tile": _MAPS}
    sizes = {"kept": 4 * _MAPS + 256, "slope": 4 * CHANNELS, "y": 4 * _MAPS + 256}
    data: dict[str, Array] = {"kept": _FLOATS, "slope": _FLOATS, "y": _FLOATS}
    moved, count = 12 * CHANNELS * TILE * _XS, 3 * CHANNELS * TILE * _XS
    yield Case(op, v, shown, f"{TILE}x{TILE}", push, _ONE, 1, sizes, moved, count, data)


MAKERS: Mapping[str, Callable[[str, Variant, str, bool], Iterator[Case]]] = {
    "luma_in": _luma_in,
    "conv3x3": _conv3x3,
    "shuffle_out": _shuffle_out,
    "nsr": _nsr,
    "filter_out": _filter_out,
    "resample": _resample,
    "chroma_in": _chroma_in,
    "skip_add": _skip_add,
}
