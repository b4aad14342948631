# SPDX-License-Identifier: Apache-2.0
"""attention_step: rope_kv and attention_decode of one token in one: Q and K are rotated on the way,
K and V go to position pos0 of the caches, and the attention takes the place of Q in qkv. K and V in
qkv stay as they were.

For one token on a large GPU, where a launch costs as much as its work. f16 caches alone; dim and
rope_dims are multiples of 8, dim at most 128.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kernels.attention_decode import op as decode
from kernels.contract import POS0, Bind, Contract, Groups, Variant, ceil_div
from kernels.rope_kv import op as rope
from kernels.text import Buffers, Push, view

MAX_DIM, MULTIPLE = 128, 8
_QUADS, _MOST_GROUPS = MAX_DIM // 4, 4096
_NEEDS = frozenset({"subgroup_basic", "subgroup_shuffle", "device_scope"})


def fits(dim: int, rope_dims: int) -> bool:
    """Whether heads of this size can be had."""
    return dim <= MAX_DIM and dim % MULTIPLE == 0 and rope_dims % MULTIPLE == 0


def _fast(
    name: str, invocations: int, together: int, at_once: int, splits: int, span: int
) -> Variant:
    """`together` query heads a workgroup, `at_once` positions of eight invocations; at most
    `splits` workgroups for as many `span`s of positions.
    """
    defines = {"TOGETHER": f"{together}u", "AT_ONCE": f"{at_once}u"}
    defines |= {"SPLITS": f"{splits}u", "LEAST_SPAN": f"{span}u"}
    shared = 16 * ((together + 2) * _QUADS + invocations // 8 * (_QUADS + 1)) + 4

    def records_nbytes(push: Push) -> int:
        return 4 * _MOST_GROUPS + int(push["heads"]) * splits * (4 + int(push["dim"])) * 4

    return Variant(
        name,
        (invocations, 1, 1),
        defines,
        _NEEDS,
        shared,
        baseline=False,
        scratch=records_nbytes,
    )


def groups(push: Push, variant: Variant) -> Groups:
    if variant.scratch is None:
        return (push["heads"], 1, 1)
    together, splits = (int(variant.defines[k].rstrip("u")) for k in ("TOGETHER", "SPLITS"))
    return (push["kv_heads"] * ceil_div(push["heads"] // push["kv_heads"], together), splits, 1)


def reference(params: npt.NDArray[np.uint32], buffers: Buffers, push: Push) -> None:
    heads, kv_heads, dim = (int(push[name]) for name in ("heads", "kv_heads", "dim"))
    own = view(buffers["qkv"], np.float32)
    qkv, out = own[: (heads + 2 * kv_heads) * dim].copy(), np.empty(heads * dim, np.float32)
    rope.reference(np.array([1, *params[1:]], np.uint32), {**buffers, "qkv": qkv}, push)
    decode.attend({**buffers, "qkv": qkv, "out": out}, push, 1, int(params[POS0]))
    own[: heads * dim] = out


OP = Contract(
    name="attention_step",
    bindings=(Bind("qkv", "rw"), Bind("table", "r"), Bind("kc", "rw"), Bind("vc", "rw")),
    push=(*decode.OP.push, ("rope_dims", "u32"), ("neox", "u32")),
    variants=(
        Variant("f16", (32, 1, 1), shared=(2 * _QUADS * 4 + 2 * 32) * 4),
        _fast("f16_alone", 256, 1, 2, 16, 256),
        _fast("f16_pair", 256, 2, 1, 32, 128),
        _fast("f16_group", 128, 4, 1, 32, 128),
    ),
    groups=groups,
    reference=reference,
)
