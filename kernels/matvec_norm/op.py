# SPDX-License-Identifier: Apache-2.0
"""matvec_norm: matvec of row last_row of x [T, k], normalised on the way: y[y0 + i] (+)= sum over k
of W[i, k] x[k] norm[k], over sqrt(mean(x^2) + eps), which every workgroup computes for itself.

For one token: a norm of its own would be a launch of one small workgroup that all others wait for.
Formats and rounding are those of matvec, of activations before they are divided.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kernels.contract import LAST_ROW, Bind, Contract
from kernels.matvec.op import PUSH, groups, multiply, variants
from kernels.text import Buffers, Push, view


def reference(params: npt.NDArray[np.uint32], buffers: Buffers, push: Push) -> None:
    k, row = int(push["k"]), int(params[LAST_ROW])
    x = view(buffers["x"], np.float32)[row * k : (row + 1) * k].astype(np.float64)
    norm = view(buffers["norm"], np.float32)[:k]
    multiply(x * norm / np.sqrt(np.mean(x**2) + push["eps"]), buffers, push)


OP = Contract(
    name="matvec_norm",
    bindings=(Bind("w", "r"), Bind("x", "r"), Bind("norm", "r"), Bind("y", "rw")),
    push=(*PUSH, ("eps", "f32")),
    variants=variants(4),
    groups=groups,
    reference=reference,
)
