# SPDX-License-Identifier: Apache-2.0
"""Pieces of a kernel call, small enough to be computed again with numpy while a device serves.

A piece is a call of the same operation on a part of the same data: some rows of a matrix, a few
tokens, one head with its keys, lines of a tile. What it reads is copied before the call, what it
writes after it, and its reference has to give the same. How large a piece is follows the time that
there is for it (`Draw`), down to what still tests the kernel: a tile of rows, a token, a line.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from kernels import kv, maps_pieces, video, weights
from kernels.best.op import PART_WORDS
from kernels.contract import LAST_ROW, N_TOKENS, POS0, Contract, ceil_div
from kernels.piece import Draw as Draw
from kernels.piece import Piece as Piece
from kernels.piece import Read
from kernels.text import FORMAT_NAMES
from kernels.topk.op import BLOCK, RECORD_WORDS

Array = npt.NDArray[Any]
Push = Mapping[str, Any]

# The most of a piece: tiles of rows of a matrix, rows of a vector, tokens, lines of a picture.
TILES, ROWS, TOKENS, LINES = 4, 64, 4, 4
SIDES = ((4, 64), (4, 32), (2, 32), (2, 16))  # lines and columns of a network's
UNPACK = 4.0  # units of work (kernels/piece.py) for a weight of a matrix


def floats(array: Array) -> Array:
    return array.view(np.float32)


def words(array: Array) -> Array:
    return array.view(np.uint32)


def piece(
    contract: Contract,
    push: Push,
    params: npt.NDArray[np.uint32],
    sizes: Mapping[str, int],
    read: Read,
    draw: Draw,
) -> Piece | None:
    """A piece of a call, chosen by chance; None when the operation has no way to make one.

    sizes: bytes of each binding; read: for what the choice depends on.
    """
    make = _MAKERS.get(contract.name)
    return make(dict(push), params.copy(), sizes, read, draw) if make else None


def wrong(got: Array, want: Array, exact: bool) -> float:
    """The share of elements that cannot be rounding. `exact`: the variant computes in float32."""
    if got.dtype == np.uint32:
        from kernels.samples import differs

        return differs(got, want)
    if got.dtype.kind == "u":
        step = 1 if got.dtype.itemsize == 1 else 16
        good = np.abs(got.astype(np.int64) - want) <= step
    else:
        x, y = got.astype(np.float64), want.astype(np.float64)
        share = 5e-3 if exact else 2e-2
        size = np.abs(y[np.isfinite(y)]).max(initial=1e-6)
        good = np.isclose(x, y, rtol=share, atol=share * float(size), equal_nan=True)
    return float(1 - good.mean()) if good.size else 0.0


# One function an operation.


def _rows(push: Push, w: int, first: int, tiles: int) -> tuple[int, tuple[int, int]]:
    """Some tiles of a matrix: how many rows, and their run of bytes."""
    n, k = int(push["n"]), int(push["k"])
    tile = weights.nbytes(FORMAT_NAMES[push["fmt"]], weights.ROWS, k)
    rows = min(tiles * weights.ROWS, n - first * weights.ROWS)
    return rows, (first * tile, min(tiles * tile, w - first * tile))


def _matvec(push: dict[str, Any], params: Any, sizes: Any, read: Read, draw: Draw) -> Piece:
    each = UNPACK * weights.ROWS * int(push["k"]) * (2 if "up" in push else 1)
    tile, tiles = draw.some(ceil_div(push["n"], weights.ROWS), each, TILES)
    rows, run = _rows(push, sizes["w"], tile, tiles)
    takes = {"w": [run], "y": [(4 * (push["y0"] + tile * weights.ROWS), 4 * rows)]}
    k = 4 * int(push["k"])
    if "up" in push:  # of matvec_norm_glu: the unit's rows behind those of the gate
        apart = int(push["up"]) // weights.ROWS * (run[1] // tiles)
        takes["w"].append((run[0] + apart, run[1]))
        push = {**push, "up": tiles * weights.ROWS}
    if "eps" in push:  # of matvec_norm
        takes |= {"x": [(int(params[LAST_ROW]) * k, k)], "norm": [(0, k)]}
        params[LAST_ROW] = 0
    elif "act" in push:  # of matvec_glu
        takes["gu"] = [(0, 2 * k)]
    else:
        takes["x"] = [(0, k)]
    push = {**push, "n": rows, "y0": 0}
    return Piece(params, push, takes, {"y": floats}, work=each * tiles)


def _matmul(push: dict[str, Any], params: Any, sizes: Any, read: Read, draw: Draw) -> Piece:
    k, ldy, row = int(push["k"]), int(push["ldy"]), 30.0 * push["k"]
    each = UNPACK * weights.ROWS * k
    t, tokens = _tokens(params, draw, row, each)
    tile, tiles = draw.some(ceil_div(push["n"], weights.ROWS), each, TILES, row * tokens)
    rows, run = _rows(push, sizes["w"], tile, tiles)
    begin = int(push["y0"]) + tile * weights.ROWS
    takes = {
        "w": [run],
        "x": [(4 * t * k, 4 * tokens * k)],
        "y": [(4 * (i * ldy + begin), 4 * rows) for i in range(t, t + tokens)],
    }
    push = {**push, "n": rows, "y0": 0, "ldy": rows}
    return Piece(params, push, takes, {"y": floats}, work=each * tiles + row * tokens)


def _tokens(params: Any, draw: Draw, each: float, beside: float = 0.0) -> tuple[int, int]:
    """Some of the slice's tokens, the first and how many; the parameters then speak of them."""
    t, tokens = draw.some(int(params[N_TOKENS]), each, TOKENS, beside)
    params[N_TOKENS] = tokens
    return t, tokens


