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

# As attention_flash.glsl and attention_coopmat.glsl have them.
PART, ROWS = 128, {"WIDE": 64, "COOPMAT": 32}
_MATRICES = frozenset({"coopmat", "fp16", "memory_model", "subgroup_basic"})


def groups(push: Push, variant: Variant) -> Groups:
    heads, kv_heads, tokens = push["heads"], push["kv_heads"], push["tokens"]
    rows = next((n for name, n in ROWS.items() if name in variant.defines), 0)
    if not rows:
        return (heads, *spread(tokens, most_groups(push)[1]))
    blocks = ceil_div(tokens * (heads // kv_heads), rows)
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
    matrices = Variant(
        f"{fmt}_coopmat",
        (128, 1, 1),
        {**kv.DEFINES[fmt], "COOPMAT": "1"},
        _MATRICES,
        shared=(32 * 66 + 64 * 18 + 32 * 18) * 8 + (32 * 68 + 4 * 32 + 32) * 4,
        baseline=False,
    )
    return (base, wide, matrices, kv.addressed(base), kv.addressed(wide))


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
