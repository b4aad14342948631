# SPDX-License-Identifier: Apache-2.0
"""The residual sum inside the matrix product before it: the product is added to the stream where it
lies.
"""

from __future__ import annotations

from dataclasses import replace

from engine.graph import Graph, Node, changed


def fuse_add(graph: Graph) -> Graph:
    """add(x, linear(h)) -> linear(h, residual x), where nobody else reads the product nor, later,
    x.

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
        linear = made.get(product)
        if linear is None or linear.op != "linear" or len(linear.inputs) != 1:
            continue
        at = order[linear.name]
        earlier = all(order[u.name] < at for u in users[stream] if u is not node)
        if len(users[product]) != 1 or not earlier or stream == "ids":
            continue
        gone.add(linear.name)
        replaced[node.name] = replace(linear, inputs=(*linear.inputs, stream), output=node.output)
    nodes = [replaced.get(n.name, n) for n in graph.nodes if n.name not in gone]
    return changed(graph, "fuse_add", f"{len(replaced)} sums became part of a product", nodes)
