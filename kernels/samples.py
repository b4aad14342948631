# SPDX-License-Identifier: Apache-2.0
"""A small call of every variant, for trying a device before its answers are believed.

Sizes are odd enough for the last lanes, groups and rows to matter, and small enough for a device
to do all of them in a moment.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kernels import kv, video, weights
from kernels.advance import op as advance
from kernels.contract import FORMATS, PARAM_WORDS, ceil_div
from kernels.resample.op import table
from kernels.topk.op import RECORD_WORDS

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Sample:
    """One call: contents of the bindings before it, parameter words and the dispatch's tokens."""

    op: str
    variant: str
    push: Mapping[str, float | int]
    arrays: Mapping[str, Array]
    params: tuple[int, ...]
    tokens: int


@functools.cache
def samples() -> tuple[Sample, ...]:
    """A Sample for each variant of each operation."""
    from kernels import maps_samples

    rng = np.random.default_rng(20261129)
    own = (*_matrices(rng), *_vectors(rng), *_attention(rng), *_video(rng), *_fused(rng))
    return (*own, *maps_samples.samples(rng))


def _normal(rng: np.random.Generator, *shape: int) -> Array:
    return rng.standard_normal(shape).astype(np.float32)


def _nan(*shape: int) -> Array:
    return np.full(shape, np.nan, np.float32)


def _wide(name: str) -> list[str]:
    """A baseline variant and its wide ones (kernels.text.wide_variants)."""
    stem = "" if name == "base" else f"{name}_"
    return [name, f"{stem}wide", f"{stem}wide_sub"]


def _formats(op: str, fmt: str) -> list[str]:
    """The variants of an operation on matrices for a weight format."""
    from kernels import op as contract_of

    names = [v.name for v in contract_of(op).variants]
    return [name for name in names if name.partition("_")[0] == fmt]


def _matrices(rng: np.random.Generator) -> Iterator[Sample]:
    n, k, tokens = 37, 96, 5
    for fmt in ("q4", "q8", "f16"):
        w = weights.pack(fmt, _normal(rng, n, k))
        push: dict[str, float | int] = {"fmt": FORMATS[fmt], "n": n, "k": k}
        push |= {"accumulate": 0, "y0": 3}
        # What a CPU that rounds activations to int8 rounds to themselves.
        x = rng.integers(-127, 128, (tokens, k)).astype(np.float32) / 64
        x[:, ::32] = 127 / 64
        y = _normal(rng, tokens, n + 5)
        for variant in _formats("matvec", fmt):
            yield Sample("matvec", variant, push, {"w": w, "x": x[0], "y": y[0]}, (1, 0, 0), 1)
        # So that what is made of them rounds to itself, too: signs for a norm, open and shut gates.
        norm = np.where(np.arange(k) % 3, 1, -1).astype(np.float32)
        arrays: dict[str, Array] = {"w": w, "x": x, "norm": norm, "y": y[0]}
        for variant in _formats("matvec_norm", fmt):
            yield Sample("matvec_norm", variant, {**push, "eps": 1e-5}, arrays, (1, 0, 1), 1)
        both: dict[str, Array] = {"w": weights.pack(fmt, _normal(rng, 48 + n, k) / 4), "x": x}
        both |= {"norm": norm, "y": y[0]}
        for variant in _formats("matvec_norm_glu", fmt):
            given = {**push, "eps": 1e-5, "act": 0, "up": 48}
            yield Sample("matvec_norm_glu", variant, given, both, (1, 0, 1), 1)
        gate = np.where(np.arange(k) % 4 == 1, -64, 32)
        arrays = {"w": w, "gu": np.concatenate([gate, x[0] / 32]).astype(np.float32), "y": y[0]}
        for variant in _formats("matvec_glu", fmt):
            yield Sample("matvec_glu", variant, {**push, "act": 1}, arrays, (1, 0, 0), 1)
        more = {**push, "accumulate": 1, "ldy": n + 5}
        arrays = {"w": w, "x": x, "y": y}
        for variant in _formats("matmul", fmt):
            yield Sample("matmul", variant, more, arrays, (tokens, 0, 0), tokens)
        ids = np.array([0, 36, 5, 16], np.uint32)
        push = {"fmt": FORMATS[fmt], "k": k, "row0": 0, "rows": n, "scale": 1.5}
        arrays = {"ids": ids, "table": w, "out": _nan(4, k)}
        yield Sample("embed", fmt, push, arrays, (4, 0, 3), 4)
        yield from _experts(fmt, x, rng)


