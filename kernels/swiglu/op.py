# SPDX-License-Identifier: Apache-2.0
"""swiglu: h[t, i] = act(g) * u with g = gu[t, i], u = gu[t, f + i]  (Shazeer 2020).

act 0: SiLU, g / (1 + exp(-g)); 1: GELU by tanh (Hendrycks and Gimpel 2016), which is
g / (1 + exp(-2 z)) with z = sqrt(2 / pi) (g + 0.044715 g^3). A token has `each` rows: 1, or as
many as it has experts. f is a multiple of 4.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from kernels.contract import N_TOKENS, Bind, Contract, Groups, Variant
from kernels.text import Buffers, Push, rows_and_tokens, view

ACTS = {"silu": 0, "gelu": 1}
GELU = 2 * (2 / np.pi) ** 0.5


def groups(push: Push, variant: Variant) -> Groups:
    rows = {**push, "tokens": push["tokens"] * push["each"]}
    return rows_and_tokens(push["f"] // 4, variant.workgroup[0], rows)


def gated(gate: npt.NDArray[Any], up: npt.NDArray[Any], act: int) -> npt.NDArray[Any]:
    """act(gate) * up."""
    z = GELU * (gate + 0.044715 * gate**3) if act == ACTS["gelu"] else gate
    return np.asarray(gate / (1 + np.exp(np.minimum(-z, 700.0))) * up)


def reference(params: npt.NDArray[np.uint32], buffers: Buffers, push: Push) -> None:
    f, rows = int(push["f"]), int(params[N_TOKENS]) * int(push["each"])
    gu = view(buffers["gu"], np.float32)[: rows * 2 * f].reshape(rows, 2, f).astype(np.float64)
    h = gated(gu[:, 0], gu[:, 1], int(push["act"]))
    view(buffers["h"], np.float32)[: rows * f] = h.reshape(-1)


OP = Contract(
    name="swiglu",
    bindings=(Bind("gu", "r"), Bind("h", "w")),
    push=(("f", "u32"), ("act", "u32"), ("each", "u32")),
    variants=(Variant("base", (64, 1, 1)),),
    groups=groups,
    reference=reference,
)
