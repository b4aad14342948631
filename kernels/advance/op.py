# SPDX-License-Identifier: Apache-2.0
"""advance: between two greedy tokens of a slice: the record of topk is kept in its place, its best
id becomes the next token's, and the parameter words speak of the next token.

`next` is the parameter buffer, as storage: its word 1, pos0, goes up by one, as does word 3, the
number of the token in the slice; record number i lies in `records`, a ring of MOST, at i * STRIDE
words. The host sets words 0 to 3 before the slice.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kernels.contract import POS0, Bind, Contract, Groups, Variant
from kernels.text import Buffers, Push, view
from kernels.topk.op import RECORD_WORDS

STEP = 3  # the parameter word
STRIDE = 192  # words from one record to the next
MOST = 16


def groups(push: Push, variant: Variant) -> Groups:
    return (1, 1, 1)


def reference(params: npt.NDArray[np.uint32], buffers: Buffers, push: Push) -> None:
    record = view(buffers["record"], np.uint32)[:RECORD_WORDS]
    words = view(buffers["next"], np.uint32)
    at = STRIDE * (int(words[STEP]) % MOST)
    view(buffers["records"], np.uint32)[at : at + RECORD_WORDS] = record
    view(buffers["ids"], np.uint32)[0] = record[0]
    words[POS0] += 1
    words[STEP] += 1


OP = Contract(
    name="advance",
    bindings=(Bind("record", "r"), Bind("next", "rw"), Bind("ids", "w"), Bind("records", "w")),
    push=(),
    variants=(Variant("base", (32, 1, 1)),),
    groups=groups,
    reference=reference,
)
