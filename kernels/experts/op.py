# SPDX-License-Identifier: Apache-2.0
"""experts: products with the matrices that `route` chose, for t < n_tokens and i < n.

W holds `count` packed matrices [n, k] under each other, those of the experts first..first+count-1;
route[t, j] = {u32 expert, f32 share} for j < used.

    sum = 0: y[t, j, y0 + i]  = W[e, i] . x[t]                    rows of y are ldy apart
    sum = 1: y[t, y0 + i]    += sum over j of share W[e, i] . x[t, j]

Experts outside of W are left out: a call a shard does all. n is a multiple of 16. The CPU rounds x
to int8 with a scale per 32 for q8 and q4, as matvec does.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kernels import weights
from kernels.contract import N_TOKENS, Bind, Contract, Groups, Variant, ceil_div
from kernels.text import FORMAT_NAMES, Buffers, Push, format_variants, most_groups, spread, view


def groups(push: Push, variant: Variant) -> Groups:
    rows = push["tokens"] * (1 if push["sum"] else push["used"])
    return (ceil_div(push["n"], weights.ROWS), *spread(rows, most_groups(push)[1]))


def reference(params: npt.NDArray[np.uint32], buffers: Buffers, push: Push) -> None:
    n, k, first, count, used, y0, ldy = (
        int(push[name]) for name in ("n", "k", "first", "count", "used", "y0", "ldy")
    )
    tokens, add = int(params[N_TOKENS]), bool(push["sum"])
    w = weights.unpack(FORMAT_NAMES[push["fmt"]], buffers["w"], count * n, k)
    w = w.reshape(count, n, k)
    x = view(buffers["x"], np.float32)
    y = view(buffers["y"], np.float32)
    chosen = view(buffers["route"], np.uint32)[: tokens * used * 2].reshape(tokens, used, 2)
    for t in range(tokens):
        for j in range(used):
            expert = int(chosen[t, j, 0]) - first
            if not 0 <= expert < count:
                continue
            row = t * used + j if add else t
            product = w[expert].astype(np.float64) @ x[row * k : (row + 1) * k]
            if add:
                y[t * ldy + y0 : t * ldy + y0 + n] += chosen[t, j, 1:].view(np.float32) * product
            else:
                at = (t * used + j) * ldy + y0
                y[at : at + n] = product


OP = Contract(
    name="experts",
    bindings=(Bind("w", "r"), Bind("x", "r"), Bind("route", "r"), Bind("y", "rw")),
    push=(
        ("fmt", "u32"),
        ("n", "u32"),
        ("k", "u32"),
        ("first", "u32"),
        ("count", "u32"),
        ("used", "u32"),
        ("sum", "u32"),
        ("y0", "u32"),
        ("ldy", "u32"),
    ),
    variants=format_variants(32, shared=32 * 16),
    groups=groups,
    reference=reference,
)
