# SPDX-License-Identifier: Apache-2.0
"""attention_prefill: attention_decode for n_tokens tokens; token t stands at position pos0 + t.

The caches already hold the tokens' own keys and values (rope_kv comes first).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kernels.attention_decode.op import MAX_DIM, attend
from kernels.attention_decode.op import OP as DECODE
from kernels.contract import N_TOKENS, POS0, Contract, Groups, Variant
from kernels.text import Buffers, Push, most_groups, spread


def groups(push: Push, variant: Variant) -> Groups:
    return (push["heads"], *spread(push["tokens"], most_groups(push)[1]))


def reference(params: npt.NDArray[np.uint32], buffers: Buffers, push: Push) -> None:
    attend(buffers, push, int(params[N_TOKENS]), int(params[POS0]))


OP = Contract(
    name="attention_prefill",
    bindings=DECODE.bindings,
    push=DECODE.push,
    variants=(Variant("base", (32, 1, 1), shared=(2 * MAX_DIM + 2 * 32) * 4),),
    groups=groups,
    reference=reference,
)
