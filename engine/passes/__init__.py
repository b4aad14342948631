# SPDX-License-Identifier: Apache-2.0
"""Passes: functions Graph -> Graph, one a file, each with a line in the graph's log. PASSES is
their order.
"""

from __future__ import annotations

from engine.graph import Graph, Pass
from engine.passes.fold_rope import fold_rope
from engine.passes.fuse_add import fuse_add
from engine.passes.fuse_ffn import fuse_ffn
from engine.passes.fuse_qkv import fuse_qkv
from engine.passes.last_row import last_row
from engine.passes.move_in import glu_into_matvec, norm_into_matvec
from engine.passes.pack import pack

PASSES: tuple[Pass, ...] = (
    fold_rope,
    fuse_qkv,
    fuse_ffn,
    fuse_add,
    last_row,
    norm_into_matvec,
    glu_into_matvec,
    pack,
)


def optimise(graph: Graph) -> Graph:
    """All passes, in order; the result is what `lower` takes."""
    for run in PASSES:
        graph = run(graph).check()
    return graph
