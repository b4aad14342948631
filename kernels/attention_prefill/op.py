# SPDX-License-Identifier: Apache-2.0
"""attention_prefill: attention_decode for n_tokens tokens; token t stands at position pos0 + t.

The caches already hold the tokens' own keys and values (rope_kv comes first).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kernels import kv
from kernels.attention_decode.op import BASE_SHARED, attend
from kernels.attention_decode.op import OP as DECODE
from kernels.contract import N_TOKENS, POS0, Contract, Groups, Variant, ceil_div
from kernels.text import Buffers, Push, most_groups, spread

# As attention_flash.glsl has them.
ROWS, PART = 64, 128


def groups(push: Push, variant: Variant) -> Groups:
    heads, kv_heads, tokens = push["heads"], push["kv_heads"], push["tokens"]
    if "WIDE" not in variant.defines:
        return (heads, *spread(tokens, most_groups(push)[1]))
    blocks = ceil_div(tokens * (heads // kv_heads), ROWS)
    return (kv_heads * ceil_div(push["dim"], PART), *spread(blocks, most_groups(push)[1]))


def variants(fmt: str) -> tuple[Variant, ...]:
    """All for one form of the caches."""
    base = Variant(fmt, (32, 1, 1), kv.DEFINES[fmt], shared=BASE_SHARED)
    wide = Variant(
        f"{fmt}_wide",
        (256, 1, 1),
        {**kv.DEFINES[fmt], "WIDE": "1"},
        shared=(2 * 16 * 17 + 64 * 17 + 64 + 16) * 16,
        baseline=False,
    )
    return (base, wide, kv.addressed(base), kv.addressed(wide))


def reference(params: npt.NDArray[np.uint32], buffers: Buffers, push: Push) -> None:
    attend(buffers, push, int(params[N_TOKENS]), int(params[POS0]))


OP = Contract(
    name="attention_prefill",
    bindings=DECODE.bindings,
    push=DECODE.push,
    variants=(*variants("f16"), *variants("q8")),
    groups=groups,
    reference=reference,
)
