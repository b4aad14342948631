# SPDX-License-Identifier: Apache-2.0
"""Pieces (kernels/pieces.py) of calls of a video model's operations: lines of a tile or a plane."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from kernels import video
from kernels.contract import ceil_div
from kernels.piece import Array, Draw, Piece, Push, Read, floats, words

LINES = 4  # the most of a piece
SIDES = ((4, 64), (4, 32), (2, 32), (2, 16))  # lines and columns of a network's


def _conv3x3(push: dict[str, Any], params: Any, sizes: Any, read: Read, draw: Draw) -> Piece:
    cin, cout, xs = (int(push[k]) for k in ("cin", "cout", "xs"))
    t, each = draw.of(int(params[video.N_TILES])), 9.0 * cin * cout * xs / 4 + 40 * cin * xs
    first, lines = draw.some(push["rows"], each, LINES)
    params[video.N_TILES] = 1
    takes = {
        "x": [(4 * (t * push["x_tile"] + first * cin * xs), 4 * ((lines + 2) * cin * xs + 2))],
        "w": [(0, sizes["w"])],
        "y": [(4 * (t * push["y_tile"] + first * cout * xs), 4 * lines * cout * xs)],
    }
    return Piece(params, {**push, "rows": lines}, takes, {"y": floats}, work=each * lines)


def _tile(params: Any, draw: Draw) -> int:
    t = draw.of(int(params[video.N_TILES]))
    params[video.N_TILES] = 1
    params[video.COL0] += t
    return t


def _lines_in(
    push: Push, params: Any, draw: Draw, channels: int, places: tuple[int, int, int]
) -> tuple[int, int, int, int, list[tuple[int, int]]]:
    """Lines of a padded tile: how many, the rows that they come from (end exclusive), the first of
    these before and where they lie in y. `places`: the parameter words of the plane's height and of
    the band's and the buffer's first row, which become the piece's.
    """
    t, halo, row = _tile(params, draw), int(push["halo"]), channels * int(push["xs"])
    first, lines = draw.some(push["th"] + 2 * halo, 20.0 * row, 4 * LINES)
    height, band, source = places
    at = int(params[band]) - halo + first
    low, high = (min(max(y, 0), int(params[height]) - 1) for y in (at, at + lines - 1))
    before = int(params[source])
    params[band] += first
    params[source] = low
    place = [(4 * (t * push["y_tile"] + first * row), 4 * lines * row)]
    return lines, low, high + 1, before, place


def _luma_in(push: dict[str, Any], params: Any, sizes: Any, read: Read, draw: Draw) -> Piece:
    lines, low, high, before, place = _lines_in(
        push, params, draw, 1, (video.HEIGHT, video.BAND_Y, video.SRC_Y)
    )
    row = 4 * int(push["stride"])
    takes = {"src": [((low - before) * row, (high - low) * row)], "y": place}
    return Piece(params, {**push, "th": lines - 2 * push["halo"]}, takes, {"y": floats})


def _image(push: Push, stride: int, bits: int) -> Callable[[Array], Array]:
    each = stride * (4 if bits == 8 else 2)

    def look(array: Array) -> Array:
        samples = video.samples(array, bits)
        return samples[: samples.size // each * each].reshape(-1, each)

    return look


def _chroma_in(push: dict[str, Any], params: Any, sizes: Any, read: Read, draw: Draw) -> Piece:
    lines, low, high, before, place = _lines_in(
        push, params, draw, 5, (video.C_HEIGHT, video.C_BAND_Y, video.C_SRC_Y)
    )
    row, luma_row = 4 * int(push["stride"]), 4 * int(push["luma_stride"])
    last, above = int(params[video.HEIGHT]) - 1, int(params[video.SRC_Y])
    top, end = min(2 * low, last), min(2 * high - 1, last) + 1
    params[video.SRC_Y] = top
    takes = {
        "src": [((low - before) * row, (high - low) * row)],
        "luma": [((top - above) * luma_row, (end - top) * luma_row)],
        "y": place,
    }
    return Piece(params, {**push, "th": lines - 2 * push["halo"]}, takes, {"y": floats})


def _skip_add(push: dict[str, Any], params: Any, sizes: Any, read: Read, draw: Draw) -> Piece:
    row, offset = int(push["channels"]) * int(push["xs"]), int(push["offset"])
    t = draw.of(int(params[video.N_TILES]))
    first, lines = draw.some(push["rows"], 12.0 * row, LINES)
    params[video.N_TILES] = 1
    at = t * push["tile"] + first * row
    kept = (4 * (at + offset * row + offset), 4 * lines * row)
    takes = {"kept": [kept], "slope": [(0, sizes["slope"])], "y": [(4 * at, 4 * lines * row)]}
    # What is taken of `kept` begins where the sum's first row does.
    return Piece(params, {**push, "rows": lines, "offset": 0}, takes, {"y": floats})


def _shuffle_out(push: dict[str, Any], params: Any, sizes: Any, read: Read, draw: Draw) -> Piece:
    t = _tile(params, draw)
    th, halo, xs, tw, scale = (int(push[k]) for k in ("th", "halo", "xs", "tw", "scale"))
    width, height, band_y = (int(v) for v in params[push["plane"] : push["plane"] + 3])
    x0 = scale * int(params[video.COL0]) * tw
    x1 = min(x0 + scale * tw, scale * width)
    step, component, channels = push["step"], push["component"], ceil_div(scale * scale, 4) * 4
    each = 80.0 * scale * scale * tw
    first, lines = draw.some(max(1, min(th, height - band_y)), each, LINES)
    params[push["plane"] + 2] += first
    wide, rows = 4 * int(push["stride"]), scale * max(0, min(lines, height - band_y))
    image = _image(push, push["stride"], push["bits"])
    f, x, more = 4 * channels * xs, 4 * int(push["x_row"]), lines + 2 * halo
    takes = {
        "f": [(4 * t * push["f_tile"] + first * f, lines * f)],
        "x": [(4 * t * push["x_tile"] + first * x, more * x)],
        "base": [(0, sizes["base"])],
        "dst": [(scale * first * wide, scale * lines * wide)],
    }
    own = slice(step * x0 + component, step * x1, step)
    shows = {"dst": lambda array: image(array)[:rows, own]}
    return Piece(params, {**push, "th": lines}, takes, shows, work=each * lines)


def _filter_out(push: dict[str, Any], params: Any, sizes: Any, read: Read, draw: Draw) -> Piece:
    scale, width = int(push["scale"]), int(params[video.C_WIDTH]) * int(push["step"])
    each = 60.0 * scale * scale * width
    first, lines = draw.some(int(params[video.C_ROWS]), each, LINES)
    at, height = int(params[video.C_BAND_Y]) + first, int(params[video.C_HEIGHT])
    low, high = max(0, at - 2), min(height, at + lines + 2)
    before = int(params[video.C_SRC_Y])
    params[video.C_BAND_Y], params[video.C_SRC_Y], params[video.C_ROWS] = at, low, lines
    row, wide = 4 * int(push["stride"]), 4 * int(push["out_stride"])
    takes = {
        "src": [((low - before) * row, (high - low) * row)],
        "filters": [(0, sizes["filters"])],
        "dst": [(scale * first * wide, scale * lines * wide)],
    }
    image = _image(push, push["out_stride"], push["bits"])
    shows = {"dst": lambda array: image(array)[: scale * lines, : scale * width]}
    return Piece(params, push, takes, shows, work=each * lines)


def _resample(push: dict[str, Any], params: Any, sizes: Any, read: Read, draw: Draw) -> Piece:
    plane, cols, taps = int(push["plane"]), push["width"] * push["step"], int(push["taps_down"])
    _, _, out_y, src_y, rows = (int(v) for v in params[plane : plane + 5])
    each = 4.0 * (int(push["taps_across"]) + 1) * cols + 4.0 * taps * 4 * push["stride"]
    first, lines = draw.some(rows, each, LINES)
    records = (4 * (out_y + first) * (taps + 1), 4 * lines * (taps + 1))
    at = words(read("down", *records).copy()).reshape(lines, -1)[:, 0]
    low, high = int(at.min()), int(at.max()) + taps
    params[plane + 2 : plane + 5] = 0, low, lines
    row, wide = 4 * int(push["stride"]), 4 * int(push["out_stride"])
    takes = {
        "src": [((low - src_y) * row, (high - low) * row)],
        "down": [records],
        "across": [(0, sizes["across"])],
        "dst": [(first * wide, lines * wide)],
    }
    image = _image(push, push["out_stride"], push["bits"])
    shows = {"dst": lambda array: image(array)[:lines, :cols]}
    return Piece(params, push, takes, shows, work=each * lines)


def _nsr(push: dict[str, Any], params: Any, sizes: Any, read: Read, draw: Draw) -> Piece:
    """Some lines and columns: a tile of its own, in its own band."""
    bits, tw, halo, scale = (int(push[k]) for k in ("bits", "tw", "layers", "scale"))
    width, height, top, source = (
        int(params[w]) for w in (video.WIDTH, video.HEIGHT, video.BAND_Y, video.SRC_Y)
    )
    left = int(params[video.COL0]) * tw
    right = min(left + int(params[video.N_TILES]) * tw, width)
    full = min(int(push["th"]), height - top)
    works = [_nsr_work(push, *size) for size in SIDES]
    i = next((i for i, work in enumerate(works) if work <= draw.most), len(SIDES) - 1)
    most, side = SIDES[i]
    column = (left + draw.of(right - left)) // side
    begin = top + draw.of(ceil_div(full, most)) * most
    end = min(begin + most, top + full)
    low, high = max(0, begin - halo), min(height, end + halo)
    row, wide = 4 * int(push["stride"]), 4 * int(push["out_stride"])
    takes = {
        "src": [((low - source) * row, (high - low) * row)],
        "w": [(0, sizes["w"])],
        "dst": [(scale * (begin - top) * wide, scale * (end - begin) * wide)],
    }
    params[video.N_TILES], params[video.COL0] = 1, column
    params[video.BAND_Y], params[video.SRC_Y] = begin, low
    x0, x1 = (scale * min(max(x, left), right) for x in (column * side, (column + 1) * side))
    image = _image(push, push["out_stride"], bits)
    push = {**push, "tw": side, "th": end - begin}
    shows = {"dst": lambda array: image(array)[:, x0:x1]}
    return Piece(params, push, takes, shows, work=works[i])


def _nsr_work(push: Push, lines: int, side: int) -> float:
    halo, channels = int(push["layers"]), int(push["channels"])
    return (lines + 2 * halo) * (side + 2 * halo) * halo * (9 * channels**2 / 10 + 20 * channels)


MAKERS: Mapping[str, Callable[..., Piece]] = {
    "conv3x3": _conv3x3,
    "luma_in": _luma_in,
    "shuffle_out": _shuffle_out,
    "nsr": _nsr,
    "filter_out": _filter_out,
    "resample": _resample,
    "chroma_in": _chroma_in,
    "skip_add": _skip_add,
}
