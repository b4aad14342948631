# SPDX-License-Identifier: Apache-2.0
"""Q, K and V in one matrix product with its biases and norms, their rotation and the store to the
cache in one operation.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from engine.graph import Attr, Graph, Node, Weight, changed

_ON_THE_WAY = ("rope", "head_norm", "bias")  # from attention back to the product


@dataclass(frozen=True)
class _Way:
    """What makes one input of an attention: a product, and what follows it."""

    linear: Node
    steps: Mapping[str, Node]

    @property
    def nodes(self) -> tuple[Node, ...]:
        return (self.linear, *self.steps.values())


def _way(value: str, made: Mapping[str, Node]) -> _Way | None:
    steps: dict[str, Node] = {}
    node = made.get(value)
    for op in _ON_THE_WAY:
        if node is not None and node.op == op:
            steps[op] = node
            node = made.get(node.inputs[0])
    if node is None or node.op != "linear" or len(node.inputs) != 1:
        return None
    return _Way(node, steps)


def fuse_qkv(graph: Graph) -> Graph:
    """linear x3 [, bias x3] [, head_norm x2], rope x2, attention -> linear [, bias] [, qk_norm],
    rope_kv, attend, where the three products read the same value.
    """
    made, users = graph.producers(), graph.users()
    weights: dict[str, Weight] = dict(graph.weights)
    gone: set[str] = set()
    replaced: dict[str, list[Node]] = {}
    for node in graph.nodes:
        ways = [_way(v, made) for v in node.inputs] if node.op == "attention" else []
        q, k, v = (*ways, None, None, None)[:3]
        if q is None or k is None or v is None or not _alike(q, k, v):
            continue
        old = [n for way in (q, k, v) for n in way.nodes]
        if any(len(users[n.output]) != 1 for n in old):
            continue
        gone |= {n.name for n in old}
        replaced[node.name] = _fused(node, (q, k, v), weights)
    nodes: list[Node] = []
    for node in graph.nodes:
        if node.name not in gone:
            nodes.extend(replaced.get(node.name, (node,)))
    before = len(gone) + len(replaced)
    after = sum(map(len, replaced.values()))
    note = f"{len(replaced)} attentions: {before} operations to {after}"
    return changed(graph, "fuse_qkv", note, nodes, weights=weights)


def _alike(q: _Way, k: _Way, v: _Way) -> bool:
    """Whether the three can be one: of the same input, the same steps, rotated alike."""
    if len({(way.linear.inputs, way.linear.int("k")) for way in (q, k, v)}) != 1:
        return False
    if set(q.steps) != set(k.steps) or "rope" not in q.steps:
        return False
    if set(v.steps) != set(q.steps) - {"rope", "head_norm"}:
        return False
    for op in set(q.steps) - {"bias"}:
        a, b = (dict(way.steps[op].attrs) for way in (q, k))
        if {**a, "heads": 0} != {**b, "heads": 0}:
            return False
    return True


def _fused(node: Node, ways: tuple[_Way, _Way, _Way], weights: dict[str, Weight]) -> list[Node]:
    """The nodes that take the place of an attention and all that leads to it; adds their joined
    vectors to the weights.
    """
    q, base, sizes = ways[0], node.name.rpartition(".")[0], dict(node.attrs)
    linears = [way.linear for way in ways]
    n = sum(n.int("n") for n in linears)
    attrs: dict[str, Attr] = {"n": n, "k": q.linear.int("k")}
    products = tuple(w for n in linears for w in n.weights)
    qkv = f"{base}.qkv"
    nodes = [Node(qkv, "linear", q.linear.inputs, qkv, products, attrs)]

    def follows(op: str, name: str, attrs: Mapping[str, Attr], names: tuple[str, ...]) -> None:
        name = f"{base}.{name}"
        nodes.append(Node(name, op, (nodes[-1].output,), name, names, attrs))

    if "bias" in q.steps:
        vector = _joined(f"{base}.qkv_bias", [way.steps["bias"] for way in ways], weights)
        follows("bias", "qkv_biased", {"n": n}, (vector,))
    shape = {name: sizes[name] for name in ("heads", "kv_heads", "dim")}
    if "head_norm" in q.steps:
        norm = q.steps["head_norm"]
        both = [way.steps["head_norm"] for way in ways[:2]]
        vector = _joined(f"{base}.qk_norm", both, weights)
        how = {"eps": norm.attrs["eps"], "whole": norm.attrs["whole"]}
        follows("qk_norm", "qkv_normed", {**shape, **how}, (vector,))
    rope = q.steps["rope"]
    turn = {k: v for k, v in rope.attrs.items() if k in ("rope_dims", "neox", "short_context")}
    turn = {**shape, "layer": sizes["layer"], **turn}
    follows("rope_kv", "qkv_rope", turn, rope.weights)
    nodes.append(Node(node.name, "attend", (nodes[-1].output,), node.output, (), sizes))
    return nodes


def _joined(name: str, nodes: list[Node], weights: dict[str, Weight]) -> str:
    """One vector of the nodes' vectors, one behind the other."""
    vectors = [weights[w] for n in nodes for w in n.weights]
    parts = tuple(part for w in vectors for part in w.parts)
    shape = (1, sum(w.shape[1] for w in vectors))
    weights[name] = Weight(name, shape, vectors[0].source, parts, "f32")
    return name
