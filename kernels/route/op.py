# SPDX-License-Identifier: Apache-2.0
"""route: the experts of each token: the `used` greatest of its router's logits, in falling order
(ties: the lower id first), with their shares of the softmax (Shazeer et al. 2017).

out[t, j] = {u32 expert, f32 share}; the shares are of all experts (norm = 0), or of those that are
used (norm = 1). used is at most MAX_USED.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kernels.contract import N_TOKENS, Bind, Contract, Groups, Variant, ceil_div
from kernels.text import Buffers, Push, most_groups, spread, view

MAX_USED = 32


def groups(push: Push, variant: Variant) -> Groups:
    count = push["tokens"]
    if variant.name == "base":
        count = ceil_div(count * push["used"], variant.workgroup[0])
    return (*spread(count, most_groups(push)[0]), 1)


def reference(params: npt.NDArray[np.uint32], buffers: Buffers, push: Push) -> None:
    experts, used, tokens = int(push["experts"]), int(push["used"]), int(params[N_TOKENS])
    logits = view(buffers["logits"], np.float32)[: tokens * experts].reshape(tokens, experts)
    out = view(buffers["out"], np.uint32)[: tokens * used * 2].reshape(tokens, used, 2)
    share = np.exp(logits.astype(np.float64) - logits.max(axis=1, keepdims=True))
    best = np.argsort(-logits, axis=1, kind="stable")[:, :used]
    chosen = np.take_along_axis(share, best, 1)
    chosen /= (chosen if push["norm"] else share).sum(axis=1, keepdims=True)
    out[:, :, 0] = best
    out[:, :, 1] = chosen.astype(np.float32).view(np.uint32)


OP = Contract(
    name="route",
    bindings=(Bind("logits", "r"), Bind("out", "w")),
    push=(("experts", "u32"), ("used", "u32"), ("norm", "u32")),
    variants=(
        Variant("base", (64, 1, 1)),
        Variant("group", (32, 1, 1), {"GROUPED": "1"}, shared=3 * 32 * 4, baseline=False),
    ),
    groups=groups,
    reference=reference,
)
