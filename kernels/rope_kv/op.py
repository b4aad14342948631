# SPDX-License-Identifier: Apache-2.0
"""rope_kv: rotates Q and K in place by their positions and stores K and V in the caches
(Su et al. 2021).

Token t stands at position p = pos0 + t. Of each head's `dim` elements the first rope_dims (R) are
rotated: pair j (of R/2) with (cos, sin) = table[p, j] becomes (a cos - b sin, a sin + b cos). neox
= 0: a, b are elements 2j, 2j + 1; neox = 1: elements j, j + R/2. qkv[t] holds the heads of Q, then
of K, then of V. dim and R are multiples of 4. fmt is the form of the caches (kernels.kv).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kernels import kv
from kernels.contract import FORMATS, N_TOKENS, POS0, Bind, Contract, Groups, Variant
from kernels.text import FORMAT_NAMES, Buffers, Push, most_groups, rows_and_tokens, spread, view


def groups(push: Push, variant: Variant) -> Groups:
    heads = push["heads"] + 2 * push["kv_heads"]
    if push["fmt"] == FORMATS["q8"]:  # a head, whose elements share scales, is a workgroup's
        return (heads, *spread(push["tokens"], most_groups(push)[1]))
    return rows_and_tokens(heads * push["dim"] // 4, variant.workgroup[0], push)


def reference(params: npt.NDArray[np.uint32], buffers: Buffers, push: Push) -> None:
    heads, kv_heads, dim, ctx = (int(push[name]) for name in ("heads", "kv_heads", "dim", "ctx"))
    half, tokens, pos0 = int(push["rope_dims"]) // 2, int(params[N_TOKENS]), int(params[POS0])
    width = heads + 2 * kv_heads
    qkv = view(buffers["qkv"], np.float32)[: tokens * width * dim].reshape(tokens, width, dim)
    table = view(buffers["table"], np.float32)[: ctx * half * 2].reshape(ctx, half, 2)
    fmt, shape = FORMAT_NAMES[int(push["fmt"])], (kv_heads, ctx, dim)
    for t in range(tokens):
        cos, sin = table[pos0 + t, :, 0], table[pos0 + t, :, 1]
        rotated = qkv[t, : heads + kv_heads, : 2 * half]
        a = rotated[:, :half] if push["neox"] else rotated[:, 0::2]
        b = rotated[:, half:] if push["neox"] else rotated[:, 1::2]
        a[:], b[:] = a * cos - b * sin, a * sin + b * cos
        for name, first in (("kc", heads), ("vc", heads + kv_heads)):
            rows = qkv[t, first : first + kv_heads]
            kv.store(fmt, buffers[name], shape, pos0 + t, rows)


OP = Contract(
    name="rope_kv",
    bindings=(Bind("qkv", "rw"), Bind("table", "r"), Bind("kc", "w"), Bind("vc", "w")),
    push=(
        ("fmt", "u32"),
        ("heads", "u32"),
        ("kv_heads", "u32"),
        ("dim", "u32"),
        ("ctx", "u32"),
        ("rope_dims", "u32"),
        ("neox", "u32"),
    ),
    variants=tuple(
        form
        for fmt, shared in (("f16", 0), ("q8", (kv.MAX_DIM + kv.MAX_DIM // 4) * 4))
        for base in [Variant(fmt, (32, 1, 1), kv.DEFINES[fmt], shared=shared)]
        for form in (base, kv.addressed(base))
    ),
    groups=groups,
    reference=reference,
)