def _embed(push: dict[str, Any], params: Any, sizes: Any, read: Read, draw: Draw) -> Piece:
    k, t = push["k"], draw.of(int(params[N_TOKENS]))
    ident = read("ids", 4 * t, 4).copy()
    tile = weights.nbytes(FORMAT_NAMES[push["fmt"]], weights.ROWS, k)
    row = int(words(ident)[0]) - push["row0"]
    # A row of another shard: then the call has to leave the token alone.
    number = row // weights.ROWS if 0 <= row < push["rows"] else 0
    rows = min(weights.ROWS, push["rows"] - number * weights.ROWS)
    params[N_TOKENS] = 1
    takes = {"table": [(number * tile, tile)], "out": [(4 * t * k, 4 * k)]}
    push = {**push, "row0": push["row0"] + number * weights.ROWS, "rows": rows}
    work = UNPACK * weights.ROWS * k
    return Piece(params, push, takes, {"out": floats}, {"ids": ident}, work)


def _token(params: Any, draw: Draw) -> int:
    """One of the slice's tokens; the parameters then speak of it alone."""
    t = draw.of(int(params[N_TOKENS]))
    params[N_TOKENS], params[LAST_ROW] = 1, 0
    return t


def _rmsnorm(push: dict[str, Any], params: Any, sizes: Any, read: Read, draw: Draw) -> Piece:
    row = 4 * push["k"]
    last = int(params[LAST_ROW])
    t = _token(params, draw)
    x, y = (last, 0) if push["last"] else (t, t)
    takes = {"x": [(x * row, row)], "w": [(0, row)], "y": [(y * row, row)]}
    return Piece(params, push, takes, {"y": floats})


def _swiglu(push: dict[str, Any], params: Any, sizes: Any, read: Read, draw: Draw) -> Piece:
    row, t = 4 * push["f"] * push["each"], _token(params, draw)
    takes = {"gu": [(2 * t * row, 2 * row)], "h": [(t * row, row)]}
    return Piece(params, push, takes, {"h": floats})


def _add_bias(push: dict[str, Any], params: Any, sizes: Any, read: Read, draw: Draw) -> Piece:
    row, t = 4 * push["n"], _token(params, draw)
    return Piece(params, push, {"b": [(0, row)], "y": [(t * row, row)]}, {"y": floats})


def _row_gate(push: dict[str, Any], params: Any, sizes: Any, read: Read, draw: Draw) -> Piece:
    row, t = 4 * push["n"], _token(params, draw)
    return Piece(params, push, {"g": [(4 * t, 4)], "y": [(t * row, row)]}, {"y": floats})


def _head_norm(push: dict[str, Any], params: Any, sizes: Any, read: Read, draw: Draw) -> Piece:
    t = _token(params, draw)
    row = 4 * (push["heads"] + 2 * push["kv_heads"]) * push["dim"]
    takes = {"w": [(0, sizes["w"])], "qkv": [(t * row, row)]}
    return Piece(params, push, takes, {"qkv": floats})


def _softcap(push: dict[str, Any], params: Any, sizes: Any, read: Read, draw: Draw) -> Piece:
    first = draw.of(ceil_div(push["n"], ROWS)) * ROWS
    n = min(ROWS, push["n"] - first)
    return Piece(params, {**push, "n": n}, {"x": [(4 * first, 4 * n)]}, {"x": floats})


