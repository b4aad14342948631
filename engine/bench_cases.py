# SPDX-License-Identifier: Apache-2.0
"""Calls to be timed: each operation and variant in the shapes that real work gives it.

Text: SmolLM2-135M, a decode step at position 511 and a prefill of 32 tokens behind 480; what that
model lacks has its sizes, with 16 experts of which 2 are used. Video: a tile of
128x128. Bytes and operations are counted from the shapes: each binding's part is read or written
once, an addition or multiplication is one operation. They are estimates.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np

import kernels
from engine.backends.base import Array, Backend
from engine.backends.gate import variant_misfit
from kernels import kv, video, weights
from kernels.advance.op import MOST, STRIDE
from kernels.contract import FORMATS, PARAM_WORDS, Variant, ceil_div
from kernels.nsr import op as nsr
from kernels.resample.op import table
from kernels.topk.op import RECORD_WORDS

HIDDEN, FFN, HEADS, KV_HEADS, DIM, VOCAB = 576, 1536, 9, 3, 64, 49152
CONTEXT, POSITION, TOKENS = 4096, 511, 32
DEEP = 4095  # a position where attention is most of a decode step
QKV = (HEADS + 2 * KV_HEADS) * DIM
MATRICES = {  # name: (n, k)
    "qkv": (QKV, HIDDEN),
    "out": (HIDDEN, HEADS * DIM),
    "gate_up": (2 * FFN, HIDDEN),
    "down": (HIDDEN, FFN),
    "head": (VOCAB, HIDDEN),
}
EXPERTS, USED = 16, 2
QUICK = ("gate_up", "head")
TILE, HALO, CHANNELS = 128, 7, 16  # of nsr-balanced
_FLOATS = np.random.default_rng(20261130).standard_normal(1 << 16).astype(np.float32)


@dataclass(frozen=True)
class Case:
    """One call. `sizes`: bytes of each binding; `data`: what is repeated to fill it (else zeros);
    `cold`: the binding that is another one each time in real work.
    """

    op: str
    variant: Variant
    name: str  # of the variant, as it is shown
    shape: str
    push: Mapping[str, float | int]
    params: tuple[int, ...]
    tokens: int
    sizes: Mapping[str, int]
    nbytes: int
    operations: int
    data: Mapping[str, Array] = field(default_factory=dict)
    cold: str = ""


def cases(backend: Backend, op: str = "", quick: bool = False) -> Iterator[Case]:
    """The calls for a device, in the order of the work; `op`: of one operation alone."""
    from engine import bench_cases_maps

    makers = {
        "embed": _embed,
        "rmsnorm": _rmsnorm,
        "matvec": _matvec,
        "matvec_norm": _matvec,
        "matvec_glu": _matvec,
        "matvec_norm_glu": _matvec,
        "matmul": _matmul,
        "rope_kv": _rope_kv,
        "attention_decode": _attention,
        "attention_step": _attention,
        "attention_prefill": _attention,
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
        "luma_in": _luma_in,
        "conv3x3": _conv3x3,
        "shuffle_out": _shuffle_out,
        "nsr": _nsr,
        "filter_out": _filter_out,
        "resample": _resample,
        "chroma_in": _chroma_in,
        "skip_add": _skip_add,
        **bench_cases_maps.MAKERS,
    }
    for name, make in makers.items():
        if op in ("", name):
            for variant, shown in _variants(backend, name):
                yield from make(name, variant, shown, quick)


def operations() -> tuple[str, ...]:
    """Names that `cases` knows: all operations that the build has."""
    return tuple(sorted(kernels.manifest()))


def _variants(backend: Backend, op: str) -> Iterator[tuple[Variant, str]]:
    """Variants that the device can have. C code is one for all but the formats."""
    contract, info = kernels.op(op), backend.info
    seen: set[str] = set()
    for v in contract.variants:
        if info.kind == "cpu":
            fmt = _format(v)
            shown = fmt or "c"
            if shown not in seen:
                seen.add(shown)
                yield v, shown
            continue
        misfit = getattr(backend, "misfit", None)
        if variant_misfit(contract, v, info.limits, info.features):
            continue
        if misfit is None or not misfit(op, v.name):
            yield v, v.name


def _format(v: Variant) -> str:
    """The weight format that a variant is named after; "" where it reads no packed weights."""
    stem = v.name.partition("_")[0]
    return stem if stem in FORMATS else ""


def _packed(fmt: str, k: int) -> Array:
    """One tile of 16 rows, in the packed form; a larger matrix repeats it."""
    return weights.pack(fmt, _FLOATS[: 16 * k].reshape(16, k) / 16)


def _words(**words: int) -> tuple[int, ...]:
    out = [0] * PARAM_WORDS
    for name, value in words.items():
        out[getattr(video, name)] = value
    return tuple(out)


def _text(tokens: int, last: int = POSITION) -> tuple[int, ...]:
    return (tokens, last + 1 - tokens, tokens - 1)


def _embed(op: str, v: Variant, shown: str, quick: bool) -> Iterator[Case]:
    fmt, k = _format(v), HIDDEN
    table = weights.nbytes(fmt, VOCAB, k)
    push = {"fmt": FORMATS[fmt], "k": k, "row0": 0, "rows": VOCAB, "scale": 1.0}
    for t in (1, TOKENS):
        sizes = {"ids": 4 * t, "table": table, "out": 4 * t * k}
        data: dict[str, Array] = {
            "ids": np.arange(t, dtype=np.uint32) * 1500,
            "table": _packed(fmt, k),
        }
        moved = t * (4 + table // VOCAB + 4 * k)
        yield Case(op, v, shown, f"{t}x{k}", push, _text(t), t, sizes, moved, 2 * t * k, data)


def _rmsnorm(op: str, v: Variant, shown: str, quick: bool) -> Iterator[Case]:
    k = HIDDEN
    push = {"k": k, "eps": 1e-5, "last": 0, "add": 0}
    for t in (1, TOKENS):
        sizes = {"x": 4 * t * k, "w": 4 * k, "y": 4 * t * k}
        moved, data = 8 * t * k + 4 * k, {"x": _FLOATS, "w": _FLOATS}
        yield Case(op, v, shown, f"{t}x{k}", push, _text(t), t, sizes, moved, 4 * t * k, data)


# Push constants that products have which make what they multiply.
_OWN: Mapping[str, Mapping[str, float]] = {
    "matvec_norm": {"eps": 1e-5},
    "matvec_glu": {"act": 0},
    "matvec_norm_glu": {"eps": 1e-5, "act": 0},
}


def _matvec(op: str, v: Variant, shown: str, quick: bool) -> Iterator[Case]:
    fmt = _format(v)
    own: Mapping[str, float] = _OWN.get(op, {})
    for name in QUICK if quick else MATRICES:
        n, k = MATRICES[name]
        w = weights.nbytes(fmt, n, k)
        push = {"fmt": FORMATS[fmt], "n": n, "k": k, "accumulate": 0, "y0": 0, **own}
        vectors = {b.name: 4 * k for b in kernels.op(op).bindings if b.name not in ("w", "y")}
        vectors = {name: 2 * n if name == "gu" else n for name, n in vectors.items()}
        sizes = {"w": w, **vectors, "y": 4 * n}
        if op == "matvec_norm_glu":  # a half is the gate, the other the unit
            push |= {"n": n // 2, "up": n // 2}
            sizes["y"] = 2 * n
        data = {"w": _packed(fmt, k), **dict.fromkeys(vectors, _FLOATS)}
        shape, moved = f"{name} {n}x{k}", sum(sizes.values())
        # Rows of one token, the first.
        given = (1, POSITION, 0)
        yield Case(op, v, shown, shape, push, given, 1, sizes, moved, 2 * n * k, data, "w")


def _matmul(op: str, v: Variant, shown: str, quick: bool) -> Iterator[Case]:
    fmt, t = _format(v), TOKENS
    for name in [m for m in (QUICK if quick else MATRICES) if m != "head"]:
        n, k = MATRICES[name]
        w = weights.nbytes(fmt, n, k)
        push = {"fmt": FORMATS[fmt], "n": n, "k": k, "accumulate": 0, "y0": 0, "ldy": n}
        sizes = {"w": w, "x": 4 * t * k, "y": 4 * t * n}
        data = {"w": _packed(fmt, k), "x": _FLOATS}
        shape, moved = f"{name} {n}x{k} T{t}", w + 4 * t * (n + k)
        yield Case(op, v, shown, shape, push, _text(t), t, sizes, moved, 2 * t * n * k, data, "w")


def _kv(fmt: str) -> dict[str, float | int]:
    return {
        "fmt": FORMATS[fmt], "heads": HEADS, "kv_heads": KV_HEADS, "dim": DIM, "ctx": CONTEXT
    }  # fmt: skip


def _caches(fmt: str) -> dict[str, int]:
    return dict.fromkeys(("kc", "vc"), kv.nbytes(fmt, KV_HEADS, CONTEXT, DIM))


def _rope_kv(op: str, v: Variant, shown: str, quick: bool) -> Iterator[Case]:
    fmt = _format(v)
    push = {**_kv(fmt), "rope_dims": DIM, "neox": 0}
    for t in (1, TOKENS):
        sizes = {"qkv": 4 * t * QKV, "table": 4 * CONTEXT * DIM, **_caches(fmt)}
        # Reads all, writes the queries back, keys and values into the caches.
        stored = 2 * KV_HEADS * kv.row_nbytes(fmt, DIM)
        moved = t * (4 * QKV + 4 * HEADS * DIM + stored + 4 * DIM)
        count = 3 * t * (HEADS + KV_HEADS) * DIM
        data = {"table": np.ones(1, np.float32)}
        yield Case(op, v, shown, f"T{t}", push, _text(t), t, sizes, moved, count, data)


def _attention(op: str, v: Variant, shown: str, quick: bool) -> Iterator[Case]:
    fmt, t = _format(v), TOKENS if op == "attention_prefill" else 1
    sizes = {"qkv": 4 * t * QKV, **_caches(fmt)}
    half = (_FLOATS / 4).astype(np.float16)
    cache = half if fmt == "f16" else np.full(1, 0x20, np.uint8)  # as a scale 0.008
    data: dict[str, Array] = {"qkv": _FLOATS, "kc": cache, "vc": cache}
    push = {**_kv(fmt), "scale": DIM**-0.5, "window": 0, "softcap": 0.0}
    if op == "attention_step":
        sizes["table"] = 4 * CONTEXT * DIM
        push |= {"rope_dims": DIM, "neox": 0}
    else:
        sizes["out"] = 4 * t * HEADS * DIM
    for last in (POSITION,) if quick or t > 1 else (POSITION, DEEP):
        keys = last + 1
        seen = t * keys - t * (t - 1) // 2  # pairs of a query and a key before it
        moved = 2 * keys * KV_HEADS * kv.row_nbytes(fmt, DIM) + 8 * t * HEADS * DIM
        shape, count = f"T{t} keys {keys}", HEADS * seen * (4 * DIM + 5)
        given = _text(t, last)
        yield Case(op, v, shown, shape, push, given, t, sizes, moved, count, data, "")


def _swiglu(op: str, v: Variant, shown: str, quick: bool) -> Iterator[Case]:
    for t in (1, TOKENS):
        sizes, data = {"gu": 8 * t * FFN, "h": 4 * t * FFN}, {"gu": _FLOATS}
        moved, shape = 12 * t * FFN, f"{t}x{FFN}"
        push = {"f": FFN, "act": 0, "each": 1}
        yield Case(op, v, shown, shape, push, _text(t), t, sizes, moved, 5 * t * FFN, data)


def _add_bias(op: str, v: Variant, shown: str, quick: bool) -> Iterator[Case]:
    for t in (1, TOKENS):
        sizes, moved = {"b": 4 * QKV, "y": 4 * t * QKV}, 4 * (t + 1) * QKV
        yield Case(op, v, shown, f"{t}x{QKV}", {"n": QKV}, _text(t), t, sizes, moved, t * QKV)


def _row_gate(op: str, v: Variant, shown: str, quick: bool) -> Iterator[Case]:
    for t in (1, TOKENS):
        sizes, moved = {"g": 4 * t, "y": 4 * t * FFN}, 4 * t * (2 * FFN + 1)
        yield Case(op, v, shown, f"{t}x{FFN}", {"n": FFN}, _text(t), t, sizes, moved, t * FFN)


def _head_norm(op: str, v: Variant, shown: str, quick: bool) -> Iterator[Case]:
    push: dict[str, float | int] = {"heads": HEADS, "kv_heads": KV_HEADS, "dim": DIM}
    push |= {"eps": 1e-5, "whole": 0}
    for t in (1, TOKENS):
        sizes, data = {"w": 8 * DIM, "qkv": 4 * t * QKV}, {"w": _FLOATS, "qkv": _FLOATS}
        count = t * (HEADS + KV_HEADS) * DIM
        yield Case(op, v, shown, f"T{t}", push, _text(t), t, sizes, 4 * count, 4 * count, data)


def _softcap(op: str, v: Variant, shown: str, quick: bool) -> Iterator[Case]:
    push: dict[str, float | int] = {"n": VOCAB, "cap": 30.0}
    sizes, count = {"x": 4 * VOCAB}, 5 * VOCAB
    yield Case(op, v, shown, f"{VOCAB}", push, _text(1), 1, sizes, 4 * VOCAB, count)


def _route(op: str, v: Variant, shown: str, quick: bool) -> Iterator[Case]:
    push = {"experts": EXPERTS, "used": USED, "norm": 0}
    for t in (1, TOKENS):
        sizes = {"logits": 4 * t * EXPERTS, "out": 8 * t * USED}
        moved, shape = sum(sizes.values()), f"T{t} {USED} of {EXPERTS}"
        count, data = 3 * t * EXPERTS * USED, {"logits": _FLOATS}
        yield Case(op, v, shown, shape, push, _text(t), t, sizes, moved, count, data)


def _experts(op: str, v: Variant, shown: str, quick: bool) -> Iterator[Case]:
    fmt, n, k = _format(v), FFN // 4, HIDDEN
    one = weights.nbytes(fmt, n, k)
    push: dict[str, float | int] = {"fmt": FORMATS[fmt], "n": n, "k": k, "first": 0}
    push |= {"count": EXPERTS, "used": USED, "sum": 0, "y0": 0, "ldy": n}
    for t in (1, TOKENS):
        pairs = t * USED
        route = np.zeros((pairs, 2), np.uint32)
        route[:, 0] = np.arange(pairs) * 5 % EXPERTS
        sizes = {"w": one * EXPERTS, "x": 4 * t * k, "route": 8 * pairs, "y": 4 * pairs * n}
        data: dict[str, Array] = {"w": _packed(fmt, k), "x": _FLOATS, "route": route}
        moved = min(pairs, EXPERTS) * one + 4 * t * k + 4 * pairs * n
        shape, count = f"{n}x{k} T{t} {USED} of {EXPERTS}", 2 * pairs * n * k
        yield Case(op, v, shown, shape, push, _text(t), t, sizes, moved, count, data, "w")


def _topk(op: str, v: Variant, shown: str, quick: bool) -> Iterator[Case]:
    words, blocks = 130 if op == "topk" else 4, ceil_div(VOCAB, 1024)
    record, out = 4 * words, 4 * 130
    sizes = {"logits": 4 * VOCAB, "part": record * blocks, "out": out}
    data: dict[str, Array] = {"logits": _FLOATS, "part": np.arange(words, dtype=np.float32)}
    for stage, moved in enumerate((4 * VOCAB + record * blocks, record * blocks + out)):
        push = {"v": VOCAB, "stage": stage}
        shape, count = f"{VOCAB} stage {stage}", moved // 4 * 3
        yield Case(op, v, shown, shape, push, _text(1), 1, sizes, moved, count, data)


_XS = ceil_div(TILE + 2 * HALO, 16) * 16
_LUMA = (TILE + 2 * HALO) * _XS  # floats of a tile's window
_MAPS = CHANNELS * _LUMA
_FRAME = {"bits": 8, "tw": TILE, "th": TILE, "halo": HALO, "xs": _XS}
_ONE = _words(N_TILES=1, WIDTH=TILE, HEIGHT=TILE)


def _advance(op: str, v: Variant, shown: str, quick: bool) -> Iterator[Case]:
    row = 4 * RECORD_WORDS
    sizes = {"record": row, "next": 4 * PARAM_WORDS, "ids": 4, "records": 4 * STRIDE * MOST}
    yield Case(op, v, shown, "a record", {}, _text(1), 1, sizes, 2 * row, 2)


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
