# SPDX-License-Identifier: Apache-2.0
"""add_bias: y[t, i] += b[i] for t < n_tokens and i < n, in place. n is a multiple of 4."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kernels.contract import N_TOKENS, Bind, Contract, Groups, Variant
from kernels.text import Buffers, Push, rows_and_tokens, view


def groups(push: Push, variant: Variant) -> Groups:
    return rows_and_tokens(push["n"] // 4, variant.workgroup[0], push)


def reference(params: npt.NDArray[np.uint32], buffers: Buffers, push: Push) -> None:
    n, tokens = int(push["n"]), int(params[N_TOKENS])
    y = view(buffers["y"], np.float32)[: tokens * n].reshape(tokens, n)
    y += view(buffers["b"], np.float32)[:n]


OP = Contract(
    name="add_bias",
    bindings=(Bind("b", "r"), Bind("y", "rw")),
    push=(("n", "u32"),),
    variants=(Variant("base", (64, 1, 1)),),
    groups=groups,
    reference=reference,
)
