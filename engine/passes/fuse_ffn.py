# SPDX-License-Identifier: Apache-2.0
"""Gate and up in one product, the activation and the product of both in one operation."""

from __future__ import annotations

from engine.graph import Attr, Graph, Node, changed

_ACTS = ("silu", "gelu")
_PRODUCTS = ("linear", "expert_linear")


def fuse_ffn(graph: Graph) -> Graph:
    """mul(silu(linear), linear) -> swiglu(linear), where both linears read the same values; the
    same with gelu, and with the products of experts.
    """
    made = graph.producers()
    users = graph.users()
    gone: set[str] = set()
    replaced: dict[str, tuple[Node, Node]] = {}
    for node in graph.nodes:
        if node.op != "mul":
            continue
        act, up = (made.get(v) for v in node.inputs)
        if act is None or up is None or act.op not in _ACTS or up.op not in _PRODUCTS:
            continue
        gate = made.get(act.inputs[0])
        if (
            gate is None
            or gate.op != up.op
            or gate.inputs != up.inputs
            or gate.attrs != up.attrs
            or (gate.op == "linear" and len(gate.inputs) != 1)
            or any(len(users[n.output]) != 1 for n in (act, up, gate))
        ):
            continue
        base = node.name.rpartition(".")[0]
        f = gate.int("n")
        name = f"{base}.gate_up"
        attrs: dict[str, Attr] = {**gate.attrs, "n": 2 * f}
        both = Node(name, gate.op, gate.inputs, name, (*gate.weights, *up.weights), attrs)
        each = gate.int("used") if gate.op == "expert_linear" else 1
        attrs = {"f": f, "act": act.op, "each": each}
        glu = Node(node.name, "swiglu", (both.output,), node.output, (), attrs)
        gone |= {act.name, up.name, gate.name}
        replaced[node.name] = (both, glu)
    nodes: list[Node] = []
    for node in graph.nodes:
        if node.name not in gone:
            nodes.extend(replaced.get(node.name, (node,)))
    note = f"{len(replaced)} feed-forward parts: 4 operations to 2"
    return changed(graph, "fuse_ffn", note, nodes)
