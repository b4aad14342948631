# SPDX-License-Identifier: Apache-2.0
"""Passes: functions Graph -> Graph, one a file, each with a line in the graph's log. PASSES is
their order.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from engine.cost import cost
from engine.graph import Graph, Pass
from engine.passes.fold_rope import fold_rope
from engine.passes.fuse_add import fuse_add
from engine.passes.fuse_ffn import fuse_ffn
from engine.passes.fuse_qkv import fuse_qkv
from engine.passes.last_row import last_row
from engine.passes.move_in import glu_into_matvec, norm_into_matvec, rope_into_attention
from engine.passes.pack import join, pack

PASSES: tuple[Pass, ...] = (
    fold_rope,
    fuse_qkv,
    fuse_ffn,
    fuse_add,
    last_row,
    norm_into_matvec,
    glu_into_matvec,
    rope_into_attention,
    pack,
    join,
)


# What models run without, too.
OPTIONAL: Mapping[str, Pass] = {
    p.__name__: p for p in (norm_into_matvec, glu_into_matvec, rope_into_attention, join)
}


def optimise(graph: Graph, without: Collection[str] = ()) -> Graph:
    """All passes, in order, but for those of OPTIONAL that are named; the result is what `lower`
    takes.
    """
    before = cost(graph)
    for run in PASSES:
        if run.__name__ in without and run.__name__ in OPTIONAL:
            continue
        graph = run(graph).check()
        after = cost(graph)
        pairs: dict[str, Any] = {
            name: (getattr(before, name), getattr(after, name))
            for name in ("launches", "bindings", "nbytes")
        }
        graph = replace(graph, log=(*graph.log[:-1], replace(graph.log[-1], **pairs)))
        before = after
    return graph
