# SPDX-License-Identifier: Apache-2.0
"""head_norm: RMS norm of Q and K before they are rotated, in place in qkv [T, (H+2Hk)*D].

whole = 0: each head of Q and K on its own, with w = D weights for Q's heads, then D for K's. whole
= 1: all of Q together, and all of K, with H*D weights, then Hk*D. V stays as it is. dim is a
multiple of 4.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kernels.contract import N_TOKENS, Bind, Contract, Groups, Variant
from kernels.text import Buffers, Push, most_groups, spread, view


def groups(push: Push, variant: Variant) -> Groups:
    vectors = 2 if push["whole"] else push["heads"] + push["kv_heads"]
    return (vectors, *spread(push["tokens"], most_groups(push)[1]))


def reference(params: npt.NDArray[np.uint32], buffers: Buffers, push: Push) -> None:
    heads, kv_heads, dim = (int(push[name]) for name in ("heads", "kv_heads", "dim"))
    tokens, width = int(params[N_TOKENS]), (heads + 2 * kv_heads) * dim
    qkv = view(buffers["qkv"], np.float32)[: tokens * width].reshape(tokens, width)
    w = view(buffers["w"], np.float32)
    first = w_first = 0
    for rows in (heads, kv_heads):
        size = rows * dim if push["whole"] else dim
        x = qkv[:, first : first + rows * dim].reshape(tokens, -1, size)
        mean = np.mean(x.astype(np.float64) ** 2, axis=2, keepdims=True)
        y = x * w[w_first : w_first + size] / np.sqrt(mean + push["eps"])
        qkv[:, first : first + rows * dim] = y.reshape(tokens, -1)
        first, w_first = first + rows * dim, w_first + size


OP = Contract(
    name="head_norm",
    bindings=(Bind("w", "r"), Bind("qkv", "rw")),
    push=(
        ("heads", "u32"),
        ("kv_heads", "u32"),
        ("dim", "u32"),
        ("eps", "f32"),
        ("whole", "u32"),
    ),
    variants=(Variant("base", (32, 1, 1), shared=32 * 4),),
    groups=groups,
    reference=reference,
)