def _experts(fmt: str, x: Array, rng: np.random.Generator) -> Iterator[Sample]:
    """Three experts of five, two a token: what `route` chose of the others is left out."""
    n, tokens, used, k = 48, len(x) - 1, 2, x.shape[1]
    w = weights.pack(fmt, _normal(rng, 3 * n, k))
    route = np.zeros((tokens, used, 2), np.uint32)
    route[:, :, 0] = [[0, 3], [1, 2], [3, 1], [4, 2]]
    route[:, :, 1] = rng.random((tokens, used), np.float32).view(np.uint32)
    add = int(fmt != "f16")
    push = {"fmt": FORMATS[fmt], "n": n, "k": k, "first": 1, "count": 3, "used": used}
    push |= {"sum": add, "y0": 4, "ldy": n + 5}
    given = np.concatenate([x[:tokens], x[1:]]) if add else x[:tokens]
    y = _normal(rng, tokens if add else tokens * used, n + 5)
    arrays: dict[str, Array] = {"w": w, "x": given, "route": route, "y": y}
    yield Sample("experts", fmt, push, arrays, (tokens, 0, tokens - 1), tokens)


def _vectors(rng: np.random.Generator) -> Iterator[Sample]:
    k = 100
    arrays = {"x": _normal(rng, 3, k), "w": _normal(rng, k), "y": _nan(3, k)}
    for variant in _wide("base"):
        push = {"k": k, "eps": 1e-5, "last": 0, "add": 0}
        yield Sample("rmsnorm", variant, push, arrays, (3, 0, 2), 3)
    arrays = {"gu": _normal(rng, 3, 2 * k), "h": _nan(3, k)}
    push = {"f": k, "act": 0, "each": 1}
    yield Sample("swiglu", "base", push, arrays, (3, 0, 2), 3)
    yield from _small(rng)
    v = 1500
    part, out = np.zeros(2 * 130, np.uint32), np.zeros(130, np.uint32)
    arrays = {"logits": 8 * _normal(rng, v), "part": part, "out": out}
    for variant in (*_wide("base"), "sub"):
        first = Sample("topk", variant, {"v": v, "stage": 0}, arrays, (1, 0, 0), 1)
        yield first
        yield Sample("topk", variant, {"v": v, "stage": 1}, reference(first), (1, 0, 0), 1)
    arrays = {"logits": 8 * _normal(rng, v), "part": np.zeros(2 * 4, np.uint32), "out": out}
    for variant in ("base", "wide"):
        first = Sample("best", variant, {"v": v, "stage": 0}, arrays, (1, 0, 0), 1)
        yield first
        yield Sample("best", variant, {"v": v, "stage": 1}, reference(first), (1, 0, 0), 1)
    words = np.arange(16, dtype=np.uint32)
    words[advance.STEP] = 1
    arrays = {"record": rng.integers(0, 99, RECORD_WORDS, np.uint32), "next": words}
    arrays["ids"] = np.zeros(2, np.uint32)
    arrays["records"] = np.zeros(advance.MOST * advance.STRIDE, np.uint32)
    yield Sample("advance", "base", {}, arrays, (1, 7, 0, 1), 1)


def _small(rng: np.random.Generator) -> Iterator[Sample]:
    """What only some models have: biases, norms of heads, soft caps, a router, a
    shared expert's gate."""
    n, given = 100, (3, 0, 2)
    arrays = {"b": _normal(rng, n), "y": _normal(rng, 3, n)}
    yield Sample("add_bias", "base", {"n": n}, arrays, given, 3)
    yield Sample("last_to_first", "base", {"n": n}, {"x": _normal(rng, 3, n)}, given, 3)
    arrays = {"g": _normal(rng, 3), "y": _normal(rng, 3, n)}
    yield Sample("row_gate", "base", {"n": n}, arrays, given, 3)
    heads, kv_heads, dim = 3, 2, 36
    push: dict[str, float | int] = {"heads": heads, "kv_heads": kv_heads, "dim": dim, "eps": 1e-5}
    qkv = _normal(rng, 3, (heads + 2 * kv_heads) * dim)
    arrays = {"w": _normal(rng, 2 * dim), "qkv": qkv}
    yield Sample("head_norm", "base", {**push, "whole": 0}, arrays, given, 3)
    arrays = {"x": 40 * _normal(rng, n)}
    yield Sample("softcap", "base", {"n": n, "cap": 30.0}, arrays, (1, 0, 0), 1)
    arrays = {"logits": _normal(rng, 3, 40), "out": np.zeros((3, 6, 2), np.uint32)}
    for variant in ("base", "group"):
        yield Sample("route", variant, {"experts": 40, "used": 6, "norm": 0}, arrays, given, 3)


