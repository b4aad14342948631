# SPDX-License-Identifier: Apache-2.0
"""Norms and gates inside the products that read them, rotations inside their attention, for one
token: a launch less for each.
"""

from __future__ import annotations

from dataclasses import replace

from engine.graph import Graph, Node, changed


def norm_into_matvec(graph: Graph) -> Graph:
    """Marks each norm that products alone read with `inside`."""
    return _marked(graph, "norm_into_matvec", "rms_norm", "norms")


def glu_into_matvec(graph: Graph) -> Graph:
    """Marks each gated unit that products alone read with `inside`."""
    return _marked(graph, "glu_into_matvec", "swiglu", "gated units")


def rope_into_attention(graph: Graph) -> Graph:
    """Marks each rotation that an attention alone reads, and that attention's products alone, with
    `inside`.
    """
    users = graph.users()
    nodes = list(graph.nodes)
    count = 0
    for i, node in enumerate(graph.nodes):
        readers = users.get(node.output, [])
        if node.op != "rope_kv" or readers != nodes[i + 1 : i + 2] or readers[0].op != "attend":
            continue
        products = users.get(readers[0].output, [])
        if products and all(_multiplies(n, readers[0]) for n in products):
            nodes[i] = replace(node, attrs={**node.attrs, "inside": True})
            count += 1
    note = f"{count} rotations inside their attention, for one token"
    return changed(graph, "rope_into_attention", note, nodes)


def _marked(graph: Graph, name: str, op: str, what: str) -> Graph:
    users = graph.users()
    nodes = list(graph.nodes)
    count = 0
    for i, node in enumerate(graph.nodes):
        readers = users.get(node.output, [])
        # Right behind it: what it reads then lies there still when they read it.
        behind = readers and readers == nodes[i + 1 : i + 1 + len(readers)]
        if node.op == op and behind and _plain(node) and all(_multiplies(n, node) for n in readers):
            nodes[i] = replace(node, attrs={**node.attrs, "inside": True})
            count += 1
    note = f"{count} {what} inside their products, for one token"
    return changed(graph, name, note, nodes)


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
