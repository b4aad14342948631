# SPDX-License-Identifier: Apache-2.0
"""matvec_norm_glu: two products of row last_row of x [T, k], normalised on the way as matvec_norm
does, and the gated unit of both: y[y0 + i] (+)= act(g[i]) u[i] with g = W[0..n] h, u = W[up..up +
n] h, act as in swiglu. `up` is a multiple of 16. Formats and rounding are those of matvec_norm.

For one token: what the next product reads is half of what gate and unit are, and each element is
made once, not by every workgroup that reads it.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kernels import weights
from kernels.contract import LAST_ROW, Bind, Contract
from kernels.matvec.op import PUSH, groups, variants
from kernels.swiglu.op import gated
from kernels.text import FORMAT_NAMES, Buffers, Push, view


def reference(params: npt.NDArray[np.uint32], buffers: Buffers, push: Push) -> None:
    n, k, up, row = int(push["n"]), int(push["k"]), int(push["up"]), int(params[LAST_ROW])
    x = view(buffers["x"], np.float32)[row * k : (row + 1) * k].astype(np.float64)
    h = x * view(buffers["norm"], np.float32)[:k] / np.sqrt(np.mean(x**2) + push["eps"])
    w = weights.unpack(FORMAT_NAMES[push["fmt"]], buffers["w"], up + n, k).astype(np.float64)
    unit = gated(w[:n] @ h, w[up:] @ h, int(push["act"]))
    y = view(buffers["y"], np.float32)[int(push["y0"]) : int(push["y0"]) + n]
    y[:] = unit + y if push["accumulate"] else unit


OP = Contract(
    name="matvec_norm_glu",
    bindings=(Bind("w", "r"), Bind("x", "r"), Bind("norm", "r"), Bind("y", "rw")),
    push=(*PUSH, ("eps", "f32"), ("act", "u32"), ("up", "u32")),
    variants=variants(4),
    groups=groups,
    reference=reference,
)
