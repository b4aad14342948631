# SPDX-License-Identifier: Apache-2.0
"""attention_decode: one token's attention over positions 0..pos0 of the caches.

out[h] = sum over p of softmax(scale * q[h] . kc[g, p])[p] * vc[g, p] with g = h / (heads /
kv_heads). qkv holds the rotated Q first (rope_kv). dim is a multiple of 4, at most 256; heads a
multiple of kv_heads. With window > 0 only the last `window` positions count, the token's own among
them; with softcap > 0 a scaled score s becomes softcap * tanh(s / softcap) (Gemma 2). The softmax
is taken over blocks of positions as they come (Milakov and Gimelshein 2018; Dao et al. 2022).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kernels import kv
from kernels.contract import POS0, Bind, Contract, Groups, Variant, ceil_div
from kernels.text import FORMAT_NAMES, Buffers, Push, view, wide_variants

MAX_DIM = kv.MAX_DIM
# As attention_split.glsl has them.
SPLITS, TOGETHER, MOST_GROUPS = 32, 4, 4096
BASE_SHARED = (2 * MAX_DIM + 2 * 32) * 4


def groups(push: Push, variant: Variant) -> Groups:
    if variant.scratch is None:
        return (push["heads"], 1, 1)
    each = push["heads"] // push["kv_heads"]
    return (push["kv_heads"] * ceil_div(each, TOGETHER), SPLITS, 1)


def records_nbytes(push: Push) -> int:
    """Bytes of scratch memory for what the workgroups of a split leave for the last of them."""
    return 4 * MOST_GROUPS + int(push["heads"]) * SPLITS * (4 + int(push["dim"])) * 4


def variants(fmt: str) -> tuple[Variant, ...]:
    """All for one form of the caches."""
    base = Variant(fmt, (32, 1, 1), kv.DEFINES[fmt], shared=BASE_SHARED)
    split = Variant(
        f"{fmt}_split",
        (256, 1, 1),
        {**kv.DEFINES[fmt], "SPLIT": "1"},
        frozenset({"device_scope"}),  # the last workgroup reads what others wrote
        shared=(TOGETHER * (MAX_DIM + 4 * 256 + 3) + 4 * 256 + 256 + 32 + 1) * 4,
        baseline=False,
        scratch=records_nbytes,
    )
    wide = wide_variants(base, 256, (MAX_DIM + 6 * 256 + 16) * 4)
    return (*wide, split, kv.addressed(base), kv.addressed(split))


def attend(buffers: Buffers, push: Push, tokens: int, pos0: int) -> None:
    """Attention of `tokens` tokens, token t over positions up to pos0 + t; in float64."""
    heads, kv_heads, dim, ctx = (int(push[name]) for name in ("heads", "kv_heads", "dim", "ctx"))
    window, softcap, width = int(push["window"]), push["softcap"], heads + 2 * kv_heads
    qkv = view(buffers["qkv"], np.float32)[: tokens * width * dim].reshape(tokens, width, dim)
    out = view(buffers["out"], np.float32)[: tokens * heads * dim].reshape(tokens, heads, dim)
    fmt, shape = FORMAT_NAMES[int(push["fmt"])], (kv_heads, ctx, dim)
    k, v = (kv.load(fmt, buffers[name], shape) for name in ("kc", "vc"))
    for t in range(tokens):
        end = pos0 + t + 1
        seen = slice(max(0, end - window) if window else 0, end)
        for h in range(heads):
            g = h // (heads // kv_heads)
            scores = k[g, seen] @ qkv[t, h].astype(np.float64) * push["scale"]
            if softcap:
                scores = softcap * np.tanh(scores / softcap)
            p = np.exp(scores - scores.max())
            out[t, h] = p @ v[g, seen] / p.sum()


def reference(params: npt.NDArray[np.uint32], buffers: Buffers, push: Push) -> None:
    attend(buffers, push, 1, int(params[POS0]))


OP = Contract(
    name="attention_decode",
    bindings=(Bind("qkv", "r"), Bind("kc", "r"), Bind("vc", "r"), Bind("out", "w")),
    push=(
        ("fmt", "u32"),
        ("heads", "u32"),
        ("kv_heads", "u32"),
        ("dim", "u32"),
        ("ctx", "u32"),
        ("scale", "f32"),
        ("window", "u32"),
        ("softcap", "f32"),
    ),
    variants=(*variants("f16"), *variants("q8")),
    groups=groups,
    reference=reference,
)
