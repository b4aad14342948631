# SPDX-License-Identifier: Apache-2.0
"""The Graph: what a model computes, the same for every device.

Values are named and written once; a weight is a matrix or vector that stays in its source file
until it is packed. Passes (engine/passes) turn a Graph into a Graph and note what they changed.

Operations (inputs -> output; weights; attributes):

    lookup     ids -> x [T, K]; table; k, scale
    rms_norm   x [, residual] -> y; vector; k, eps, last (true: only the last row of a prompt)
               [, inside: the products that read it may compute it, for one token]
    linear     x [, residual] -> y [T, n]; one or more matrices whose rows follow each other; n, k
    bias       x -> y; vector; n
    head_norm  x -> y; vector; heads, dim, eps, whole (true: all heads together)
    rope       x -> y; [table, and one for long contexts]; heads, dim, rope_dims, neox, table
               [, long_table, short_context: the first is for sessions of no more tokens]
    attention  q, k, v -> a; heads, kv_heads, dim, layer, scale, window, softcap
    qk_norm    qkv -> qkv'; vector (Q's, then K's); heads, kv_heads, dim, eps, whole
    rope_kv    qkv -> qkv'; table; heads, kv_heads, dim, rope_dims, neox, layer; stores K and V
    attend     qkv' -> a; heads, kv_heads, dim, layer, scale, window, softcap
    silu, gelu, mul, add, swiglu (gate then up -> h; f, act, each [, inside])
    route      logits -> experts and shares; experts, used, norm (true: shares of those used)
    expert_linear  x, route -> y [T, used, n]; one or two stacks of matrices; n, k, experts, used
    expert_sum     x [T, used, k], route [, residual] -> y [T, n]; a stack; n, k, experts, used
    row_gate   x, g [T, 1] -> x sigmoid(g); n
    softcap    logits -> logits'; v, cap
    topk       logits -> out; v
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from engine.errors import BadModel
from engine.forms import FORMS, Form, misfit

Attr = int | float | bool | str


@dataclass(frozen=True)
class Part:
    """Rows of one tensor of the source file, from `row` on."""

    tensor: str
    rows: int
    row: int = 0


@dataclass(frozen=True)
class Weight:
    """A matrix [n, k] (or a vector, n = 1) from the rows of its parts, one under the other.

    `source` is the type in the file (Q4_1, F16 …; "computed" for tables that a pass made), `format`
    the one that kernels read, "" until it is decided; `layout` is "rows" in the file and "tile16"
    once packed.
    """

    name: str
    shape: tuple[int, int]
    source: str
    parts: tuple[Part, ...] = ()
    format: str = ""
    layout: str = "rows"


@dataclass(frozen=True)
class Node:
    """One operation."""

    name: str
    op: str
    inputs: tuple[str, ...]
    output: str
    weights: tuple[str, ...] = ()
    attrs: Mapping[str, Attr] = field(default_factory=dict)

    def to_json(self) -> list[Any]:
        """As JSON data."""
        weights = list(self.weights)
        return [self.name, self.op, list(self.inputs), self.output, weights, dict(self.attrs)]

    @classmethod
    def from_json(cls, data: Any) -> Node:
        """What `to_json` wrote.

        Raises:
            TypeError, ValueError: it is damaged.
        """
        name, op, inputs, output, weights, attrs = data
        named = tuple(map(str, inputs)), str(output), tuple(map(str, weights))
        return cls(str(name), str(op), *named, dict(attrs))

    def misfit(self, form: Form) -> str:
        """What keeps it from having its operation's form, as the end of a sentence; or ""."""
        return misfit(form, self.op, len(self.inputs), len(self.weights), self.attrs)

    def int(self, key: str) -> int:
        """An attribute that has to be a whole number.

        Raises:
            BadModel: it is missing or something else.
        """
        value = self.attrs.get(key)
        if type(value) is not int:
            raise BadModel(f"The graph's node {self.name} lacks {key}.")
        return value


@dataclass(frozen=True)
class Change:
    """What a pass did, for `pvrctl compile --explain`."""

    name: str
    nodes_before: int
    nodes_after: int
    note: str
    # Of one token of a text model, before and after (engine/cost.py); empty for others.
    launches: tuple[int, ...] = ()
    bindings: tuple[int, ...] = ()
    nbytes: tuple[int, ...] = ()


