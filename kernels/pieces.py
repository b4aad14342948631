# SPDX-License-Identifier: Apache-2.0
"""Pieces of a kernel call, small enough to be computed again with numpy while a device serves.

A piece is a call of the same operation on a part of the same data: some rows of a matrix, one
token, one head with its keys, one tile. What it reads is copied before the call, what it writes
after it, and its reference has to give the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from kernels import kv, maps_pieces, video, weights
from kernels.contract import LAST_ROW, N_TOKENS, POS0, Contract, ceil_div
from kernels.piece import Piece as Piece
from kernels.piece import Read
from kernels.text import FORMAT_NAMES

Array = npt.NDArray[Any]
Push = Mapping[str, Any]

ROWS = 64  # of a matrix
LINES = 4  # of a convolution's tile
SIDE = 64  # columns of a network's


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
    rng: np.random.Generator,
) -> Piece | None:
    """A piece of a call, chosen by chance; None when the operation has no way to make one.

    sizes: bytes of each binding; read: for what the choice depends on.
    """
    make = _MAKERS.get(contract.name)
    return make(dict(push), params.copy(), sizes, read, rng) if make else None


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


def _rows(push: Push, w: int, rng: np.random.Generator) -> tuple[int, int, tuple[int, int]]:
    """Some rows of a matrix: the first, how many, and their run of bytes."""
    n, k = int(push["n"]), int(push["k"])
    tile = weights.nbytes(FORMAT_NAMES[push["fmt"]], weights.ROWS, k)
    first = int(rng.integers(-(-n // ROWS))) * ROWS
    rows = min(ROWS, n - first)
    at = first // weights.ROWS * tile
    return first, rows, (at, min(-(-rows // weights.ROWS) * tile, w - at))


def _matvec(push: dict[str, Any], params: Any, sizes: Any, read: Read, rng: Any) -> Piece:
    first, rows, run = _rows(push, sizes["w"], rng)
    takes = {"w": [run], "y": [(4 * (push["y0"] + first), 4 * rows)]}
    k = 4 * int(push["k"])
    if "up" in push:  # of matvec_norm_glu: the unit's rows behind those of the gate
        apart = int(push["up"]) // weights.ROWS * (run[1] // ceil_div(rows, weights.ROWS))
        takes["w"].append((run[0] + apart, run[1]))
        push = {**push, "up": ceil_div(rows, weights.ROWS) * weights.ROWS}
    if "eps" in push:  # of matvec_norm
        takes |= {"x": [(int(params[LAST_ROW]) * k, k)], "norm": [(0, k)]}
        params[LAST_ROW] = 0
    elif "act" in push:  # of matvec_glu
        takes["gu"] = [(0, 2 * k)]
    else:
        takes["x"] = [(0, k)]
    return Piece(params, {**push, "n": rows, "y0": 0}, takes, {"y": floats})


def _matmul(push: dict[str, Any], params: Any, sizes: Any, read: Read, rng: Any) -> Piece:
    first, rows, run = _rows(push, sizes["w"], rng)
    tokens, begin = int(params[N_TOKENS]), push["y0"] + first
    takes = {
        "w": [run],
        "x": [(0, 4 * tokens * push["k"])],
        "y": [(4 * (t * push["ldy"] + begin), 4 * rows) for t in range(tokens)],
    }
    return Piece(params, {**push, "n": rows, "y0": 0, "ldy": rows}, takes, {"y": floats})


def _embed(push: dict[str, Any], params: Any, sizes: Any, read: Read, rng: Any) -> Piece:
    k, t = push["k"], int(rng.integers(max(1, int(params[N_TOKENS]))))
    ident = read("ids", 4 * t, 4).copy()
    tile = weights.nbytes(FORMAT_NAMES[push["fmt"]], weights.ROWS, k)
    row = int(words(ident)[0]) - push["row0"]
    # A row of another shard: then the call has to leave the token alone.
    number = row // weights.ROWS if 0 <= row < push["rows"] else 0
    rows = min(weights.ROWS, push["rows"] - number * weights.ROWS)
    params[N_TOKENS] = 1
    takes = {"table": [(number * tile, tile)], "out": [(4 * t * k, 4 * k)]}
    push = {**push, "row0": push["row0"] + number * weights.ROWS, "rows": rows}
    return Piece(params, push, takes, {"out": floats}, {"ids": ident})


def _token(params: Any, rng: Any) -> int:
    """One of the slice's tokens; the parameters then speak of it alone."""
    t = int(rng.integers(max(1, int(params[N_TOKENS]))))
    params[N_TOKENS], params[LAST_ROW] = 1, 0
    return t