def _route(push: dict[str, Any], params: Any, sizes: Any, read: Read, draw: Draw) -> Piece:
    t, row, used = _token(params, draw), 4 * push["experts"], 8 * push["used"]
    takes = {"logits": [(t * row, row)], "out": [(t * used, used)]}
    return Piece(params, push, takes, {"out": words})


def _experts(push: dict[str, Any], params: Any, sizes: Any, read: Read, draw: Draw) -> Piece:
    """A tile of rows of those experts that a token has here."""
    n, k, used, add = (int(push[name]) for name in ("n", "k", "used", "sum"))
    tile, tiles = weights.nbytes(FORMAT_NAMES[push["fmt"]], weights.ROWS, k), n // weights.ROWS
    t, at, first = draw.of(int(params[N_TOKENS])), draw.of(tiles), int(push["first"])
    params[N_TOKENS] = 1
    route = words(read("route", 8 * used * t, 8 * used).copy())
    chosen = [e for e in route[::2].tolist() if 0 <= e - first < push["count"]]
    numbers = {e: i for i, e in enumerate(dict.fromkeys(chosen))}
    # Those of another shard stay left out, and all of them have a place in what is taken.
    route[::2] = [numbers.get(e, used) for e in route[::2].tolist()]
    experts = [e - first for e in numbers] or [0]
    row, begin = t * (1 if add else used), int(push["y0"]) + at * weights.ROWS
    rows, given = (1, used) if add else (used, 1)
    takes = {
        "w": [((e * tiles + at) * tile, tile) for e in experts],
        "x": [(4 * k * given * t, 4 * k * given)],
        "y": [(4 * (i * push["ldy"] + begin), 4 * weights.ROWS) for i in range(row, row + rows)],
    }
    here = {"first": 0, "count": len(experts), "n": weights.ROWS, "y0": 0, "ldy": weights.ROWS}
    work = UNPACK * weights.ROWS * k * len(experts)
    return Piece(params, {**push, **here}, takes, {"y": floats}, {"route": route}, work)


def _topk(
    record: int, push: dict[str, Any], params: Any, sizes: Any, read: Read, draw: Draw
) -> Piece:
    """Some blocks, or what the second stage makes of all. record: bytes that a block leaves."""
    v = int(push["v"])
    if push["stage"]:
        takes = {"part": [(0, ceil_div(v, BLOCK) * record)], "out": [(0, sizes["out"])]}
        return Piece(params, push, {**takes, "logits": [(0, 4)]}, {"out": words})
    each = 100.0 * BLOCK
    first, blocks = draw.some(ceil_div(v, BLOCK), each, 2 * TOKENS)
    n = min(blocks * BLOCK, v - first * BLOCK)
    takes = {"logits": [(4 * first * BLOCK, 4 * n)], "part": [(first * record, blocks * record)]}
    push = {**push, "v": n, "first": first * BLOCK}
    takes["out"] = [(0, 4)]
    return Piece(params, push, takes, {"part": words}, work=each * blocks)


def _advance(push: dict[str, Any], params: Any, sizes: Any, read: Read, draw: Draw) -> Piece:
    takes = {name: [(0, n)] for name, n in sizes.items()}
    return Piece(params, push, takes, dict.fromkeys(("next", "ids", "records"), words))


def _caches(push: Push, heads: range, first: int, count: int) -> dict[str, list[tuple[int, int]]]:
    """What a piece takes of the caches: some positions of some heads."""
    shape = (int(push["kv_heads"]), int(push["ctx"]), int(push["dim"]))
    return dict.fromkeys(
        ("kc", "vc"), kv.runs(FORMAT_NAMES[push["fmt"]], shape, heads, first, count)
    )


def _group(push: Push, draw: Draw, row: int) -> tuple[int, int, list[tuple[int, int]]]:
    """A key's head, how many of the query use it, and where theirs are in a row of qkv."""
    heads, kv_heads, dim = (int(push[k]) for k in ("heads", "kv_heads", "dim"))
    each, g = heads // kv_heads, draw.of(kv_heads)
    at = row * (heads + 2 * kv_heads)
    places = (g * each, each), (heads + g, 1), (heads + kv_heads + g, 1)
    return g, each, [(4 * dim * (at + h), 4 * dim * n) for h, n in places]


