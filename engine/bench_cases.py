# SPDX-License-Identifier: Apache-2.0
"""Calls to be timed: each operation and variant in the shapes that real work gives it.

Text: SmolLM2-135M, a decode step at position 511 and a prefill of 32 tokens behind 480; what that
model lacks has its sizes, with 16 experts of which 2 are used. Video: bench_cases_frames and
bench_cases_maps. Bytes and operations are counted from the shapes: each binding's part is read or
written once, an addition or multiplication is one operation. They are estimates.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np

import kernels
from engine.backends.base import Array, Backend
from engine.backends.gate import variant_misfit
from kernels import kv, weights
from kernels.advance.op import MOST, STRIDE
from kernels.contract import FORMATS, PARAM_WORDS, Variant, ceil_div
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
    from engine import bench_cases_frames, bench_cases_maps

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
        "last_to_first": _last_to_first,
        "row_gate": _row_gate,
        "head_norm": _head_norm,
        "softcap": _softcap,
        "route": _route,
        "experts": _experts,
        "topk": _topk,
        "best": _topk,
        "advance": _advance,
        **bench_cases_frames.MAKERS,
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


def _last_to_first(op: str, v: Variant, shown: str, quick: bool) -> Iterator[Case]:
    sizes, push = {"x": 4 * TOKENS * HIDDEN}, {"n": HIDDEN}
    yield Case(op, v, shown, f"{HIDDEN}", push, _text(TOKENS), TOKENS, sizes, 8 * HIDDEN, HIDDEN)


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


def _advance(op: str, v: Variant, shown: str, quick: bool) -> Iterator[Case]:
    row = 4 * RECORD_WORDS
    sizes = {"record": row, "next": 4 * PARAM_WORDS, "ids": 4, "records": 4 * STRIDE * MOST}
    yield Case(op, v, shown, "a record", {}, _text(1), 1, sizes, 2 * row, 2)
