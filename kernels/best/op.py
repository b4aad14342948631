# SPDX-License-Identifier: Apache-2.0
"""best: topk for whoever wants the greatest logit alone: its record, the greatest of all and their
log-sum-exp, in two stages.

Stage 0 writes to part, for each block of 1024 logits, {u32 id, f32 logit, f32 max, f32 sum of exp(x
- max)}; stage 1 makes a record of topk of them, whose other 63 candidates are {0xffffffff, -inf}.
Equal logits, NaN and v are as topk has them.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kernels.contract import Bind, Contract, Groups, Variant, ceil_div
from kernels.text import Buffers, Push, view
from kernels.topk import op as topk

BLOCK, PART_WORDS = topk.BLOCK, 4


def part_nbytes(v: int) -> int:
    """Bytes of the buffer between the stages."""
    return ceil_div(v, BLOCK) * PART_WORDS * 4


def groups(push: Push, variant: Variant) -> Groups:
    return (1 if push["stage"] else ceil_div(push["v"], BLOCK), 1, 1)


def reference(params: npt.NDArray[np.uint32], buffers: Buffers, push: Push) -> None:
    v = int(push["v"])
    blocks = ceil_div(v, BLOCK)
    part = view(buffers["part"], np.uint32)[: blocks * PART_WORDS].reshape(blocks, PART_WORDS)
    if push["stage"] == 0:
        logits, ids = view(buffers["logits"], np.float32)[:v], np.arange(v, dtype=np.uint32)
        ids += np.uint32(push.get("first", 0))  # of a piece
        for b in range(blocks):
            span = slice(b * BLOCK, (b + 1) * BLOCK)
            part[b, :2] = topk.best(ids[span], logits[span])[:2]
            part[b, 2:] = np.array(topk.total(logits[span]), np.float32).view(np.uint32)
        return
    sums = np.ascontiguousarray(part[:, 2:]).view(np.float32).astype(np.float64)
    top = sums[:, 0].max()
    with np.errstate(divide="ignore", invalid="ignore"):
        weight = np.where(sums[:, 0] == top, 1.0, np.exp(sums[:, 0] - top))
        lse = top + np.log((weight * sums[:, 1]).sum())
    out = view(buffers["out"], np.uint32)
    values = np.ascontiguousarray(part[:, 1]).view(np.float32)
    records = topk.best(np.ascontiguousarray(part[:, 0]), values)
    records[2::2], records[3::2] = topk.NONE, np.float32(-np.inf).view(np.uint32)
    out[: 2 * topk.TOP] = records
    out[2 * topk.TOP : topk.RECORD_WORDS] = np.array([top, lse], np.float32).view(np.uint32)


OP = Contract(
    name="best",
    bindings=(Bind("logits", "r"), Bind("part", "rw"), Bind("out", "w")),
    push=(("v", "u32"), ("stage", "u32")),
    variants=(
        Variant("base", (32, 1, 1), shared=4 * 32 * 4),
        Variant("wide", (256, 1, 1), shared=4 * 256 * 4, baseline=False),
    ),
    groups=groups,
    reference=reference,
)
