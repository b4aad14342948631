# SPDX-License-Identifier: Apache-2.0
"""Only the last token of a prompt needs logits: the head runs for one row, and so does all of the
last layer but its keys and values where lowering finds them (engine/tail.py).
"""

from __future__ import annotations

from dataclasses import replace

from engine.graph import Graph, changed
from engine.tail import last_layer


def last_row(graph: Graph) -> Graph:
    """Marks the norm of rms_norm -> linear [-> softcap] -> topk: it takes the last row alone."""
    users = graph.users()
    made = graph.producers()
    heads: set[str] = set()
    for node in graph.nodes:
        if node.op != "topk":
            continue
        linear = made[node.inputs[0]]
        if linear.op == "softcap":
            linear = made[linear.inputs[0]]
        norm = made.get(linear.inputs[0])
        if (
            norm
            and linear.op == "linear"
            and norm.op == "rms_norm"
            and len(users[norm.output]) == 1
        ):
            heads.add(norm.name)
    nodes = [
        replace(n, attrs={**n.attrs, "last": True}) if n.name in heads else n for n in graph.nodes
    ]
    more = ", last layer but K and V" if heads and last_layer(graph) else ""
    note = f"one row for {len(heads)} head{more}"
    return changed(graph, "last_row", note, nodes)
