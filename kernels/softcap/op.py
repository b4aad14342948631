# SPDX-License-Identifier: Apache-2.0
"""softcap: x[i] = cap * tanh(x[i] / cap) for i < n, in place: logits that stay below cap."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kernels.contract import Bind, Contract, Groups, Variant, ceil_div
from kernels.text import Buffers, Push, most_groups, spread, view


def groups(push: Push, variant: Variant) -> Groups:
    return (*spread(ceil_div(push["n"], variant.workgroup[0]), most_groups(push)[0]), 1)


def reference(params: npt.NDArray[np.uint32], buffers: Buffers, push: Push) -> None:
    x = view(buffers["x"], np.float32)[: int(push["n"])]
    x[:] = push["cap"] * np.tanh(x.astype(np.float64) / push["cap"])


OP = Contract(
    name="softcap",
    bindings=(Bind("x", "rw"),),
    push=(("n", "u32"), ("cap", "f32")),
    variants=(Variant("base", (64, 1, 1)),),
    groups=groups,
    reference=reference,
)
