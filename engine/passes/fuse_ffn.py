# SPDX-License-Identifier: Apache-2.0
"""Gate and up in one matrix product, SiLU and the product of both in one operation."""

from __future__ import annotations

from engine.graph import Graph, Node, changed


def fuse_ffn(graph: Graph) -> Graph:
    """mul(silu(linear), linear) -> swiglu(linear), where both linears read the same value."""
    made = graph.producers()
    users = graph.users()
    gone: set[str] = set()
    replaced: dict[str, tuple[Node, Node]] = {}
    for node in graph.nodes:
        if node.op != "mul":
            continue
        silu, up = (made.get(v) for v in node.inputs)
        if silu is None or up is None or silu.op != "silu" or up.op != "linear":
            continue
        gate = made.get(silu.inputs[0])
        if (
            gate is None
            or gate.op != "linear"
            or gate.inputs != up.inputs
            or len(gate.inputs) != 1
            or (gate.int("n"), gate.int("k")) != (up.int("n"), up.int("k"))
            or any(len(users[n.output]) != 1 for n in (silu, up, gate))
        ):
            continue
        base = node.name.rpartition(".")[0]
        f = gate.int("n")
        both = Node(
            f"{base}.gate_up",
            "linear",
            gate.inputs,
            f"{base}.gate_up",
            (*gate.weights, *up.weights),
            {"n": 2 * f, "k": gate.int("k")},
        )
        glu = Node(node.name, "swiglu", (both.output,), node.output, (), {"f": f})
        gone |= {silu.name, up.name, gate.name}
        replaced[node.name] = (both, glu)
    nodes: list[Node] = []
    for node in graph.nodes:
        if node.name not in gone:
            nodes.extend(replaced.get(node.name, (node,)))
    note = f"{len(replaced)} feed-forward parts: 4 operations to 2"
    return changed(graph, "fuse_ffn", note, nodes)
