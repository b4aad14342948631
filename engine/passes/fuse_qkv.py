# SPDX-License-Identifier: Apache-2.0
"""Q, K and V in one matrix product, their rotation and the store to the cache in one operation."""

from __future__ import annotations

from engine.graph import Graph, Node, changed


def fuse_qkv(graph: Graph) -> Graph:
    """linear x3, rope x2, attention -> linear, rope_kv, attend, where the three read the same
    value.
    """
    made = graph.producers()
    users = graph.users()
    gone: set[str] = set()
    replaced: dict[str, tuple[Node, Node, Node]] = {}
    for node in graph.nodes:
        if node.op != "attention":
            continue
        turned = [made.get(v) for v in node.inputs[:2]]
        if any(t is None or t.op != "rope" for t in turned):
            continue
        ropes = [t for t in turned if t is not None]
        linears = [made[ropes[0].inputs[0]], made[ropes[1].inputs[0]], made[node.inputs[2]]]
        old = [*linears, *ropes]
        if (
            any(n.op != "linear" or len(n.inputs) != 1 for n in linears)
            or len({n.inputs for n in linears}) != 1
            or len({n.int("k") for n in linears}) != 1
            or any(len(users[n.output]) != 1 for n in old)
        ):
            continue
        base = node.name.rpartition(".")[0]
        weights = tuple(w for n in linears for w in n.weights)
        rows = sum(n.int("n") for n in linears)
        attrs = {"n": rows, "k": linears[0].int("k")}
        qkv = Node(f"{base}.qkv", "linear", linears[0].inputs, f"{base}.qkv", weights, attrs)
        sizes = dict(node.attrs)
        turn = {**sizes, "rope_dims": ropes[0].int("rope_dims"), "neox": ropes[0].attrs["neox"]}
        turned_name = f"{base}.qkv_rope"
        rope = Node(turned_name, "rope_kv", (qkv.output,), turned_name, ropes[0].weights, turn)
        attend = Node(node.name, "attend", (rope.output,), node.output, (), sizes)
        gone |= {n.name for n in old}
        replaced[node.name] = (qkv, rope, attend)
    nodes: list[Node] = []
    for node in graph.nodes:
        if node.name not in gone:
            nodes.extend(replaced.get(node.name, (node,)))
    note = f"{len(replaced)} attentions: 6 operations to 3"
    return changed(graph, "fuse_qkv", note, nodes)
