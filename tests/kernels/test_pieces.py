# SPDX-License-Identifier: Apache-2.0
"""Pieces of calls (kernels/pieces.py): of any size they are a part of the call, and show what is
wrong in it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pytest

import kernels
from kernels import kv, maps, maps_samples, pieces, samples, video, weights
from kernels.contract import FORMATS, PARAM_WORDS
from kernels.conv2d import op as conv2d
from kernels.maps import THIN, WIDE, Geometry
from kernels.nsr import op as nsr
from kernels.samples import Sample

Array = np.ndarray[Any, Any]
RNG = np.random.default_rng(20261130)


def normal(*shape: int) -> Array:
    return RNG.standard_normal(shape, np.float32)


def words(**named: int) -> tuple[int, ...]:
    out = [0] * PARAM_WORDS
    for name, value in named.items():
        out[getattr(video, name)] = value
    return tuple(out)


def larger() -> Iterator[Sample]:
    """Calls of several times what a piece takes."""
    tokens, n, k = 11, 150, 64
    for fmt in ("q4", "q8"):
        w = weights.pack(fmt, normal(n, k))
        push: dict[str, Any] = {"fmt": FORMATS[fmt], "n": n, "k": k, "accumulate": 1, "y0": 8}
        given = {"w": w, "x": normal(tokens, k), "y": normal(tokens, n + 16)}
        yield Sample("matmul", fmt, {**push, "ldy": n + 16}, given, (tokens, 5, 0), tokens)
        one = {"w": w, "x": normal(k), "y": normal(n + 16)}
        yield Sample("matvec", fmt, push, one, (1, 5, 0), 1)
    both = weights.pack("q8", normal(2 * 112, k))
    push = {"fmt": FORMATS["q8"], "n": 112, "k": k, "accumulate": 0, "y0": 0, "eps": 1e-5}
    one = {"w": both, "x": normal(3, k), "norm": normal(k), "y": normal(112)}
    yield Sample("matvec_norm_glu", "q8", {**push, "act": 0, "up": 112}, one, (3, 5, 2), 1)
    v = 9000
    for op, each in (("topk", 130), ("best", 4)):
        logits = np.round(4 * normal(v))  # many are equal
        arrays = {"logits": logits, "part": np.zeros(9 * each, np.uint32)}
        arrays["out"] = np.zeros(130, np.uint32)
        yield Sample(op, "base", {"v": v, "stage": 0}, arrays, (1, 0, 0), 1)
    heads, kv_heads, dim, ctx, pos = 6, 2, 32, 80, 60
    push = {"heads": heads, "kv_heads": kv_heads, "dim": dim, "ctx": ctx}
    table = normal(ctx, dim)
    for fmt in kv.FORMATS:
        caches = {}
        for name in ("kc", "vc"):
            caches[name] = np.zeros(kv.nbytes(fmt, kv_heads, ctx, dim), np.uint8)
            for p in range(ctx):
                kv.store(fmt, caches[name], (kv_heads, ctx, dim), p, normal(kv_heads, dim))
        own = {**push, "fmt": FORMATS[fmt]}
        qkv = normal(9, (heads + 2 * kv_heads) * dim)
        arrays = {"qkv": qkv, "table": table, **caches}
        rope = {"rope_dims": dim, "neox": 1}
        yield Sample("rope_kv", fmt, {**own, **rope}, arrays, (9, pos, 8), 9)
        for window in (0, 20):
            soft = {"scale": dim**-0.5, "window": window, "softcap": 0.0}
            if fmt == "f16":
                one = {**arrays, "qkv": qkv[0].copy()}
                step = {**own, **soft, **rope}
                yield Sample("attention_step", fmt, step, one, (1, pos, 0), 1)
            out = {"qkv": qkv, **caches, "out": normal(9, heads * dim)}
            yield Sample("attention_prefill", fmt, {**own, **soft}, out, (9, pos, 8), 9)
    experts, used, k = 12, 4, 32
    route = np.zeros((5, used, 2), np.uint32)
    for t in range(5):
        route[t, :, 0] = RNG.permutation(16)[:used]
    route[:, :, 1] = RNG.random((5, used), np.float32).view(np.uint32)
    w = weights.pack("q8", normal(experts * 48, k))
    for add in (0, 1):
        rows = 5 if add else 5 * used
        arrays = {"w": w, "x": normal(5 * used, k), "route": route, "y": normal(rows, 64)}
        push = {"fmt": FORMATS["q8"], "n": 48, "k": k, "first": 2, "count": experts}
        push |= {"used": used, "sum": add, "y0": 16, "ldy": 64}
        yield Sample("experts", "q8", push, arrays, (5, 0, 4), 5)
    yield from _frames()
    yield from _maps()


def _frames() -> Iterator[Sample]:
    width, height, channels, layers = 200, 60, 8, 4
    src = RNG.integers(0, 256, (height, width), dtype=np.uint8)
    convs = [
        (normal(a, 3, 3, b) / np.float32(3 * a**0.5), normal(b) / 16, RNG.random(b, np.float32))
        for a, b in ((1, channels), (channels, channels), (channels, channels), (channels, 4))
    ]
    push: dict[str, Any] = {"bits": 8, "stride": width // 4, "out_stride": width // 2, "tw": 100}
    push |= {"th": height, "channels": channels, "layers": layers, "scale": 2}
    arrays = {"src": src, "w": nsr.pack(convs, RNG.random((4, 5, 5), np.float32) / 25)}
    arrays["dst"] = np.zeros((2 * height, 2 * width), np.uint8)
    given = words(N_TILES=2, WIDTH=width, HEIGHT=height)
    yield Sample("nsr", "c8", push, arrays, given, 2)
    # A band in the middle of a frame: rows 20..43 of the plane lie in the buffer.
    tw, th, halo, xs = 60, 16, 4, 80
    frame = {"bits": 8, "tw": tw, "th": th, "halo": halo, "xs": xs}
    luma = RNG.integers(0, 256, (24, width), dtype=np.uint8)
    for band, source in ((24, 20), (0, 0), (52, 48)):
        there = min(24, height - source)
        given = words(N_TILES=2, COL0=1, WIDTH=width, HEIGHT=height, BAND_Y=band, SRC_Y=source)
        y = np.full((2, 24 * xs), np.nan, np.float32)
        push = {**frame, "stride": width // 4, "y_tile": 24 * xs, "scale": 1 / 255}
        yield Sample("luma_in", "base", push, {"src": luma[:there], "y": y}, given, 2)
        half = {"C_WIDTH": 100, "C_HEIGHT": 30, "C_BAND_Y": band // 2, "C_SRC_Y": source // 2}
        near = RNG.integers(0, 256, (12, width), dtype=np.uint8)
        push = {"bits": 8, "step": 2, "component": 1, "stride": width // 4, "tw": 40, "th": 8}
        push |= {"luma_stride": width // 4, "halo": 2, "xs": 48, "y_tile": 5 * 12 * 48}
        arrays = {"src": near, "luma": luma, "y": np.zeros((2, 5 * 12 * 48), np.float32)}
        given = words(N_TILES=2, WIDTH=width, HEIGHT=height, SRC_Y=source, **half)
        yield Sample("chroma_in", "base", {**push, "scale": 1 / 255}, arrays, given, 2)
        rows = min(8, 30 - band // 2)
        given = words(C_ROWS=rows, **half)
        push = {"bits": 8, "step": 2, "scale": 2, "stride": width // 4, "out_stride": width // 2}
        arrays = {"src": near, "filters": RNG.random(100, np.float32) / 25}
        arrays["dst"] = np.zeros((16, 2 * width), np.uint8)
        yield Sample(
            "filter_out", "base", {**push, "rows": 8, "words": width // 2}, arrays, given, 1
        )
    f, x = normal(2 * th * 4 * xs) / 16, RNG.random(2 * 24 * xs + 64, np.float32)
    push = {**frame, "scale": 2, "step": 1, "component": 0, "plane": video.WIDTH, "x_row": xs}
    push |= {"stride": width // 2, "f_tile": th * 4 * xs, "x_tile": 24 * xs}
    arrays = {"f": f, "x": x, "base": RNG.random(100, np.float32) / 25}
    arrays["dst"] = np.zeros((2 * th, 2 * width), np.uint8)
    given = words(N_TILES=2, COL0=1, WIDTH=width, HEIGHT=height, BAND_Y=48)
    yield Sample("shuffle_out", "x2", push, arrays, given, 2)


def _maps() -> Iterator[Sample]:
    g, twice = Geometry(90, 30, 1), Geometry(180, 60, 1)
    for fmt, cout in (("q8", 40), ("f16", 20), ("q8", 3)):
        lanes = WIDE if cout > THIN else THIN
        x = maps_samples.random_maps(RNG, g, 2, WIDE)
        y = maps_samples.random_maps(RNG, g, -(-cout // lanes), lanes)
        packed = conv2d.pack(fmt, normal(cout, 20, 3, 3) / 12, normal(cout), normal(cout))
        push: dict[str, Any] = {"fmt": FORMATS[fmt], "cin": 20, "cout": cout, "k": 3, "residual": 1}
        push |= {"act": maps.SLOPE, "xl": WIDE, "yl": lanes, **g.push()}
        arrays = {"x": x, "w": packed, "r": y, "y": np.zeros_like(y)}
        yield Sample("conv2d", fmt, push, arrays, (), 1)
    x, r = (maps_samples.random_maps(RNG, h, 3, WIDE) for h in (g, twice))
    push = {"blocks": 3, "lanes": WIDE, "mode": 1, "act": maps.SILU, **g.push()}
    arrays = {"a": x, "b": x, "w": normal(4 * 3 * WIDE), "y": np.zeros_like(x)}
    yield Sample("pointwise", "base", push, arrays, (), 1)
    push = {"blocks": 3, "lanes": WIDE, "num": 2, "den": 1, "taps": 2, "residual": 1}
    filters = np.array([0.25, 0.75, 0.75, 0.25, -1, 0], np.float32)
    arrays = {"x": x, "filters": filters, "r": r, "y": np.zeros_like(r)}
    yield Sample("resize", "base", {**push, **g.push("x_"), **twice.push()}, arrays, (), 1)
    thin = maps_samples.random_maps(RNG, twice, 1, THIN)
    push = {"lanes": THIN, "xl": WIDE, "channels": 3, "s": 2, "cs": 4, "as": 2, "bs": 1}
    up = {**push, "blocks": 1, "down": 0, **g.push("x_"), **twice.push()}
    yield Sample("pixel_shuffle", "base", up, {"x": x, "y": thin}, (), 1)
    down = {**push, "lanes": WIDE, "xl": THIN, "blocks": 1, "down": 1}
    down |= {**twice.push("x_"), **g.push()}
    yield Sample("pixel_shuffle", "base", down, {"x": thin, "y": np.zeros_like(x)}, (), 1)
    yield from _planes(g, twice)


def _planes(g: Geometry, twice: Geometry) -> Iterator[Sample]:
    width, height = 120, 50
    for half, add in ((0, 0), (1, 1)):
        planes = (width // 2, height // 2) if half else (width, height)
        src = RNG.integers(0, 256, (height, 128), np.uint8)
        given = maps_samples.params(X0=6, Y0=24)  # beyond the frame's lower border
        push: dict[str, Any] = {"bits": 8, "stride": 32, "step": 1, "phase": 0, "half": half}
        push |= {"centred": half, "plane_w": planes[0], "plane_h": planes[1], "add": add}
        push |= {"lanes": THIN, **g.push()}
        push |= {f"{n}{k}": float(v) for n in "co" for k, v in enumerate(normal(3) / 64)}
        arrays = {"src": src, "y": maps_samples.random_maps(RNG, g, 1, THIN)}
        yield Sample("maps_in", "base", push, arrays, given, 1)
        given = maps_samples.params(X0=6, Y0=4, CORE_X0=8, CORE_Y0=8, CORE_X1=90, CORE_Y1=31)
        push = {"bits": 8, "stride": 60, "step": 1, "half": half, "centred": 0}
        push |= {"frame_w": 2 * width, "frame_h": 2 * height, "s": 2, "lanes": THIN}
        push |= {**twice.push(), "d0": 0.0, "d1": 0.0, "d2": 0.0, "o": 4.0}
        push |= {"c0": 50.0, "c1": 80.0, "c2": 30.0}
        arrays = {"x": RNG.random(twice.nbytes(1, THIN) // 4, np.float32)}
        arrays["dst"] = np.zeros((46, 240), np.uint8)
        yield Sample("maps_out", "base", push, arrays, given, 1)
        filters = np.concatenate([RNG.random(16, np.float32) / 2, [-1, -1, -2, -1]])
        push = {"bits": 8, "stride": 32, "out_stride": 60, "step": 1, "half": half, "s": 2}
        push |= {"plane_w": planes[0], "plane_h": planes[1], "rows": 64}
        given = maps_samples.params(CORE_Y0=8, CORE_Y1=40)
        arrays = {"src": src, "filters": filters.astype(np.float32)}
        arrays["dst"] = np.zeros((64, 240), np.uint8)
        yield Sample("plane_scale", "base", push, arrays, given, 1)


def every() -> list[Any]:
    """One of each operation and kind of numbers, and the larger ones."""
    found: dict[tuple[str, str, str], Sample] = {}
    rng = np.random.default_rng(5)
    for sample in (*samples.samples(), *maps_samples.samples(rng)):
        stem = sample.variant.partition("_")[0]
        found.setdefault((sample.op, stem, str(sample.push.get("stage", ""))), sample)
    own = list(larger())
    ids = ["-".join(key) for key in found] + [f"{s.op}-larger{i}" for i, s in enumerate(own)]
    return [pytest.param(s, id=i) for s, i in zip((*found.values(), *own), ids, strict=True)]


def flat(arrays: Mapping[str, Array]) -> dict[str, Array]:
    return {
        name: np.ascontiguousarray(a).reshape(-1).view(np.uint8).copy()
        for name, a in arrays.items()
    }


def spoil(sample: Sample, after: dict[str, Array]) -> dict[str, Array]:
    """Everything that the call wrote is something else."""
    writes = {b.name for b in kernels.op(sample.op).bindings if "w" in b.access}
    return {name: a ^ 0x2A if name in writes else a for name, a in after.items()}


def look(
    sample: Sample, after: dict[str, Array], most: float, seed: int
) -> tuple[float, pieces.Piece]:
    """What a piece of the call finds wrong."""
    contract = kernels.op(sample.op)
    before = flat(sample.arrays)
    now = before

    def read(name: str, at: int, nbytes: int) -> Array:
        found = now[name][max(0, at) : at + nbytes]
        return np.pad(found, (0, nbytes - len(found)))

    given = np.zeros(PARAM_WORDS, np.uint32)
    given[: len(sample.params)] = sample.params
    push = contract.unpack(contract.pack(**sample.push))
    sizes = {name: a.nbytes for name, a in before.items()}
    draw = pieces.Draw(np.random.default_rng(seed), most)
    piece = pieces.piece(contract, push, given, sizes, read, draw)
    assert piece is not None
    inputs = piece.copy(read, frozenset(sizes))
    now = after
    results = piece.copy(read, frozenset(b.name for b in contract.bindings if "w" in b.access))
    contract.reference(piece.params, inputs, piece.push)
    found = [
        pieces.wrong(show(results[name]), show(inputs[name]), True)
        for name, show in piece.shows.items()
    ]
    return max(found), piece


@pytest.mark.parametrize("sample", every())
def test_a_piece_of_any_size_is_a_part_of_the_call(sample: Sample) -> None:
    with np.errstate(all="ignore"):
        after = flat(samples.reference(sample))
        wrong = spoil(sample, after)
        for most in (math.inf, 2e5, 1.0):
            for seed in range(3):
                assert look(sample, after, most, seed)[0] == 0, (most, seed)
                assert look(sample, wrong, most, seed)[0] > 0.2, (most, seed)


@pytest.mark.parametrize("sample", list(larger()), ids=lambda s: s.op)
def test_less_time_makes_a_smaller_piece(sample: Sample) -> None:
    with np.errstate(all="ignore"):
        after = flat(samples.reference(sample))
        works = [look(sample, after, most, 1)[1].work for most in (math.inf, 1.0)]
    alone = ("attention_step", "rope_kv", "experts")  # a head, a token: as small as it can be
    assert works[1] < works[0] or sample.op in alone
