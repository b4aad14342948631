# SPDX-License-Identifier: Apache-2.0
"""swiglu: h[t, i] = g / (1 + exp(-g)) * u with g = gu[t, i], u = gu[t, f + i]  (Shazeer 2020). f is
a multiple of 4."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kernels.contract import N_TOKENS, Bind, Contract, Groups, Variant
from kernels.text import Buffers, Push, rows_and_tokens, view


def groups(push: Push, variant: Variant) -> Groups:
    return rows_and_tokens(push["f"] // 4, variant.workgroup[0], push)


def reference(params: npt.NDArray[np.uint32], buffers: Buffers, push: Push) -> None:
    f, tokens = int(push["f"]), int(params[N_TOKENS])
    gu = view(buffers["gu"], np.float32)[: tokens * 2 * f].reshape(tokens, 2, f).astype(np.float64)
    gate, up = gu[:, 0], gu[:, 1]
    h = gate / (1 + np.exp(np.minimum(-gate, 700.0))) * up
    view(buffers["h"], np.float32)[: tokens * f] = h.reshape(-1)


OP = Contract(
    name="swiglu",
    bindings=(Bind("gu", "r"), Bind("h", "w")),
    push=(("f", "u32"),),
    variants=(Variant("base", (64, 1, 1)),),
    groups=groups,
    reference=reference,
)
