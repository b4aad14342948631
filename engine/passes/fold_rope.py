# SPDX-License-Identifier: Apache-2.0
"""Constant folding of the rotary positions: cos and sin of every position become a table, one for
all layers.
"""

from __future__ import annotations

from dataclasses import replace

from engine.graph import Graph, Weight, changed

TABLE = "rope"


def fold_rope(graph: Graph) -> Graph:
    """Gives each `rope` node the table [context, rope_dims] of (cos, sin) pairs as its weight."""
    nodes = [replace(n, weights=(TABLE,)) if n.op == "rope" else n for n in graph.nodes]
    count = sum(n.op == "rope" for n in nodes)
    if not count:
        return changed(graph, "fold_rope", "no rotary positions", nodes)
    shape = (int(graph.attrs["context"]), int(graph.attrs["rope_dims"]))
    weights = {**graph.weights, TABLE: Weight(TABLE, shape, "computed", (), "f32")}
    note = f"{count} rotations read one table of {shape[0]} positions"
    return changed(graph, "fold_rope", note, nodes, weights=weights)
