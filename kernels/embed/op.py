# SPDX-License-Identifier: Apache-2.0
"""embed: rows of a packed table, looked up by token id, times a factor.

out[t, :] = scale * table[ids[t] - row0, :] for t < n_tokens where row0 <= ids[t] < row0 + rows;
other rows of out stay as they are, so that a table cut into shards (each with its row0) is read by
a call for each. row0 is a multiple of 16.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kernels import weights
from kernels.contract import N_TOKENS, Bind, Contract, Groups, Variant
from kernels.text import FORMAT_NAMES, Buffers, Push, format_variants, rows_and_tokens, view


def groups(push: Push, variant: Variant) -> Groups:
    return rows_and_tokens(push["k"] // 4, variant.workgroup[0], push)


def reference(params: npt.NDArray[np.uint32], buffers: Buffers, push: Push) -> None:
    k, row0, rows = int(push["k"]), int(push["row0"]), int(push["rows"])
    table = weights.unpack(FORMAT_NAMES[push["fmt"]], buffers["table"], rows, k)
    ids = view(buffers["ids"], np.uint32)
    out = view(buffers["out"], np.float32)
    for t in range(int(params[N_TOKENS])):
        row = int(ids[t]) - row0
        if 0 <= row < rows:
            out[t * k : (t + 1) * k] = push["scale"] * table[row]


OP = Contract(
    name="embed",
    bindings=(Bind("ids", "r"), Bind("table", "r"), Bind("out", "w")),
    push=(("fmt", "u32"), ("k", "u32"), ("row0", "u32"), ("rows", "u32"), ("scale", "f32")),
    variants=format_variants(32),
    groups=groups,
    reference=reference,
)
