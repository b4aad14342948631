# SPDX-License-Identifier: Apache-2.0
"""Pieces (kernels/pieces.py) of calls of the operations on feature maps: a window of one block of
the maps, or lines of a plane.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from kernels import maps, video
from kernels.contract import FORMATS, ceil_div
from kernels.conv2d import op as conv2d
from kernels.maps_out.op import core
from kernels.piece import Array, Draw, Piece
from kernels.plane_scale.op import REACH, TAPS
from kernels.resize.op import along

LINES, COLUMNS = 4, 64  # the most of a piece


def _window(
    push: Mapping[str, Any], draw: Draw, pixel: float, step: int = 1, beside: float = 0.0
) -> tuple[int, int, int, int]:
    """Some rows and columns of maps, both from a multiple of `step` on and as many: first row,
    first column, rows, columns. pixel: the work of one.
    """
    h, w = int(push["h"]), int(push["w"])
    columns = min(w, step * max(1, COLUMNS // step))
    line = step * columns * pixel
    top, tall = draw.some(ceil_div(h, step), line, max(1, LINES // step), beside)
    if line + beside > draw.most:  # a line is too much: fewer columns
        columns = min(w, step * draw.fit(step * step * pixel, columns // step, beside))
    left = step * draw.of((w - columns) // step + 1)
    return step * top, left, min(step * tall, h - step * top), columns


def _cut(
    push: Mapping[str, Any], window: tuple[int, int, int, int], reach: int, prefix: str = ""
) -> tuple[dict[str, int], int, int]:
    """The geometry of a window with `reach` pixels around it in what is taken of a block, the first
    pixel that is taken, and how many.
    """
    top, left, h, w = window
    xs = int(push[prefix + "xs"])
    begin = int(push[prefix + "origin"]) + (top - reach) * xs + left - reach
    pixels = (h - 1 + 2 * reach) * xs + w + 2 * reach
    given = {"w": w, "h": h, "ps": pixels, "origin": reach * (xs + 1)}
    return {prefix + name: value for name, value in given.items()}, begin, pixels


def _runs(
    push: Mapping[str, Any], begin: int, pixels: int, blocks: range, lanes: int, prefix: str = ""
) -> list[tuple[int, int]]:
    each, ps = 4 * lanes, int(push[prefix + "ps"])
    return [(each * (b * ps + begin), each * pixels) for b in blocks]


def _view(part: Mapping[str, Any], blocks: int, lanes: int) -> Callable[[Array], Array]:
    return lambda y: maps.view(y, blocks, lanes, part)


def _conv2d(push: dict[str, Any], params: Any, sizes: Any, read: Any, draw: Draw) -> Piece:
    """A window of one block of the output, from all blocks of the input."""
    cin, cout, k, lanes, inner = (int(push[n]) for n in ("cin", "cout", "k", "yl", "xl"))
    wide = lanes == conv2d.LANES
    block = draw.of(ceil_div(cout, lanes)) if wide else 0
    outs = min(lanes, cout - block * lanes) if wide else cout
    taps = k * k * cin * conv2d.rounded(outs)
    # Unpacking the weights, and rows of whole width to be copied.
    pixel, beside = taps / 4 + 4.0 * cin, 6.0 * taps + 12.0 * cin * k * push["xs"]
    window = _window(push, draw, pixel, beside=beside)
    part, begin, pixels = _cut(push, window, k // 2)
    outputs = _runs(push, begin, pixels, range(block, block + 1), lanes)
    takes = {
        "x": _runs(push, begin, pixels, range(ceil_div(cin, inner)), inner),
        "w": _weights(push, block * conv2d.LANES, conv2d.rounded(outs)),
        "r": outputs if push["residual"] else [(0, 4)],
        "y": outputs,
    }
    work = beside + pixel * window[2] * window[3]
    part = {**push, **part, "cout": outs}
    return Piece(params, part, takes, {"y": _view(part, 1, lanes)}, work=work)


def _weights(push: Mapping[str, Any], first: int, count: int) -> list[tuple[int, int]]:
    """Where the weights of some output channels lie, in the order of kernels/conv2d."""
    cin, k, n = int(push["cin"]), int(push["k"]), conv2d.rounded(int(push["cout"]))
    q8 = push["fmt"] != FORMATS["f16"]
    each, scales = k * k * cin * (1 if q8 else 2), cin // 2 if q8 else 0
    runs = [(4 * first, 4 * count), (4 * (n + first), 4 * count)]
    runs += [(8 * n + scales * first, scales * count)] if q8 else []
    return [*runs, (8 * n + scales * n + each * first, each * count)]


def _pointwise(push: dict[str, Any], params: Any, sizes: Any, read: Any, draw: Draw) -> Piece:
    blocks, lanes = int(push["blocks"]), int(push["lanes"])
    block, window = draw.of(blocks), _window(push, draw, 20.0 * lanes)
    part, begin, pixels = _cut(push, window, 0)
    runs = _runs(push, begin, pixels, range(block, block + 1), lanes)
    constants = [(4 * lanes * (i * blocks + block), 4 * lanes) for i in range(4)]
    part = {**push, **part, "blocks": 1}
    takes = {"a": runs, "b": runs, "w": constants, "y": runs}
    return Piece(params, part, takes, {"y": _view(part, 1, lanes)})


def _resize(push: dict[str, Any], params: Any, sizes: Any, read: Any, draw: Draw) -> Piece:
    blocks, lanes = int(push["blocks"]), int(push["lanes"])
    taps, x_w = int(push["taps"]), int(push["x_w"])
    block, line = draw.of(blocks), 6.0 * taps * lanes * x_w
    window = _window(push, draw, 6.0 * taps * lanes + line / COLUMNS)
    part, begin, pixels = _cut(push, window, 0)
    outputs = _runs(push, begin, pixels, range(block, block + 1), lanes)
    filters = read("filters", 0, sizes["filters"]).copy()
    rows, _ = along(filters.view("f4"), push, window[2], int(push["x_h"]), window[0])
    low, high = int(rows.min()), int(rows.max()) + 1
    x, x_begin, x_pixels = _cut(push, (low, 0, high - low, x_w), 0, "x_")
    takes = {
        "x": _runs(push, x_begin, x_pixels, range(block, block + 1), lanes, "x_"),
        "r": outputs if push["residual"] else [(0, 4)],
        "y": outputs,
    }
    place = {"top": window[0], "left": window[1], "x_top": low, "x_all": int(push["x_h"])}
    part = {**push, **part, **x, "blocks": 1, **place}
    return Piece(params, part, takes, {"y": _view(part, 1, lanes)}, {"filters": filters})


def _pixel_shuffle(push: dict[str, Any], params: Any, sizes: Any, read: Any, draw: Draw) -> Piece:
    s, blocks, lanes = int(push["s"]), int(push["blocks"]), int(push["lanes"])
    inner, down = int(push["xl"]), bool(push["down"])
    channels = (int(push["channels"]) - 1) * int(push["cs"])
    channels += (s - 1) * (int(push["as"]) + int(push["bs"])) + 1
    used = int(push["channels"]) if down else channels
    step = 1 if down else s
    window = _window(push, draw, 20.0 * lanes * blocks, step)
    top, left, h, w = window
    part, begin, pixels = _cut(push, window, 0)
    of_x = (top * s, left * s, h * s, w * s) if down else (top // s, left // s, h // s, w // s)
    x, x_begin, x_pixels = _cut(push, of_x, 0, "x_")
    takes = {
        "x": _runs(push, x_begin, x_pixels, range(ceil_div(used, inner)), inner, "x_"),
        "y": _runs(push, begin, pixels, range(blocks), lanes),
    }
    part = {**push, **part, **x}
    return Piece(params, part, takes, {"y": _view(part, blocks, lanes)})


def _maps_in(push: dict[str, Any], params: Any, sizes: Any, read: Any, draw: Draw) -> Piece:
    half, row = int(push["half"]), 4 * int(push["stride"])
    inside = int(push["plane_h"]) * (2 if half else 1) - int(params[maps.Y0])
    # Whole rows of the plane are read, and the first one is a row that there is.
    rows = {**push, "h": max(1, min(int(push["h"]), inside))}
    window = _window(rows, draw, 60.0, 2, 40.0 * row)
    top, left, h, _ = window
    part, begin, pixels = _cut(push, window, 0)
    lanes = int(push["lanes"])
    before, y0 = int(params[maps.Y0]), int(params[maps.Y0]) + top
    params[maps.Y0], params[maps.X0] = y0, int(params[maps.X0]) + left
    low, source = ((max(0, y // 2 - 1) if half else y) for y in (y0, before))
    high = min(int(push["plane_h"]), (y0 + h) // 2 + 1 if half else y0 + h)
    high = max(high, low + 1)
    takes = {
        "src": [((low - source) * row, (high - low) * row)],
        "y": _runs(push, begin, pixels, range(1), lanes),
    }
    part = {**push, **part}
    return Piece(params, part, takes, {"y": _view(part, 1, lanes)})


def _image(
    push: Mapping[str, Any], stride: int, begin: int, end: int, rows: int
) -> Callable[[Array], Array]:
    """Samples begin..end-1 of the first rows."""
    each = stride * (4 if push["bits"] == 8 else 2)

    def look(array: Array) -> Array:
        samples = video.samples(array, push["bits"])
        return samples[: samples.size // each * each].reshape(-1, each)[:rows, begin:end]

    return look


def _core(params: Any, draw: Draw, work: float, by: int, full: int) -> tuple[int, int]:
    """Some rows of the part that is written, from a multiple of `by` in it on, which becomes what
    the parameters speak of: the first, from that part's begin on, and how many.
    """
    count = int(params[maps.CORE_Y1]) - int(params[maps.CORE_Y0])
    first, lines = draw.some(ceil_div(count, by), by * work, max(1, full // by))
    begin = int(params[maps.CORE_Y0]) + by * first
    params[maps.CORE_Y1] = min(int(params[maps.CORE_Y1]), begin + by * lines)
    params[maps.CORE_Y0] = begin
    return by * first, int(params[maps.CORE_Y1]) - begin


def _maps_out(push: dict[str, Any], params: Any, sizes: Any, read: Any, draw: Draw) -> Piece:
    s, step, lanes, xs = (int(push[k]) for k in ("s", "step", "lanes", "xs"))
    _, before, _, _ = core(params, push)
    columns = int(params[maps.CORE_X1]) - int(params[maps.CORE_X0])
    taken = 2 * draw.fit(2 * s * s * 150.0 + 8 * s * lanes, ceil_div(COLUMNS, 2))
    if columns > taken:
        params[maps.CORE_X0] += 2 * draw.of((columns - taken) // 2 + 1)
        params[maps.CORE_X1] = int(params[maps.CORE_X0]) + taken
    work = 150.0 * s * s * min(columns, taken) + 4.0 * s * lanes * xs
    _core(params, draw, work, 2, LINES)
    x0, y0, x1, y1 = core(params, push)
    # Rows that are left out above; one more than the core's may count on either side.
    top = max(int(params[maps.Y0]), int(params[maps.CORE_Y0]) - 1)
    gone = s * (top - int(params[maps.Y0]))
    rows = min(int(push["h"]) - gone, s * (int(params[maps.CORE_Y1]) - top) + 1)
    params[maps.Y0] = top
    geometry, begin, pixels = _cut(push, (gone, 0, rows, int(push["w"])), 0)
    row = 4 * int(push["stride"])
    takes = {
        "x": _runs(push, begin, pixels, range(1), lanes),
        "dst": [((y0 - before) * row, (y1 - y0) * row)],
    }
    look = _image(push, int(push["stride"]), step * x0, step * x1, y1 - y0)
    return Piece(params, {**push, **geometry}, takes, {"dst": look})


def _plane_scale(push: dict[str, Any], params: Any, sizes: Any, read: Any, draw: Draw) -> Piece:
    by, s, height = 2 if push["half"] else 1, int(push["s"]), int(push["plane_h"])
    width = int(push["step"]) * s * int(push["plane_w"])
    old = int(params[maps.CORE_Y0]) // by
    work = 12.0 * TAPS * s * width / by
    _, lines = _core(params, draw, work, by, LINES * by)
    new = int(params[maps.CORE_Y0]) // by
    rows = ceil_div(int(params[maps.CORE_Y1]), by) - new
    low, source = max(0, new - REACH), max(0, old - REACH)
    high = min(height, new + rows + REACH + 1)
    row, wide = 4 * int(push["stride"]), 4 * int(push["out_stride"])
    takes = {
        "src": [((low - source) * row, (high - low) * row)],
        "filters": [(0, sizes["filters"])],
        "dst": [(s * (new - old) * wide, s * rows * wide)],
    }
    look = _image(push, int(push["out_stride"]), 0, width, s * rows)
    return Piece(params, push, takes, {"dst": look}, work=work * lines)


MAKERS: Mapping[str, Callable[..., Piece]] = {
    "conv2d": _conv2d,
    "pointwise": _pointwise,
    "resize": _resize,
    "pixel_shuffle": _pixel_shuffle,
    "maps_in": _maps_in,
    "maps_out": _maps_out,
    "plane_scale": _plane_scale,
}