@dataclass(frozen=True)
class Graph:
    """Nodes in the order of execution, weights by name, and the model's dimensions in `attrs`."""

    nodes: tuple[Node, ...]
    weights: Mapping[str, Weight]
    attrs: Mapping[str, Attr] = field(default_factory=dict)
    log: tuple[Change, ...] = ()

    def users(self) -> dict[str, list[Node]]:
        """Nodes by the value that they read."""
        found: dict[str, list[Node]] = {}
        for node in self.nodes:
            for value in node.inputs:
                found.setdefault(value, []).append(node)
        return found

    def producers(self) -> dict[str, Node]:
        """The node that writes each value."""
        return {node.output: node for node in self.nodes}

    def check(self) -> Graph:
        """This graph, when it holds together.

        Raises:
            BadModel: an unknown operation or weight, a node that lacks what its operation has
                (engine/forms.py), a value that is read before it is written or written twice.
        """
        known = {"ids"}
        for node in self.nodes:
            if node.op not in FORMS:
                raise BadModel(f"The graph has an unknown operation {node.op!r}.")
            if wrong := node.misfit(FORMS[node.op]):
                raise BadModel(f"The graph's node {node.name} {wrong}.")
            if missing := [v for v in node.inputs if v not in known]:
                raise BadModel(f"The graph's node {node.name} reads {missing[0]!r} too early.")
            if lost := [w for w in node.weights if w not in self.weights]:
                raise BadModel(f"The graph's node {node.name} needs the weight {lost[0]!r}.")
            if node.output in known:
                raise BadModel(f"The graph writes {node.output!r} twice.")
            known.add(node.output)
        return self

    def to_json(self) -> dict[str, Any]:
        """As JSON data."""
        return {
            "nodes": [node.to_json() for node in self.nodes],
            "weights": [
                [
                    w.name,
                    list(w.shape),
                    w.source,
                    [[p.tensor, p.rows, p.row] for p in w.parts],
                    w.format,
                    w.layout,
                ]
                for w in self.weights.values()
            ],
            "attrs": dict(self.attrs),
            "log": [asdict(c) for c in self.log],
        }

    @classmethod
    def from_json(cls, data: Any) -> Graph:
        """The graph that `to_json` wrote.

        Raises:
            BadModel
        """
        try:
            nodes = tuple(map(Node.from_json, data["nodes"]))
            weights = {
                str(name): Weight(
                    str(name),
                    (int(shape[0]), int(shape[1])),
                    str(source),
                    tuple(Part(str(t), int(n), int(r)) for t, n, r in parts),
                    str(fmt),
                    str(layout),
                )
                for name, shape, source, parts, fmt, layout in data["weights"]
            }
            log = tuple(_change(c) for c in data["log"])
            return cls(nodes, weights, dict(data["attrs"]), log).check()
        except (KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError):
            raise BadModel("The compiled model's graph is damaged.") from None


Pass = Callable[[Graph], Graph]


def changed(graph: Graph, name: str, note: str, nodes: Iterable[Node], **other: Any) -> Graph:
    """The graph with other nodes (and weights), and a line in its log."""
    nodes = tuple(nodes)
    change = Change(name, len(graph.nodes), len(nodes), note)
    return replace(graph, nodes=nodes, log=(*graph.log, change), **other)


def explain(graph: Graph) -> str:
    """The log as a table for people."""
    counted = any(c.launches for c in graph.log)
    more = ["launches", "bindings", "MB a token"] if counted else []
    rows = [["pass", "nodes", *more, "what it did"]]
    for c in graph.log:
        moved = [n / 1e6 for n in c.nbytes]
        costs = [_arrow(c.launches), _arrow(c.bindings), _arrow(moved, ".2f")] if counted else []
        rows.append([c.name, f"{c.nodes_before} -> {c.nodes_after}", *costs, c.note])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)][:-1]
    return "\n".join(
        "  ".join([*(f"{cell:<{w}}" for cell, w in zip(row[:-1], widths, strict=True)), row[-1]])
        for row in rows
    )


def _arrow(values: Sequence[float], form: str = "") -> str:
    return " -> ".join(f"{v:{form}}" for v in values)


def _change(data: Mapping[str, Any]) -> Change:
    given: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in data.items()}
    return Change(**given)
