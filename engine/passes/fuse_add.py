# SPDX-License-Identifier: Apache-2.0
"""The residual sum inside the operation before it: its result is added to the stream where that
lies.
"""

from __future__ import annotations

from dataclasses import replace

from engine.graph import Graph, Node, changed

# Operations that can add to their output, and their inputs without it.
_INPUTS = {"linear": 1, "rms_norm": 1, "expert_sum": 2}


def fuse_add(graph: Graph) -> Graph:
    """add(x, linear(h)) -> linear(h, residual x), where nobody else reads the product nor, later,
    x; the same with a norm behind a block and with the sum of experts.

    The output takes the place of x in memory, so every other reader of x has to come before.
    """
    users = graph.users()
    made = graph.producers()
    order = {n.name: i for i, n in enumerate(graph.nodes)}
    gone: set[str] = set()
    replaced: dict[str, Node] = {}
    for node in graph.nodes:
        if node.op != "add":
            continue
        stream, product = node.inputs
        before = made.get(product)
        if before is None or len(before.inputs) != _INPUTS.get(before.op):
            continue
        at = order[before.name]
        earlier = all(order[u.name] < at for u in users[stream] if u is not node)
        if len(users[product]) != 1 or not earlier or stream == "ids":
            continue
        gone.add(before.name)
        replaced[node.name] = replace(before, inputs=(*before.inputs, stream), output=node.output)
    nodes = [replaced.get(n.name, n) for n in graph.nodes if n.name not in gone]
    return changed(graph, "fuse_add", f"{len(replaced)} sums became part of what they add", nodes)
