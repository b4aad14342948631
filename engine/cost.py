# SPDX-License-Identifier: Apache-2.0
"""What one token of a text model's Graph costs, counted from its nodes: launches, bindings and
bytes that move. For tables of what a pass is worth; times come from measuring.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from engine.graph import Graph, Node, Weight
from engine.importers import ggml
from kernels import weights as packing
from kernels.topk.op import RECORD_WORDS

POSITION = 512  # tokens in the cache
_FLOAT, _HALF = 4, 2  # bytes of an activation, of an element of a cache
_IN_PLACE = frozenset({"bias", "head_norm", "qk_norm", "rope", "rope_kv", "row_gate", "softcap"})


@dataclass(frozen=True)
class Cost:
    """Of one token: kernel calls, buffers bound to them, bytes read and written."""

    launches: int = 0
    bindings: int = 0
    nbytes: int = 0


def cost(graph: Graph) -> Cost:
    """The cost of a token behind POSITION others, if each node were a kernel. What no kernel does
    alone is counted like what one does.
    """
    made, widths = graph.producers(), _widths(graph)
    launches = bindings = nbytes = 0
    for node in graph.nodes:
        if node.attrs.get("inside"):
            continue
        calls = 2 if node.op == "topk" else max(1, len(node.weights) if _product(node) else 1)
        read = [node.inputs[0]] if _product(node) else list(node.inputs)
        bound = 1 + len(node.weights) // calls + len(read) - (node.op in _IN_PLACE)
        inner = made.get(node.inputs[0]) if node.op == "linear" else None
        if inner is not None and inner.attrs.get("inside"):
            read = list(inner.inputs)
            bound += len(inner.weights)
            nbytes += sum(_weight_nbytes(graph.weights[w]) for w in inner.weights)
        if node.op in ("attention", "attend", "rope_kv"):
            bound += 2  # the caches
            rows = 1 if node.op == "rope_kv" else POSITION
            nbytes += 2 * rows * node.int("kv_heads") * node.int("dim") * _HALF
        launches += calls
        bindings += calls * bound
        moved = calls * sum(widths.get(v, 0) for v in read) + widths[node.output]
        nbytes += _FLOAT * moved + sum(_read(node, graph.weights[w]) for w in node.weights)
    return Cost(launches, bindings, nbytes)


def _product(node: Node) -> bool:
    return node.op in ("linear", "expert_linear")


def _read(node: Node, w: Weight) -> int:
    """Bytes of a weight that one token reads."""
    whole = _weight_nbytes(w)
    if node.op in ("lookup", "rope", "rope_kv"):
        return whole // w.shape[0]  # a row
    if node.op in ("expert_linear", "expert_sum"):
        return whole * node.int("used") // node.int("experts")
    return whole


def _weight_nbytes(w: Weight) -> int:
    """In the form that kernels read, also where it is not decided yet."""
    if w.source == "computed" or w.shape[0] == 1 or (w.layout == "rows" and w.format == "f32"):
        return math.prod(w.shape) * _FLOAT
    return packing.nbytes(w.format or ggml.TYPES[w.source].format, *w.shape)


def _widths(graph: Graph) -> Mapping[str, int]:
    """Elements of each value for one token."""
    widths: dict[str, int] = {"ids": 1}
    for node in graph.nodes:
        widths[node.output] = _width(node, widths)
    return widths


def _width(node: Node, widths: Mapping[str, int]) -> int:
    first = widths.get(node.inputs[0], 0)
    match node.op:
        case "lookup":
            return node.int("k")
        case "linear" | "expert_sum":
            return node.int("n")
        case "expert_linear":
            return node.int("n") * node.int("used")
        case "attention" | "attend":
            return node.int("heads") * node.int("dim")
        case "swiglu":
            return node.int("f") * node.int("each")
        case "route":
            return 2 * node.int("used")
        case "topk":
            return RECORD_WORDS
    return first
