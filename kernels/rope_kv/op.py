# SPDX-License-Identifier: Apache-2.0
"""rope_kv: rotates Q and K in place by their positions and stores K and V in the caches as halves
(Su et al. 2021).

Token t stands at position p = pos0 + t. Of each head's `dim` elements the first rope_dims (R) are
rotated: pair j (of R/2) with (cos, sin) = table[p, j] becomes (a cos - b sin, a sin + b cos). neox
= 0: a, b are elements 2j, 2j + 1; neox = 1: elements j, j + R/2. qkv[t] holds the heads of Q, then
of K, then of V. dim and R are multiples of 4.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kernels.contract import N_TOKENS, POS0, Bind, Contract, Groups, Variant
from kernels.text import Buffers, Push, rows_and_tokens, view


def groups(push: Push, variant: Variant) -> Groups:
    heads = push["heads"] + 2 * push["kv_heads"]
    return rows_and_tokens(heads * push["dim"] // 4, variant.workgroup[0], push)


def reference(params: npt.NDArray[np.uint32], buffers: Buffers, push: Push) -> None:
    heads, kv_heads, dim, ctx = (int(push[name]) for name in ("heads", "kv_heads", "dim", "ctx"))
    half, tokens, pos0 = int(push["rope_dims"]) // 2, int(params[N_TOKENS]), int(params[POS0])
    width = heads + 2 * kv_heads
    qkv = view(buffers["qkv"], np.float32)[: tokens * width * dim].reshape(tokens, width, dim)
    table = view(buffers["table"], np.float32)[: ctx * half * 2].reshape(ctx, half, 2)
    kc, vc = (
        view(buffers[name], np.float16)[: kv_heads * ctx * dim].reshape(kv_heads, ctx, dim)
        for name in ("kc", "vc")
    )
    for t in range(tokens):
        cos, sin = table[pos0 + t, :, 0], table[pos0 + t, :, 1]
        rotated = qkv[t, : heads + kv_heads, : 2 * half]
        a = rotated[:, :half] if push["neox"] else rotated[:, 0::2]
        b = rotated[:, half:] if push["neox"] else rotated[:, 1::2]
        a[:], b[:] = a * cos - b * sin, a * sin + b * cos
        kc[:, pos0 + t] = qkv[t, heads : heads + kv_heads]
        vc[:, pos0 + t] = qkv[t, heads + kv_heads :]


OP = Contract(
    name="rope_kv",
    bindings=(Bind("qkv", "rw"), Bind("table", "r"), Bind("kc", "w"), Bind("vc", "w")),
    push=(
        ("heads", "u32"),
        ("kv_heads", "u32"),
        ("dim", "u32"),
        ("ctx", "u32"),
        ("rope_dims", "u32"),
        ("neox", "u32"),
    ),
    variants=(Variant("base", (32, 1, 1)),),
    groups=groups,
    reference=reference,
)
