# SPDX-License-Identifier: Apache-2.0
"""matvec: y[y0 + i] (+)= sum over k of W[i, k] x[k], for i < n; accumulate = 1 adds to what y
holds.

W is packed (docs/architecture.md, "Weights"). The CPU rounds x to int8 with a scale per 32 for q8
and q4 (kernels/include/weights.h), and so does the GLSL of `int_dot`; `fp16` rounds it to halves
with a scale per 32 and adds eight products at a time in halves; all others work in float32.
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from kernels import weights
from kernels.contract import Bind, Contract, Groups, Variant, ceil_div
from kernels.text import (
    FORMAT_NAMES,
    Buffers,
    Push,
    format_variants,
    most_groups,
    packed_variants,
    spread,
    view,
    wide_variants,
)

_SHUFFLES = frozenset({"subgroup_basic", "subgroup_shuffle"})
_SUMS = 256 * 16  # bytes of shared memory
_CHUNK = 256  # blocks of x in shared memory
# matvec_direct.glsl: invocations and blocks asked for early, by format; blocks of x.
_DIRECT = {
    "q4": ((512, 1, 512), (256, 2, 512), (128, 3, 512), (64, 3, 256), (32, 3, 128)),
    "q8": ((512, 1, 512), (256, 2, 512), (128, 2, 512), (64, 2, 256), (32, 2, 128)),
}
# Invocations of them that a large GPU runs at the same time.
_DIRECT_MOST = 132 * 1024
# Workgroups that a large GPU runs at the same time; what is more may share rounded activations.
_ENOUGH, _MOST_TILES = 640, 4


PUSH: tuple[tuple[str, Literal["u32", "f32"]], ...] = (
    ("fmt", "u32"),
    ("n", "u32"),
    ("k", "u32"),
    ("accumulate", "u32"),
    ("y0", "u32"),
)


def variants(more: int = 0) -> tuple[Variant, ...]:
    """Of each format. `more`: bytes of shared memory an invocation beyond its four sums."""
    out: list[Variant] = []
    for base in format_variants(32, shared=32 * (16 + more)):
        sums = _SUMS + 256 * more
        out += wide_variants(base, 256, sums, _SHUFFLES)
        out += packed_variants(base, 256, sums + 8 * _CHUNK, 32 * _CHUNK, _SHUFFLES)
        out += [_direct(base.name, *how, more) for how in _DIRECT.get(base.name, ())]
    return tuple(out)


def _direct(fmt: str, invocations: int, ahead: int, chunk: int, more: int) -> Variant:
    defines = {f"FMT_{fmt.upper()}": "1", "PACKED_INT8": "1", "DIRECT": str(ahead)}
    defines["DIRECT_CHUNK"] = f"{chunk}u"
    shared = 2 * (16 + more) * invocations + 40 * chunk
    # Nothing here is by halves, but who has them is large enough: a small GPU's compiler may not
    # come back from these (AXE-1-16M's does not).
    needs = _SHUFFLES | {"int_dot", "fp16"}
    name = f"{fmt}_direct_{invocations}"
    return Variant(name, (invocations, 1, 1), defines, needs, shared, baseline=False)


def groups(push: Push, variant: Variant) -> Groups:
    count = ceil_div(push["n"], weights.ROWS)
    if "DIRECT" in variant.defines:
        most = _DIRECT_MOST // variant.workgroup[0]
        count = ceil_div(count, max(1, count // (2 * most)))
    elif variant.rounds and count > _ENOUGH:  # several tiles a workgroup
        count = ceil_div(count, min(count // _ENOUGH, _MOST_TILES))
    return (*spread(count, most_groups(push)[0]), 1)


def multiply(x: npt.NDArray[Any], buffers: Buffers, push: Push) -> None:
    """y (+)= W x, for x of whatever form."""
    n, k, y0 = int(push["n"]), int(push["k"]), int(push["y0"])
    w = weights.unpack(FORMAT_NAMES[push["fmt"]], buffers["w"], n, k)
    y = view(buffers["y"], np.float32)[y0 : y0 + n]
    product = w.astype(np.float64) @ x.astype(np.float64)
    y[:] = product + y if push["accumulate"] else product


def reference(params: npt.NDArray[np.uint32], buffers: Buffers, push: Push) -> None:
    multiply(view(buffers["x"], np.float32)[: int(push["k"])], buffers, push)


OP = Contract(
    name="matvec",
    bindings=(Bind("w", "r"), Bind("x", "r"), Bind("y", "rw")),
    push=PUSH,
    variants=variants(),
    groups=groups,
    reference=reference,
)
