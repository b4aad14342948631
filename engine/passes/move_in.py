# SPDX-License-Identifier: Apache-2.0
"""Norms and gates inside the products that read them, rotations inside their attention, for one
token: a launch less for each.
"""

from __future__ import annotations

from dataclasses import replace

from engine.graph import Graph, Node, changed


def norm_into_matvec(graph: Graph) -> Graph:
    """Marks each norm that products alone read with `inside`."""
    return _marked(graph, "norm_into_matvec", "rms_norm", "norms inside their products")


def glu_into_matvec(graph: Graph) -> Graph:
    """Marks each gated unit that products alone read with `inside`."""
    return _marked(graph, "glu_into_matvec", "swiglu", "gated units inside their products")


def rope_into_attention(graph: Graph) -> Graph:
    """Marks each rotation that an attention alone reads, and that attention's products alone, with
    `inside`.
    """
    return _marked(graph, "rope_into_attention", "rope_kv", "rotations inside their attention")


def movable(graph: Graph) -> set[str]:
    """What the nodes write that may be marked with `inside`."""
    users = graph.users()
    found = set()
    for i, node in enumerate(graph.nodes):
        readers = users.get(node.output, [])
        # Right behind it: what it reads then lies there still when they read it.
        if not readers or tuple(readers) != graph.nodes[i + 1 : i + 1 + len(readers)]:
            continue
        if node.op == "rope_kv":
            products = users.get(readers[0].output, [])
            alone = len(readers) == 1 and readers[0].op == "attend" and bool(products)
            inside = alone and all(_multiplies(n, readers[0]) for n in products)
        else:
            plain = node.op in ("rms_norm", "swiglu") and _plain(node)
            inside = plain and all(_multiplies(n, node) for n in readers)
        if inside:
            found.add(node.output)
    return found


def _marked(graph: Graph, name: str, op: str, what: str) -> Graph:
    chosen = movable(graph)
    nodes = [
        replace(node, attrs={**node.attrs, "inside": True})
        if node.op == op and node.output in chosen
        else node
        for node in graph.nodes
    ]
    count = sum(node is not old for node, old in zip(nodes, graph.nodes, strict=True))
    return changed(graph, name, f"{count} {what}, for one token", nodes)


def _plain(node: Node) -> bool:
    """One row a token, and no sum with another."""
    return len(node.inputs) == 1 and node.attrs.get("each", 1) == 1


def _multiplies(reader: Node, node: Node) -> bool:
    """A product of the node's value that is not written over what the node reads."""
    return (
        reader.op == "linear"
        and reader.inputs[0] == node.output
        and not {node.output, node.inputs[0]} & set(reader.inputs[1:])
    )
