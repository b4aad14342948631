# SPDX-License-Identifier: Apache-2.0
"""rmsnorm: y[t, i] (+)= x[t, i] * w[i] / sqrt(mean(x[t]^2) + eps)  (Zhang and Sennrich 2019).

k is a multiple of 4. With last = 1 only row last_row of x is taken and row 0 of y written: the norm
before the head. With add = 1 the result is added to what y holds: a norm behind a block, with the
residual sum.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kernels.contract import LAST_ROW, N_TOKENS, Bind, Contract, Groups, Variant
from kernels.text import Buffers, Push, most_groups, spread, view, wide_variants


def groups(push: Push, variant: Variant) -> Groups:
    return (*spread(1 if push["last"] else push["tokens"], most_groups(push)[0]), 1)


def reference(params: npt.NDArray[np.uint32], buffers: Buffers, push: Push) -> None:
    k = int(push["k"])
    first, count = (int(params[LAST_ROW]), 1) if push["last"] else (0, int(params[N_TOKENS]))
    x = view(buffers["x"], np.float32)[first * k : (first + count) * k].reshape(count, k)
    w = view(buffers["w"], np.float32)[:k]
    mean = np.mean(x.astype(np.float64) ** 2, axis=1, keepdims=True)
    y = x * w / np.sqrt(mean + push["eps"])
    out = view(buffers["y"], np.float32)[: count * k]
    out[:] = y.reshape(-1) + out if push["add"] else y.reshape(-1)


OP = Contract(
    name="rmsnorm",
    bindings=(Bind("x", "r"), Bind("w", "r"), Bind("y", "rw")),
    push=(("k", "u32"), ("eps", "f32"), ("last", "u32"), ("add", "u32")),
    variants=wide_variants(Variant("base", (32, 1, 1), shared=32 * 4), 256, (256 + 16) * 4),
    groups=groups,
    reference=reference,
)
