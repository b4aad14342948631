# SPDX-License-Identifier: Apache-2.0
"""Pieces (kernels/pieces.py) of calls of a text model's operations: some rows of a matrix, a few
tokens, one head with its keys.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np

from kernels import kv, weights
from kernels.best.op import PART_WORDS
from kernels.contract import LAST_ROW, N_TOKENS, POS0, ceil_div
from kernels.piece import Array, Draw, Piece, Push, Read, floats, words
from kernels.text import FORMAT_NAMES
from kernels.topk.op import BLOCK, RECORD_WORDS

# The most of a piece: tiles of rows of a matrix, rows of a vector, tokens.
TILES, ROWS, TOKENS = 4, 64, 4
UNPACK = 4.0  # units of work (kernels/piece.py) for a weight of a matrix


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


def _last_to_first(push: dict[str, Any], params: Any, sizes: Any, read: Read, draw: Draw) -> Piece:
    row, last = 4 * push["n"], int(params[N_TOKENS]) - 1
    rows = sorted({0, last})
    params[N_TOKENS] = len(rows)
    return Piece(params, push, {"x": [(row * i, row) for i in rows]}, {"x": floats})


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


MAKERS: Mapping[str, Callable[..., Piece]] = {
    "matvec": _matvec,
    "matvec_norm": _matvec,
    "matvec_glu": _matvec,
    "matvec_norm_glu": _matvec,
    "matmul": _matmul,
    "embed": _embed,
    "rmsnorm": _rmsnorm,
    "swiglu": _swiglu,
    "add_bias": _add_bias,
    "last_to_first": _last_to_first,
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
}
