# SPDX-License-Identifier: Apache-2.0
"""topk: the 64 greatest of v logits, the greatest of all and their log-sum-exp, in two stages.

A record is {u32 id, f32 logit}. Stage 0 writes to part, for each block of 1024 logits, 64 records
in falling order, then f32 max and f32 sum of exp(x - max); stage 1 merges them into out: 64
records, max, log-sum-exp. Equal logits: the lower id first; NaN comes after every number and counts
neither for max nor for the sum; where there are fewer than 64, the rest are {0xffffffff, -inf}. v
is at most 2^21.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kernels.contract import Bind, Contract, Groups, Variant, ceil_div
from kernels.text import SUBGROUPS, Buffers, Push, view, wide_variants

TOP = 64
BLOCK = 1024
RECORD_WORDS = 2 * TOP + 2
NONE = 0xFFFFFFFF
_SHARED = (2048 + 6 * 32) * 4
_BASE = Variant("base", (32, 1, 1), shared=_SHARED)


def part_nbytes(v: int) -> int:
    """Bytes of the buffer between the stages."""
    return ceil_div(v, BLOCK) * RECORD_WORDS * 4


def groups(push: Push, variant: Variant) -> Groups:
    return (1 if push["stage"] else ceil_div(push["v"], BLOCK), 1, 1)


def best(ids: npt.NDArray[np.uint32], values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint32]:
    """The words of the TOP best records."""
    numbers = ~np.isnan(values)
    if np.count_nonzero(numbers) > TOP:  # only these can be among them, with all that are equal
        numbers[numbers] = values[numbers] >= -np.partition(-values[numbers], TOP - 1)[TOP - 1]
        ids, values = ids[numbers], values[numbers]
        numbers = np.ones(len(values), bool)
    order = np.lexsort((ids, -np.where(numbers, values, 0), ~numbers))[:TOP]
    records = np.empty((TOP, 2), np.uint32)
    records[:, 0] = NONE
    records[:, 1] = np.float32(-np.inf).view(np.uint32)
    records[: len(order), 0] = ids[order]
    records[: len(order), 1] = values[order].view(np.uint32)
    return records.reshape(-1)


def total(values: npt.NDArray[np.float32]) -> tuple[float, float]:
    """The greatest number and the sum of exp(x - greatest), NaN left out; -inf and 0 of nothing."""
    x = values[~np.isnan(values)].astype(np.float64)
    if not len(x):
        return -np.inf, 0.0
    top = x.max()
    with np.errstate(invalid="ignore"):  # inf - inf, which np.where leaves out
        return float(top), float(np.where(x == top, 1.0, np.exp(x - top)).sum())


def reference(params: npt.NDArray[np.uint32], buffers: Buffers, push: Push) -> None:
    v = int(push["v"])
    blocks = ceil_div(v, BLOCK)
    part = view(buffers["part"], np.uint32)[: blocks * RECORD_WORDS].reshape(blocks, RECORD_WORDS)
    if push["stage"] == 0:
        logits = view(buffers["logits"], np.float32)[:v]
        ids = np.arange(v, dtype=np.uint32) + np.uint32(push.get("first", 0))  # of a piece
        for b in range(blocks):
            span = slice(b * BLOCK, (b + 1) * BLOCK)
            part[b, : 2 * TOP] = best(ids[span], logits[span])
            part[b, 2 * TOP :] = np.array(total(logits[span]), np.float32).view(np.uint32)
        return
    records = part[:, : 2 * TOP].reshape(-1, 2)
    records = records[records[:, 0] != NONE]
    sums = np.ascontiguousarray(part[:, 2 * TOP :]).view(np.float32).astype(np.float64)
    top = sums[:, 0].max()
    with np.errstate(divide="ignore", invalid="ignore"):
        weight = np.where(sums[:, 0] == top, 1.0, np.exp(sums[:, 0] - top))
        lse = top + np.log((weight * sums[:, 1]).sum())
    out = view(buffers["out"], np.uint32)
    values = np.ascontiguousarray(records[:, 1]).view(np.float32)
    out[: 2 * TOP] = best(np.ascontiguousarray(records[:, 0]), values)
    out[2 * TOP : RECORD_WORDS] = np.array([top, lse], np.float32).view(np.uint32)


OP = Contract(
    name="topk",
    bindings=(Bind("logits", "r"), Bind("part", "rw"), Bind("out", "w")),
    push=(("v", "u32"), ("stage", "u32")),
    variants=(
        _BASE,
        Variant("sub", (32, 1, 1), {"WIDE_SUBGROUP": "1"}, SUBGROUPS, _SHARED, baseline=False),
        *wide_variants(_BASE, 256, (256 + 16 + 3 * TOP + 256 + 16) * 4)[1:],
    ),
    groups=groups,
    reference=reference,
)
