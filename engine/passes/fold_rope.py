# SPDX-License-Identifier: Apache-2.0
"""Constant folding of the rotary positions: cos and sin of every position become tables that all
layers share.
"""

from __future__ import annotations

from dataclasses import replace

from engine.graph import Graph, Weight, changed


def fold_rope(graph: Graph) -> Graph:
    """Gives each `rope` node its table [context, rope_dims] of (cos, sin) pairs as its weight, and
    a second one where long contexts have their own.
    """
    weights = dict(graph.weights)
    nodes, count = [], 0
    tables: set[str] = set()
    for node in graph.nodes:
        if node.op == "rope":
            names = [str(node.attrs[key]) for key in ("table", "long_table") if key in node.attrs]
            shape = (int(graph.attrs["context"]), node.int("rope_dims"))
            weights |= {name: Weight(name, shape, "computed", (), "f32") for name in names}
            node = replace(node, weights=tuple(names))
            count, tables = count + 1, tables | set(names)
        nodes.append(node)
    if not count:
        return changed(graph, "fold_rope", "no rotary positions", nodes)
    one = "one table" if len(tables) == 1 else f"{len(tables)} tables"
    note = f"{count} rotations read {one} of {graph.attrs['context']} positions"
    return changed(graph, "fold_rope", note, nodes, weights=weights)
