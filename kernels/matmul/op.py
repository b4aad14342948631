# SPDX-License-Identifier: Apache-2.0
"""matmul: y[t, y0 + i] (+)= sum over k of W[i, k] x[t, k], for i < n and t < n_tokens; rows of y
are ldy apart.

accumulate = 1 adds to what y holds. The same arithmetic as matvec, a block of tokens at a time.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kernels import weights
from kernels.contract import N_TOKENS, Bind, Contract, Groups, Variant, ceil_div
from kernels.text import FORMAT_NAMES, Buffers, Push, format_variants, most_groups, spread, view

ROWS, TOKENS = 4, 4  # of an invocation of the GLSL


def groups(push: Push, variant: Variant) -> Groups:
    tokens = spread(ceil_div(push["tokens"], TOKENS), most_groups(push)[1])
    return (ceil_div(push["n"], ROWS * variant.workgroup[0]), *tokens)


def reference(params: npt.NDArray[np.uint32], buffers: Buffers, push: Push) -> None:
    n, k, y0, ldy = (int(push[name]) for name in ("n", "k", "y0", "ldy"))
    tokens = int(params[N_TOKENS])
    w = weights.unpack(FORMAT_NAMES[push["fmt"]], buffers["w"], n, k).astype(np.float64)
    x = view(buffers["x"], np.float32)[: tokens * k].reshape(tokens, k).astype(np.float64)
    y = view(buffers["y"], np.float32)
    for t, row in enumerate(x @ w.T):
        part = y[t * ldy + y0 : t * ldy + y0 + n]
        part[:] = row + part if push["accumulate"] else row


OP = Contract(
    name="matmul",
    bindings=(Bind("w", "r"), Bind("x", "r"), Bind("y", "rw")),
    push=(
        ("fmt", "u32"),
        ("n", "u32"),
        ("k", "u32"),
        ("accumulate", "u32"),
        ("y0", "u32"),
        ("ldy", "u32"),
    ),
    variants=format_variants(32),
    groups=groups,
    reference=reference,
)
