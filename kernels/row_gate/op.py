# SPDX-License-Identifier: Apache-2.0
"""row_gate: y[t, i] *= sigmoid(g[t]) for t < n_tokens and i < n, in place, sigmoid(x) = 1 / (1 +
exp(-x)): a shared expert's part in a token (Qwen2-MoE). n is a multiple of 4.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kernels.contract import N_TOKENS, Bind, Contract, Groups, Variant
from kernels.text import Buffers, Push, rows_and_tokens, view


def groups(push: Push, variant: Variant) -> Groups:
    return rows_and_tokens(push["n"] // 4, variant.workgroup[0], push)


def reference(params: npt.NDArray[np.uint32], buffers: Buffers, push: Push) -> None:
    n, tokens = int(push["n"]), int(params[N_TOKENS])
    g = view(buffers["g"], np.float32)[:tokens].astype(np.float64)
    y = view(buffers["y"], np.float32)[: tokens * n].reshape(tokens, n)
    y[:] = y / (1 + np.exp(np.minimum(-g, 700.0)))[:, None]


OP = Contract(
    name="row_gate",
    bindings=(Bind("g", "r"), Bind("y", "rw")),
    push=(("n", "u32"),),
    variants=(Variant("base", (64, 1, 1)),),
    groups=groups,
    reference=reference,
)