def _rmsnorm(push: dict[str, Any], params: Any, sizes: Any, read: Read, rng: Any) -> Piece:
    row = 4 * push["k"]
    last = int(params[LAST_ROW])
    t = _token(params, rng)
    x, y = (last, 0) if push["last"] else (t, t)
    takes = {"x": [(x * row, row)], "w": [(0, row)], "y": [(y * row, row)]}
    return Piece(params, push, takes, {"y": floats})


def _swiglu(push: dict[str, Any], params: Any, sizes: Any, read: Read, rng: Any) -> Piece:
    row, t = 4 * push["f"] * push["each"], _token(params, rng)
    takes = {"gu": [(2 * t * row, 2 * row)], "h": [(t * row, row)]}
    return Piece(params, push, takes, {"h": floats})


def _add_bias(push: dict[str, Any], params: Any, sizes: Any, read: Read, rng: Any) -> Piece:
    row, t = 4 * push["n"], _token(params, rng)
    return Piece(params, push, {"b": [(0, row)], "y": [(t * row, row)]}, {"y": floats})


def _row_gate(push: dict[str, Any], params: Any, sizes: Any, read: Read, rng: Any) -> Piece:
    row, t = 4 * push["n"], _token(params, rng)
    return Piece(params, push, {"g": [(4 * t, 4)], "y": [(t * row, row)]}, {"y": floats})


def _head_norm(push: dict[str, Any], params: Any, sizes: Any, read: Read, rng: Any) -> Piece:
    t = _token(params, rng)
    row = 4 * (push["heads"] + 2 * push["kv_heads"]) * push["dim"]
    takes = {"w": [(0, sizes["w"])], "qkv": [(t * row, row)]}
    return Piece(params, push, takes, {"qkv": floats})


