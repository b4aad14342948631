# SPDX-License-Identifier: Apache-2.0
"""An ONNX graph of a language model, followed once with a few tokens.

What does not depend on the tokens (shapes, positions, masks, weights) becomes numbers. What does is
kept by its shape alone: no product with a weight is computed, so that a large model costs no more
than its graph. A part of the graph can be computed for given values, to see what it is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from engine.errors import BadModel, UnsupportedModel
from engine.importers.onnx_fold import FOLDED
from engine.importers.onnx_wire import Array, OnnxGraph, OnnxNode

TOKENS = 12  # of the prompt that is followed
MAX_ELEMENTS = 1 << 26  # of a value that is computed


def _reduced(fold: Callable[..., Array]) -> Callable[..., Array]:
    def reduce(a: Mapping[str, Any], x: Array, axes: Array | None = None) -> Array:
        given = a.get("axes") if axes is None else axes.reshape(-1).tolist()
        axis = tuple(int(i) for i in given) if given else None
        return fold(x, axis=axis, keepdims=bool(a.get("keepdims", 1)))

    return reduce


def _softmax(a: Mapping[str, Any], x: Array) -> Array:
    axis = a.get("axis", -1)
    e = np.exp(x - x.max(axis=axis, keepdims=True))
    return np.asarray(e / e.sum(axis=axis, keepdims=True))


def _gemm(a: Mapping[str, Any], x: Array, w: Array, c: Array | None = None) -> Array:
    x = x.T if a.get("transA") else x
    y: Array = a.get("alpha", 1.0) * (x @ (w.T if a.get("transB") else w))
    return y if c is None else y + a.get("beta", 1.0) * c


def _gather_nd(a: Mapping[str, Any], x: Array, indices: Array) -> Array:
    if a.get("batch_dims", 0):
        raise ValueError("batch_dims")
    return np.asarray(x[tuple(np.moveaxis(indices, -1, 0))])


def _split(a: Mapping[str, Any], x: Array, sizes: Array | None = None) -> list[Array]:
    axis = a.get("axis", 0)
    given = a.get("split") if sizes is None else sizes.reshape(-1).tolist()
    if not given:  # into so many, of which the last may be smaller
        count = int(a["num_outputs"])
        each = -(-x.shape[axis] // count)
        given = [each] * (count - 1) + [x.shape[axis] - each * (count - 1)]
    return list(np.split(x, np.cumsum(given)[:-1], axis=axis))


def _trilu(a: Mapping[str, Any], x: Array, k: Array | None = None) -> Array:
    offset = 0 if k is None else int(k.reshape(-1)[0])
    return np.asarray(np.triu(x, offset) if a.get("upper", 1) else np.tril(x, offset))


def _expand(a: Mapping[str, Any], x: Array, shape: Array) -> Array:
    return np.broadcast_to(x, np.broadcast_shapes(x.shape, tuple(shape.reshape(-1).tolist())))


def _range(a: Mapping[str, Any], *ends: Array) -> Array:
    return np.arange(*(e.reshape(-1)[0] for e in ends), dtype=ends[0].dtype)


def _cumsum(a: Mapping[str, Any], x: Array, axis: Array) -> Array:
    if a.get("exclusive") or a.get("reverse"):
        raise ValueError("exclusive or reverse")
    return np.asarray(np.cumsum(x, axis=int(axis.reshape(-1)[0])))


def _many(fold: Callable[[Array, Array], Array]) -> Callable[..., Array]:
    def several(a: Mapping[str, Any], *parts: Array) -> Array:
        out = parts[0]
        for part in parts[1:]:
            out = fold(out, part)
        return out

    return several


_ERF = np.vectorize(math.erf, otypes=[np.float32])
EVALUATED: Mapping[str, Callable[..., Any]] = {
    **FOLDED,
    "Shape": lambda a, x: np.array(x.shape, np.int64)[a.get("start", 0) : a.get("end")],
    "Pow": lambda a, x, y: np.power(x, y.astype(x.dtype)),
    "Neg": lambda a, x: -x,
    "Abs": lambda a, x: np.abs(x),
    "Exp": lambda a, x: np.exp(x),
    "Cos": lambda a, x: np.cos(x),
    "Sin": lambda a, x: np.sin(x),
    "Tanh": lambda a, x: np.tanh(x),
    "Erf": lambda a, x: _ERF(x) if x.size else x,
    "Reciprocal": lambda a, x: 1 / x,
    "Sigmoid": lambda a, x: 1 / (1 + np.exp(-x)),
    "Softmax": _softmax,
    "ReduceMean": _reduced(np.mean),
    "ReduceSum": _reduced(np.sum),
    "ReduceMax": _reduced(np.max),
    "MatMul": lambda a, x, y: x @ y,
    "Gemm": _gemm,
    "GatherND": _gather_nd,
    "Flatten": lambda a, x: x.reshape(int(np.prod(x.shape[: a.get("axis", 1)])), -1),
    "Split": _split,
    "Expand": _expand,
    "Range": _range,
    "Trilu": _trilu,
    "CumSum": _cumsum,
    "Max": _many(np.maximum),
    "Min": _many(np.minimum),
    "Where": lambda a, c, x, y: np.where(c, x, y),
    "Equal": lambda a, x, y: x == y,
    "Less": lambda a, x, y: x < y,
    "LessOrEqual": lambda a, x, y: x <= y,
    "Greater": lambda a, x, y: x > y,
    "GreaterOrEqual": lambda a, x, y: x >= y,
    "And": lambda a, x, y: np.logical_and(x, y),
    "Or": lambda a, x, y: np.logical_or(x, y),
    "Not": lambda a, x: np.logical_not(x),
    "IsNaN": lambda a, x: np.isnan(x),
}  # fmt: skip
_BROADCAST = {
    "Add", "Sub", "Mul", "Div", "Pow", "Max", "Min", "Where", "Equal", "Less", "LessOrEqual",
    "Greater", "GreaterOrEqual", "And", "Or",
}  # fmt: skip
# Operators that only lay numbers out anew.
VIEWS = frozenset({"Cast", "Identity", "Reshape", "Transpose", "Unsqueeze", "Squeeze", "Expand"})


class Trace:
    """The graph, its values for TOKENS tokens, and which of them depend on the tokens."""

    def __init__(self, graph: OnnxGraph) -> None:
        """Raises:
        BadModel: the graph does not hold together.
        UnsupportedModel: an operator or an input that is not known.
        """
        self.graph = graph
        self.values: dict[str, Array] = {"": np.zeros(0), **graph.constants}
        self.live: set[str] = set()
        self.maker: dict[str, OnnxNode] = {}
        self._inputs()
        for node in graph.nodes:
            if node.op not in EVALUATED:
                raise UnsupportedModel(
                    f"The model has the operator {node.op} (node {node.name}), which is not known."
                )
            if missing := [i for i in node.inputs if i not in self.values]:
                raise BadModel(f"The node {node.name} reads {missing[0]!r}, which nobody makes.")
            live = node.op != "Shape" and any(i in self.live for i in node.inputs)
            try:
                values = self._shape(node) if live else self.compute(node, self.values)
            except (ValueError, IndexError):  # of shapes that do not go together
                raise _senseless(node) from None
            for name, value in zip(node.outputs, values, strict=False):
                self.values[name] = value
                self.maker[name] = node
                if live:
                    self.live.add(name)

    def _inputs(self) -> None:
        for name in self.graph.inputs:
            if name == "input_ids" or len(self.graph.inputs) == 1:
                self.values[name] = np.zeros((1, TOKENS), np.int64)
                self.live.add(name)
            elif name == "position_ids":
                self.values[name] = np.arange(TOKENS)[None]
            elif name == "attention_mask":
                self.values[name] = np.ones((1, TOKENS), np.int64)
            else:
                raise UnsupportedModel(
                    f"The model takes {name!r}; one is supported that takes tokens alone, without a"
                    " cache."
                )
        if not self.live:
            raise UnsupportedModel("The model does not take tokens.")

    @property
    def count(self) -> int:
        """Nodes that depend on the tokens."""
        return sum(node.outputs[0] in self.live for node in self.graph.nodes if node.outputs)

    def compute(self, node: OnnxNode, values: Mapping[str, Array]) -> list[Array]:
        """A node's outputs.

        Raises:
            BadModel: it cannot be computed.
        """
        given = [values[name] if name else None for name in node.inputs]
        try:
            if _size(node.op, [v for v in given if v is not None]) > MAX_ELEMENTS:
                raise UnsupportedModel(f"The node {node.name} computes too much.")
            with np.errstate(all="ignore"):
                found = EVALUATED[node.op](node.attrs, *given)
        except (ArithmeticError, AttributeError, LookupError, MemoryError, TypeError, ValueError):
            raise _senseless(node) from None
        return [np.asarray(v) for v in (found if isinstance(found, list) else [found])]

    def _shape(self, node: OnnxNode) -> list[Array]:
        """A node's outputs by their shape alone, as zeros that take no room."""
        given = [self.values[name] for name in node.inputs]
        shapes = [v.shape for v in given]
        if node.op == "MatMul" and min(len(s) for s in shapes) >= 2:
            if shapes[0][-1] != shapes[1][-2]:
                raise _senseless(node)
            batch = np.broadcast_shapes(shapes[0][:-2], shapes[1][:-2])
            return [_zeros((*batch, shapes[0][-2], shapes[1][-1]))]
        if node.op == "Gemm":
            rows = shapes[0][1 if node.attrs.get("transA") else 0]
            return [_zeros((rows, shapes[1][0 if node.attrs.get("transB") else 1]))]
        if node.op == "Gather" and node.inputs[1] in self.live:
            return [_zeros((*shapes[1], *shapes[0][1:]))]
        return [_zeros(v.shape, v.dtype) for v in self.compute(node, self.values)]

    # Looking back from a value.

    def strip(self, name: str) -> str:
        """The value that a live value is another layout of."""
        while (node := self.maker.get(name)) is not None and name in self.live:
            same = node.op == "Slice" and self.values[name].size == self.values[node.inputs[0]].size
            if node.op not in VIEWS and not same:
                break
            name = node.inputs[0]
        return name

    def node(self, name: str) -> OnnxNode | None:
        """The operator that makes a value, other layouts aside."""
        return self.maker.get(self.strip(name))

    def sides(self, node: OnnxNode) -> tuple[list[str], list[Array]]:
        """Inputs of a node that are live, and the numbers of those that are not."""
        live = [i for i in node.inputs if i in self.live]
        return live, [self.values[i] for i in node.inputs if i and i not in self.live]

    def before(self, name: str, stops: Iterable[str]) -> list[OnnxNode]:
        """Nodes that lead to a value from the stops, in order; those that are not live too."""
        wanted, seen = [name], set(stops)
        found: set[int] = set()
        while wanted:
            value = wanted.pop()
            node = self.maker.get(value)
            if value in seen or node is None:
                continue
            seen.add(value)
            found.add(id(node))
            if node.op != "Shape":  # what has a shape does not lead to what is made of that
                wanted.extend(node.inputs)
        return [node for node in self.graph.nodes if id(node) in found]

    def part(self, name: str, given: Mapping[str, Array]) -> Array:
        """A value, computed from values that are given.

        Raises:
            BadModel
        """
        values = {**self.values, **given}
        for node in self.before(name, given):
            if any(o in self.live for o in node.outputs):
                values.update(zip(node.outputs, self.compute(node, values), strict=False))
        return values[name]


def _size(op: str, given: list[Array]) -> int:
    """Elements of a result, at most, where it may be larger than what it is made of."""
    if op == "Range":
        begin, end, step = (float(v.reshape(-1)[0]) for v in given)
        return int(abs((end - begin) / step)) + 1
    if op == "Gather":
        return given[0].size * given[1].size
    if op == "MatMul":
        return int(given[0].size // max(1, given[0].shape[-1]) * given[1].shape[-1])
    if op in _BROADCAST:
        return math.prod(np.broadcast_shapes(*(v.shape for v in given)))
    return 0


def _senseless(node: OnnxNode) -> BadModel:
    return BadModel(f"The operator {node.op} (node {node.name}) makes no sense.")


def _zeros(shape: tuple[int, ...], dtype: Any = np.float32) -> Array:
    return np.broadcast_to(np.zeros((), dtype), shape)


def strange(what: str, value: str) -> UnsupportedModel:
    """The refusal of a part of a graph, said with the value that it makes."""
    return UnsupportedModel(
        f"The ONNX model has {what} of a kind that is not known (at {value[:64]!r})."
    )
