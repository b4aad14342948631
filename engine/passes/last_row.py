# SPDX-License-Identifier: Apache-2.0
"""Only the last token of a prompt needs logits: the head runs for one row."""

from __future__ import annotations

from dataclasses import replace

from engine.graph import Graph, changed


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
    return changed(graph, "last_row", f"{len(heads)} head runs for one row of the prompt", nodes)