def _attention(rng: np.random.Generator) -> Iterator[Sample]:
    from kernels import op as contract

    heads, kv_heads, dim, ctx, tokens, pos0 = 4, 2, 64, 200, 3, 180
    shape: dict[str, float | int] = {"heads": heads, "kv_heads": kv_heads, "dim": dim, "ctx": ctx}
    qkv = _normal(rng, tokens, (heads + 2 * kv_heads) * dim)
    angle = _normal(rng, ctx, dim // 2)
    table = np.stack([np.cos(angle), np.sin(angle)], axis=-1)
    for fmt in kv.FORMATS:
        push = {**shape, "fmt": FORMATS[fmt]}
        caches = {}
        for name in ("kc", "vc"):
            caches[name] = np.zeros(kv.nbytes(fmt, kv_heads, ctx, dim), np.uint8)
            for pos in range(ctx):
                kv.store(fmt, caches[name], (kv_heads, ctx, dim), pos, _normal(rng, kv_heads, dim))
        if fmt == "f16":
            caches = {name: cache.view(np.float16) for name, cache in caches.items()}
        arrays = {"qkv": qkv, "table": table, **caches}
        given = (tokens, pos0, tokens - 1)
        for variant in (fmt, f"{fmt}_address"):
            rope = {**push, "rope_dims": dim, "neox": 0}
            yield Sample("rope_kv", variant, rope, arrays, given, tokens)
        push |= {"scale": dim**-0.5, "window": 170, "softcap": 2.0}
        for form in contract("attention_step").variants if fmt == "f16" else ():
            one = {**arrays, "qkv": qkv[0]}
            step = {**push, "rope_dims": dim, "neox": 1}
            yield Sample("attention_step", form.name, step, one, (1, pos0, 0), 1)
        for op, rows in (("attention_decode", 1), ("attention_prefill", tokens)):
            arrays = {"qkv": qkv, **caches, "out": _nan(rows, heads * dim)}
            for form in contract(op).variants:
                if form.name.partition("_")[0] == fmt:
                    given = (rows, pos0, rows - 1)
                    yield Sample(op, form.name, push, arrays, given, rows)


def _video(rng: np.random.Generator) -> Iterator[Sample]:
    for variant, cin, cout in (("oc8", 8, 16), ("oc4", 16, 4)):
        rows, xs = 3, 48
        x_tile, y_tile = (rows + 2) * cin * xs, rows * cout * xs
        push: dict[str, float | int] = {"cin": cin, "cout": cout, "rows": rows, "xs": xs}
        push |= {"x_tile": x_tile, "y_tile": y_tile}
        x, w = _normal(rng, 2 * x_tile + 64), _normal(rng, cin * 9 * cout + 2 * cout)
        arrays = {"x": x, "w": w, "y": np.zeros(2 * y_tile, np.float32)}
        yield Sample("conv3x3", variant, push, arrays, _params(N_TILES=2), 2)
    width, height, tw, th, halo, xs = 40, 11, 20, 4, 6, 48  # even, for padding is anybody's
    frame = {"bits": 8, "tw": tw, "th": th, "halo": halo, "xs": xs}
    tiles = _params(N_TILES=2, WIDTH=width, HEIGHT=height)
    y_tile = (th + 2 * halo) * xs
    push = {**frame, "stride": 16, "y_tile": y_tile, "scale": 1 / 255}
    src = rng.integers(0, 256, (height, 64), dtype=np.uint8)
    arrays = {"src": src, "y": _nan(2, y_tile)}
    yield Sample("luma_in", "base", push, arrays, tiles, 2)
    luma = rng.random(2 * y_tile + 64, np.float32)
    filters = rng.random(400, np.float32) / 25
    frame |= {"plane": video.WIDTH, "x_row": xs, "x_tile": y_tile, "step": 1, "component": 0}
    for scale in (2, 3, 4):
        f_tile, stride = th * ceil_div(scale * scale, 4) * 4 * xs, ceil_div(scale * width, 4)
        push = {**frame, "scale": scale, "stride": stride, "f_tile": f_tile}
        dst = np.zeros((scale * th, 4 * stride), np.uint8)
        f = _normal(rng, 2 * f_tile + 64) / 16
        arrays = {"f": f, "x": luma, "base": filters, "dst": dst}
        yield Sample("shuffle_out", f"x{scale}", push, arrays, tiles, 2)
    push = {"bits": 8, "step": 1, "scale": 2, "stride": 16, "out_stride": 20}
    push |= {"rows": 4, "words": 20}
    dst = np.zeros((2 * th, 2 * width), np.uint8)
    arrays = {"src": src, "filters": filters, "dst": dst}
    chroma = {"C_WIDTH": width // 2, "C_HEIGHT": height // 2 + 1}
    given = _params(C_WIDTH=width, C_HEIGHT=height, C_ROWS=4)
    yield Sample("filter_out", "base", push, arrays, given, 1)
    push = {"bits": 8, "step": 1, "component": 0, "stride": 16, "luma_stride": 16, "tw": 12}
    push |= {"th": 2, "halo": 2, "xs": 16, "y_tile": 6 * 5 * 16, "scale": 1 / 255}
    arrays = {"src": src, "luma": src, "y": _nan(2, 6 * 5 * 16)}
    given = _params(N_TILES=2, WIDTH=width, HEIGHT=height, **chroma)
    yield Sample("chroma_in", "base", push, arrays, given, 2)
    down = table(np.array([0, 2, 3, 6]), rng.random((4, 4)).astype(np.float32) / 4)
    across = table(np.arange(48) * 36 // 48, rng.random((48, 4)).astype(np.float32) / 4)
    push = {"bits": 8, "step": 1, "plane": video.WIDTH, "stride": 16, "out_stride": 12}
    push |= {"width": 48, "taps_down": 4, "taps_across": 4, "rows": 4}
    dst = np.zeros((4, 48), np.uint8)
    arrays = {"src": src, "down": down, "across": across, "dst": dst}
    # The word after the first four of the plane is the number of rows.
    given = _params(WIDTH=width, HEIGHT=height, COL0=4)
    yield Sample("resample", "base", push, arrays, given, 1)
    rows, offset = 3, 2
    tile = (rows + 2 * offset) * 8 * 16
    push = {"channels": 8, "rows": rows, "offset": offset, "xs": 16, "tile": tile}
    arrays = {"kept": _normal(rng, 2 * tile), "slope": _normal(rng, 8), "y": _normal(rng, 2, tile)}
    yield Sample("skip_add", "base", push, arrays, _params(N_TILES=2), 2)


def _fused(rng: np.random.Generator) -> Iterator[Sample]:
    """Whole networks of four layers."""
    from kernels.nsr import op as nsr

    width, height, scale = 90, 13, 2
    src = rng.integers(0, 256, (height, 96), dtype=np.uint8)
    given = _params(N_TILES=2, WIDTH=width, HEIGHT=height)
    for variant in nsr.OP.variants:
        channels = int(variant.defines["CHANNELS"])
        sizes = [1, channels, channels, channels, scale * scale]
        layers: list[nsr.Layer] = []
        for cin, cout in itertools.pairwise(sizes):
            taps = _normal(rng, cin, 3, 3, cout) * np.float32((9 * cin) ** -0.5)
            layers.append((taps, _normal(rng, cout) / 16, rng.random(cout, np.float32)))
        base = rng.random((scale * scale, 5, 5), np.float32) / 25
        push: dict[str, float | int] = {"bits": 8, "stride": 24, "out_stride": 48, "tw": 60}
        push |= {"th": height, "channels": channels, "layers": len(layers), "scale": scale}
        dst = np.zeros((scale * height, 192), np.uint8)
        arrays: dict[str, Array] = {"src": src, "w": nsr.pack(layers, base), "dst": dst}
        yield Sample("nsr", variant.name, push, arrays, given, 2)


def _params(**words: int) -> tuple[int, ...]:
    """Parameter words by their names in kernels.video."""
    out = [0] * PARAM_WORDS
    for name, value in words.items():
        out[getattr(video, name)] = value
    return tuple(out)


def reference(sample: Sample) -> dict[str, Array]:
    """The bindings after the numpy reference."""
    from kernels import op

    contract = op(sample.op)
    after = {b.name: np.array(sample.arrays[b.name], order="C") for b in contract.bindings}
    words = np.zeros(PARAM_WORDS, np.uint32)
    words[: len(sample.params)] = sample.params
    flat = {name: a.reshape(-1).view(np.uint8) for name, a in after.items()}
    contract.reference(words, flat, contract.unpack(contract.pack(**sample.push)))
    return after


def differs(got: Sequence[Array] | Array, want: Array, rounds: bool = False) -> float:
    """The share of elements that are wrong: floats beyond rounding, samples by more than a step.
    `rounds`: the variant rounds what it multiplies to halves or int8.

    Words (u32) may hold ids or floats: equal, or close as floats that are no denormals.
    """
    a, b = np.asarray(got).reshape(-1), want.reshape(-1)
    if a.dtype == np.uint8:
        good = np.abs(a.astype(np.int16) - b) <= 1
    elif a.dtype == np.uint32:
        x, y = a.view(np.float32), b.view(np.float32)
        with np.errstate(invalid="ignore", over="ignore"):
            close = np.isclose(x, y, rtol=1e-3, atol=0) & (np.abs(y) > 1e-30)
        good = (a == b) | close
    else:
        x, y = a.astype(np.float64), b.astype(np.float64)
        good = np.isclose(x, y, rtol=5e-3, atol=5e-2 if rounds else 5e-3, equal_nan=True)
    return float(1 - good.mean())