def _rope_kv(push: dict[str, Any], params: Any, sizes: Any, read: Read, draw: Draw) -> Piece:
    """One token, a key's head and the heads of the query that use it."""
    dim, pos, row = int(push["dim"]), int(params[POS0]), 4 * int(push["rope_dims"])
    t = draw.of(int(params[N_TOKENS]))
    params[N_TOKENS], params[POS0] = 1, 0
    g, each, qkv = _group(push, draw, t)
    takes = {"qkv": qkv, "table": [((pos + t) * row, row)]}
    takes |= _caches(push, range(g, g + 1), pos + t, 1)

    def numbers(cache: Array) -> Array:
        return kv.load(FORMAT_NAMES[push["fmt"]], cache, (1, 1, dim))

    part = {**push, "heads": each, "kv_heads": 1, "ctx": 1}
    return Piece(params, part, takes, {"qkv": floats, "kc": numbers, "vc": numbers})


def _attention(push: dict[str, Any], params: Any, sizes: Any, read: Read, draw: Draw) -> Piece:
    """One key's head, and the heads of the query that use it, for some tokens."""
    heads, kv_heads, dim = (int(push[k]) for k in ("heads", "kv_heads", "dim"))
    each, width = heads // kv_heads, heads + 2 * kv_heads
    g, pos = draw.of(kv_heads), int(params[POS0])
    fixed, row = _attention_work(push, pos + int(params[N_TOKENS]))
    t, tokens = _tokens(params, draw, each * row, fixed)
    first = _begin(push, pos + t)
    params[POS0], used = pos + t - first, pos + t + tokens - first
    # Keys and values come from the caches; of qkv they only have to take their place.
    qkv = [
        (4 * dim * (i * width + h), 4 * dim * n)
        for i in range(t, t + tokens)
        for h, n in ((g * each, each), (heads, 2))
    ]
    out = [(4 * dim * (i * heads + g * each), 4 * dim * each) for i in range(t, t + tokens)]
    takes = {"qkv": qkv, **_caches(push, range(g, g + 1), first, used), "out": out}
    push = {**push, "heads": each, "kv_heads": 1, "ctx": used}
    return Piece(params, push, takes, {"out": floats}, work=fixed + tokens * each * row)


def _attention_work(push: Push, used: int) -> tuple[float, float]:
    """What the caches' rows cost, and a row of the query."""
    window = int(push["window"])
    elements = int(push["dim"]) * (min(used, window) if window else used)
    return 4.0 * elements, 1.0 * elements + 20e3


def _begin(push: Push, pos: int) -> int:
    """The first position that a token at `pos` sees."""
    return max(0, pos + 1 - int(push["window"])) if push["window"] else 0


def _attention_step(push: dict[str, Any], params: Any, sizes: Any, read: Read, draw: Draw) -> Piece:
    """One key's head, and the heads of the query that use it."""
    dim, pos, row = int(push["dim"]), int(params[POS0]), 4 * int(push["rope_dims"])
    first = _begin(push, pos)
    params[POS0], used = pos - first, pos + 1 - first
    g, each, qkv = _group(push, draw, 0)
    table = np.zeros(used * row, np.uint8)  # of the angles the token's own are used
    table[-row:] = read("table", pos * row, row)
    takes = {"qkv": qkv} | _caches(push, range(g, g + 1), first, used)

    def numbers(cache: Array) -> Array:
        return kv.load(FORMAT_NAMES[push["fmt"]], cache, (1, used, dim))[:, -1:]

    fixed, one = _attention_work(push, used)
    push = {**push, "heads": each, "kv_heads": 1, "ctx": used}
    shows = {"qkv": floats, "kc": numbers, "vc": numbers}
    return Piece(params, push, takes, shows, {"table": table}, fixed + each * one)


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


_MAKERS: Mapping[str, Callable[..., Piece]] = {
    "matvec": _matvec,
    "matvec_norm": _matvec,
    "matvec_glu": _matvec,
    "matvec_norm_glu": _matvec,
    "matmul": _matmul,
    "embed": _embed,
    "rmsnorm": _rmsnorm,
    "swiglu": _swiglu,
    "add_bias": _add_bias,
    "row_gate": _row_gate,
    "head_norm": _head_norm,
    "softcap": _softcap,
    "route": _route,
    "experts": _experts,
    "topk": partial(_topk, 4 * RECORD_WORDS),
    "best": partial(_topk, 4 * PART_WORDS),
    "advance": _advance,
    "rope_kv": _rope_kv,
    "attention_decode": _attention,
    "attention_step": _attention_step,
    "attention_prefill": _attention,
    "conv3x3": _conv3x3,
    "luma_in": _luma_in,
    "shuffle_out": _shuffle_out,
    "nsr": _nsr,
    "filter_out": _filter_out,
    "resample": _resample,
    "chroma_in": _chroma_in,
    "skip_add": _skip_add,
    **maps_pieces.MAKERS,
}
