# SPDX-License-Identifier: Apache-2.0
"""last_to_first: x[0, i] = x[n_tokens - 1, i] for i < n, in place: what is computed for the last
token alone finds it in row 0. n is a multiple of 4.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kernels.contract import N_TOKENS, Bind, Contract, Groups, Variant, ceil_div
from kernels.text import Buffers, Push, view


def groups(push: Push, variant: Variant) -> Groups:
    return (ceil_div(push["n"] // 4, variant.workgroup[0]), 1, 1)


def reference(params: npt.NDArray[np.uint32], buffers: Buffers, push: Push) -> None:
    n, last = int(push["n"]), int(params[N_TOKENS]) - 1
    x = view(buffers["x"], np.float32)
    x[:n] = x[last * n : (last + 1) * n]


OP = Contract(
    name="last_to_first",
    bindings=(Bind("x", "rw"),),
    push=(("n", "u32"),),
    variants=(Variant("base", (64, 1, 1)),),
    groups=groups,
    reference=reference,
)
