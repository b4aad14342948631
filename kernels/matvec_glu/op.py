# SPDX-License-Identifier: Apache-2.0
"""matvec_glu: matvec of a gated unit: y[y0 + i] (+)= sum over k of W[i, k] act(g[k]) u[k], with
g[k] = gu[k], u[k] = gu[k + K]; act as in swiglu. Formats and rounding are those of matvec.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kernels.contract import Bind, Contract
from kernels.matvec.op import PUSH, groups, multiply, variants
from kernels.swiglu.op import gated
from kernels.text import Buffers, Push, view


def reference(params: npt.NDArray[np.uint32], buffers: Buffers, push: Push) -> None:
    k = int(push["k"])
    gu = view(buffers["gu"], np.float32)[: 2 * k].astype(np.float64)
    multiply(gated(gu[:k], gu[k:], int(push["act"])), buffers, push)


OP = Contract(
    name="matvec_glu",
    bindings=(Bind("w", "r"), Bind("gu", "r"), Bind("y", "rw")),
    push=(*PUSH, ("act", "u32")),
    variants=variants(),
    groups=groups,
    reference=reference,
)