def _softcap(push: dict[str, Any], params: Any, sizes: Any, read: Read, rng: Any) -> Piece:
    first = int(rng.integers(-(-push["n"] // ROWS))) * ROWS
    n = min(ROWS, push["n"] - first)
    return Piece(params, {**push, "n": n}, {"x": [(4 * first, 4 * n)]}, {"x": floats})


def _route(push: dict[str, Any], params: Any, sizes: Any, read: Read, rng: Any) -> Piece:
    t, row, used = _token(params, rng), 4 * push["experts"], 8 * push["used"]
    takes = {"logits": [(t * row, row)], "out": [(t * used, used)]}
    return Piece(params, push, takes, {"out": words})


def _experts(push: dict[str, Any], params: Any, sizes: Any, read: Read, rng: Any) -> Piece:
    """A tile of rows of every expert."""
    n, k, used, add = (int(push[name]) for name in ("n", "k", "used", "sum"))
    pairs = int(params[N_TOKENS]) * used
    tile, tiles = weights.nbytes(FORMAT_NAMES[push["fmt"]], weights.ROWS, k), n // weights.ROWS
    at = int(rng.integers(tiles))
    rows = pairs // used if add else pairs
    begin = push["y0"] + at * weights.ROWS
    takes = {
        "w": [((e * tiles + at) * tile, tile) for e in range(int(push["count"]))],
        "x": [(0, 4 * k * (pairs if add else pairs // used))],
        "route": [(0, 8 * pairs)],
        "y": [(4 * (row * push["ldy"] + begin), 4 * weights.ROWS) for row in range(rows)],
    }
    push = {**push, "n": weights.ROWS, "y0": 0, "ldy": weights.ROWS}
    return Piece(params, push, takes, {"y": floats})


def _topk(push: dict[str, Any], params: Any, sizes: Any, read: Read, rng: Any) -> Piece:
    takes = {name: [(0, n)] for name, n in sizes.items()}
    takes["logits"] = [(0, 4 * push["v"])]
    return Piece(params, push, takes, {("out" if push["stage"] else "part"): words})


def _advance(push: dict[str, Any], params: Any, sizes: Any, read: Read, rng: Any) -> Piece:
    takes = {name: [(0, n)] for name, n in sizes.items()}
    return Piece(params, push, takes, dict.fromkeys(("next", "ids", "records"), words))


def _caches(push: Push, heads: range, first: int, count: int) -> dict[str, list[tuple[int, int]]]:
    """What a piece takes of the caches: some positions of some heads."""
    shape = (int(push["kv_heads"]), int(push["ctx"]), int(push["dim"]))
    return dict.fromkeys(
        ("kc", "vc"), kv.runs(FORMAT_NAMES[push["fmt"]], shape, heads, first, count)
    )


def _rope_kv(push: dict[str, Any], params: Any, sizes: Any, read: Read, rng: Any) -> Piece:
    heads, kv_heads, dim = (int(push[k]) for k in ("heads", "kv_heads", "dim"))
    tokens, pos = int(params[N_TOKENS]), int(params[POS0])
    params[POS0] = 0
    row = 4 * push["rope_dims"]
    takes = {
        "qkv": [(0, 4 * tokens * (heads + 2 * kv_heads) * dim)],
        "table": [(pos * row, tokens * row)],
        **_caches(push, range(kv_heads), pos, tokens),
    }

    def numbers(cache: Array) -> Array:
        return kv.load(FORMAT_NAMES[push["fmt"]], cache, (kv_heads, tokens, dim))

    shows = {"qkv": floats, "kc": numbers, "vc": numbers}
    return Piece(params, {**push, "ctx": tokens}, takes, shows)


def _attention(push: dict[str, Any], params: Any, sizes: Any, read: Read, rng: Any) -> Piece:
    """One key's head, and the heads of the query that use it."""
    heads, kv_heads, dim = (int(push[k]) for k in ("heads", "kv_heads", "dim"))
    each, width = heads // kv_heads, heads + 2 * kv_heads
    g = int(rng.integers(kv_heads))
    tokens = int(params[N_TOKENS])
    # Keys and values come from the caches; of qkv they only have to take their place.
    qkv = [
        (4 * dim * (t * width + h), 4 * dim * n)
        for t in range(tokens)
        for h, n in ((g * each, each), (heads, 2))
    ]
    used = int(params[POS0]) + tokens
    out = [(4 * dim * (t * heads + g * each), 4 * dim * each) for t in range(tokens)]
    takes = {"qkv": qkv, **_caches(push, range(g, g + 1), 0, used), "out": out}
    push = {**push, "heads": each, "kv_heads": 1, "ctx": used}
    return Piece(params, push, takes, {"out": floats})


def _attention_step(push: dict[str, Any], params: Any, sizes: Any, read: Read, rng: Any) -> Piece:
    """One key's head, and the heads of the query that use it."""
    heads, kv_heads, dim = (int(push[k]) for k in ("heads", "kv_heads", "dim"))
    each, g, used = heads // kv_heads, int(rng.integers(kv_heads)), int(params[POS0]) + 1
    qkv = [
        (4 * dim * h, 4 * dim * n)
        for h, n in ((g * each, each), (heads + g, 1), (heads + kv_heads + g, 1))
    ]
    takes = {"qkv": qkv, "table": [(0, 4 * used * push["rope_dims"])]}
    takes |= _caches(push, range(g, g + 1), 0, used)

    def numbers(cache: Array) -> Array:
        return kv.load(FORMAT_NAMES[push["fmt"]], cache, (1, used, dim))

    push = {**push, "heads": each, "kv_heads": 1, "ctx": used}
    return Piece(params, push, takes, {"qkv": floats, "kc": numbers, "vc": numbers})


def _conv3x3(push: dict[str, Any], params: Any, sizes: Any, read: Read, rng: Any) -> Piece:
    cin, cout, rows, xs = (int(push[k]) for k in ("cin", "cout", "rows", "xs"))
    t = int(rng.integers(max(1, int(params[video.N_TILES]))))
    first = int(rng.integers(-(-rows // LINES))) * LINES
    lines = min(LINES, rows - first)
    params[video.N_TILES] = 1
    takes = {
        "x": [(4 * (t * push["x_tile"] + first * cin * xs), 4 * ((lines + 2) * cin * xs + 2))],
        "w": [(0, sizes["w"])],
        "y": [(4 * (t * push["y_tile"] + first * cout * xs), 4 * lines * cout * xs)],
    }
    return Piece(params, {**push, "rows": lines}, takes, {"y": floats})


def _tile(params: Any, rng: Any) -> int:
    t = int(rng.integers(max(1, int(params[video.N_TILES]))))
    params[video.N_TILES] = 1
    params[video.COL0] += t
    return t


def _luma_in(push: dict[str, Any], params: Any, sizes: Any, read: Read, rng: Any) -> Piece:
    t = _tile(params, rng)
    size = 4 * (push["th"] + 2 * push["halo"]) * push["xs"]
    takes = {"src": [(0, sizes["src"])], "y": [(4 * t * push["y_tile"], size)]}
    return Piece(params, push, takes, {"y": floats})


def _image(push: Push, stride: int, bits: int) -> Callable[[Array], Array]:
    each = stride * (4 if bits == 8 else 2)

    def look(array: Array) -> Array:
        samples = video.samples(array, bits)
        return samples[: samples.size // each * each].reshape(-1, each)

    return look


def _chroma_in(push: dict[str, Any], params: Any, sizes: Any, read: Read, rng: Any) -> Piece:
    t = _tile(params, rng)
    size = 4 * 5 * (push["th"] + 2 * push["halo"]) * push["xs"]
    takes = {name: [(0, sizes[name])] for name in ("src", "luma")}
    takes["y"] = [(4 * t * push["y_tile"], size)]
    return Piece(params, push, takes, {"y": floats})


def _skip_add(push: dict[str, Any], params: Any, sizes: Any, read: Read, rng: Any) -> Piece:
    t = int(rng.integers(max(1, int(params[video.N_TILES]))))
    row, offset = int(push["channels"]) * int(push["xs"]), int(push["offset"])
    first = int(rng.integers(-(-int(push["rows"]) // LINES))) * LINES
    lines = min(LINES, push["rows"] - first)
    params[video.N_TILES] = 1
    at = t * push["tile"] + first * row
    kept = (4 * (at + offset * row + offset), 4 * lines * row)
    takes = {"kept": [kept], "slope": [(0, sizes["slope"])], "y": [(4 * at, 4 * lines * row)]}
    # What is taken of `kept` begins where the sum's first row does.
    return Piece(params, {**push, "rows": lines, "offset": 0}, takes, {"y": floats})


def _shuffle_out(push: dict[str, Any], params: Any, sizes: Any, read: Read, rng: Any) -> Piece:
    t = _tile(params, rng)
    th, halo, xs, tw, scale = (int(push[k]) for k in ("th", "halo", "xs", "tw", "scale"))
    width, height, band_y = (int(v) for v in params[push["plane"] : push["plane"] + 3])
    x0 = scale * int(params[video.COL0]) * tw
    x1 = min(x0 + scale * tw, scale * width)
    rows = max(0, scale * min(th, height - band_y))
    image = _image(push, push["stride"], push["bits"])
    step, component = push["step"], push["component"]
    channels = -(-scale * scale // 4) * 4
    takes = {
        "f": [(4 * t * push["f_tile"], 4 * channels * th * xs)],
        "x": [(4 * t * push["x_tile"], 4 * (th + 2 * halo) * push["x_row"])],
        "base": [(0, sizes["base"])],
        "dst": [(0, sizes["dst"])],
    }
    own = slice(step * x0 + component, step * x1, step)
    return Piece(params, push, takes, {"dst": lambda array: image(array)[:rows, own]})


def _filter_out(push: dict[str, Any], params: Any, sizes: Any, read: Read, rng: Any) -> Piece:
    scale = int(push["scale"])
    rows = scale * int(params[video.C_ROWS])
    cols = scale * int(params[video.C_WIDTH]) * push["step"]
    image = _image(push, push["out_stride"], push["bits"])
    takes = {name: [(0, n)] for name, n in sizes.items()}
    return Piece(params, push, takes, {"dst": lambda array: image(array)[:rows, :cols]})


def _resample(push: dict[str, Any], params: Any, sizes: Any, read: Read, rng: Any) -> Piece:
    rows, cols = int(params[push["plane"] + 4]), push["width"] * push["step"]
    image = _image(push, push["out_stride"], push["bits"])
    takes = {name: [(0, n)] for name, n in sizes.items()}
    return Piece(params, push, takes, {"dst": lambda array: image(array)[:rows, :cols]})


def _nsr(push: dict[str, Any], params: Any, sizes: Any, read: Read, rng: Any) -> Piece:
    """LINES rows of SIDE columns: a tile of its own, in its own band."""
    bits, tw, halo, scale = (int(push[k]) for k in ("bits", "tw", "layers", "scale"))
    width, height, top, source = (
        int(params[w]) for w in (video.WIDTH, video.HEIGHT, video.BAND_Y, video.SRC_Y)
    )
    left = int(params[video.COL0]) * tw
    right = min(left + int(params[video.N_TILES]) * tw, width)
    lines = min(int(push["th"]), height - top)
    column = int(rng.integers(left, max(right, left + 1))) // SIDE
    begin = top + int(rng.integers(-(-lines // LINES))) * LINES
    end = min(begin + LINES, top + lines)
    low, high = max(0, begin - halo), min(height, end + halo)
    row, wide = 4 * int(push["stride"]), 4 * int(push["out_stride"])
    takes = {
        "src": [((low - source) * row, (high - low) * row)],
        "w": [(0, sizes["w"])],
        "dst": [(scale * (begin - top) * wide, scale * (end - begin) * wide)],
    }
    params[video.N_TILES], params[video.COL0] = 1, column
    params[video.BAND_Y], params[video.SRC_Y] = begin, low
    x0, x1 = (scale * min(max(x, left), right) for x in (column * SIDE, (column + 1) * SIDE))
    image = _image(push, push["out_stride"], bits)
    push = {**push, "tw": SIDE, "th": end - begin}
    return Piece(params, push, takes, {"dst": lambda array: image(array)[:, x0:x1]})


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
    "topk": _topk,
    "best": _topk,
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
