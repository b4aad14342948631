# SPDX-License-Identifier: Apache-2.0
"""A decoder that was exported as ONNX (from token ids to logits, without a cache) -> the same Graph
that its folder or GGUF file becomes.

The way back from the logits is followed: a product, a norm, then block after block, each added to
the stream. What a block does between its products is recognised by what it computes: the part of
the graph is run for random values and has to give what this family of models does with them. So
an exporter may write it as it likes, and a model that does something else is refused.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from engine.errors import UnsupportedModel
from engine.graph import Change
from engine.importers import ggml
from engine.importers.decoder import ROPE, Config, Model, build
from engine.importers.onnx_attention import head_norms, heads_of, recognised
from engine.importers.onnx_numbers import close, gelu, rounded, silu
from engine.importers.onnx_trace import TOKENS, Trace, strange
from engine.importers.onnx_wire import Array, OnnxGraph
from engine.importers.source import Bytes, TensorInfo

DEFAULT_CONTEXT = 4096  # tokens, where nobody says more


def import_onnx(graph: OnnxGraph, context: int = DEFAULT_CONTEXT) -> Model:
    """The model of a graph; `context` is what it was trained for.

    Raises:
        BadModel: the graph does not hold together.
        UnsupportedModel: it is no decoder of a kind that is known, or does not take tokens alone.
    """
    trace = Trace(graph)
    try:
        model = _Walk(trace, context).model()
    except (ValueError, IndexError):  # shapes that the parts of a decoder do not have
        raise UnsupportedModel("The ONNX model is no decoder of a form that is known.") from None
    before, live, after = len(graph.nodes), trace.count, len(model.graph.nodes)
    log = (
        Change("fold", before, live, "shapes, positions and masks became numbers"),
        Change("recognise", live, after, "what each block computes between its products"),
    )
    return replace(model, graph=replace(model.graph, log=log + model.graph.log))


class Arrays:
    """Tensors in memory, a Source."""

    def __init__(self) -> None:
        self.tensors: dict[str, TensorInfo] = {}
        self._arrays: dict[str, Array] = {}

    def add(self, name: str, array: Array) -> None:
        """A matrix [rows, columns] or a vector of floats."""
        matrix = array.reshape(1, -1) if array.ndim == 1 else array
        kind = ggml.TYPES["F16" if array.dtype == np.float16 else "F32"]
        shape = (int(matrix.shape[0]), int(matrix.shape[1]))
        nbytes = matrix.size * kind.nbytes
        self.tensors[name] = TensorInfo(name, kind, shape, 0, nbytes)
        self._arrays[name] = matrix

    def read(self, tensor: TensorInfo, row: int, rows: int) -> Bytes:
        """The bytes of some rows."""
        part = self._arrays[tensor.name][row : row + rows]
        dtype = "<f2" if tensor.kind.name == "F16" else "<f4"
        return np.ascontiguousarray(part, dtype).reshape(-1).view(np.uint8)


@dataclass(frozen=True)
class _Product:
    """y = w x + bias; `w` is [n, k], `value` the name of y, `x` that of x."""

    value: str
    x: str
    w: Array
    bias: Array | None


@dataclass
class _Layer:
    attention: dict[str, Any] = field(default_factory=dict)  # heads, kv_heads, dim, rope, window …
    feed_forward: dict[str, Any] = field(default_factory=dict)  # act


class _Walk:
    def __init__(self, trace: Trace, context: int) -> None:
        self._trace = trace
        self._context = context
        self._tensors: dict[str, Array] = {}  # under GGUF's names, layers counted from the end
        self._eps: set[float] = set()
        self._rng = np.random.default_rng(0)

    def model(self) -> Model:
        t = self._trace
        if len(t.graph.outputs) != 1:
            raise UnsupportedModel("The model has several outputs; logits alone are supported.")
        head = self._product(t.graph.outputs[0])
        if head is None or head.bias is not None:
            raise strange("the logits", t.graph.outputs[0])
        self._tensors["output.weight"] = head.w
        x = self._norm("output_norm.weight", head.x)
        layers: list[_Layer] = []
        while (embedding := self._embedding(x)) is None:
            if len(layers) > 1 << 10:
                raise UnsupportedModel("The model has too many layers.")
            x = self._layer(x, len(layers), layers)
        table, scale = embedding
        self._tensors["token_embd.weight"] = table
        if head.w.shape == table.shape and (head.w is table or np.shares_memory(head.w, table)):
            del self._tensors["output.weight"]
        if not layers:
            raise strange("the first layer", x)
        return build(self._config(layers, table, scale), self._source(len(layers)))

    def _config(self, layers: list[_Layer], table: Array, scale: float) -> Config:
        first = layers[-1]
        if any(layer != first for layer in layers) or len(self._eps) != 1:
            raise UnsupportedModel("The model's layers differ from each other.")
        a = first.attention
        return Config(
            arch="onnx",
            layers=len(layers),
            hidden=int(table.shape[1]),
            ffn=int(first.feed_forward["ffn"]),
            heads=a["heads"],
            kv_heads=a["kv_heads"],
            dim=a["dim"],
            rope_dims=2 * len(a["rope"].freqs),
            context=self._context,
            eps=min(self._eps),
            ropes={ROPE: a["rope"]},
            act=first.feed_forward["act"],
            scale=a["scale"],
            embed_scale=scale,
            window=a["window"],
        )

    def _source(self, count: int) -> Arrays:
        source = Arrays()
        for name, array in self._tensors.items():
            if name.startswith("blk."):
                _, back, rest = name.split(".", 2)
                name = f"blk.{count - 1 - int(back)}.{rest}"
            source.add(name, array)
        return source

    # Patterns.

    def _product(self, value: str) -> _Product | None:
        """The product with a matrix of the file that makes a value, if one does."""
        t = self._trace
        value = t.strip(value)
        node, bias = t.maker.get(value), None
        if node is not None and node.op == "Add":
            live, held = t.sides(node)
            if len(live) != 1 or len(held) != 1 or held[0].ndim != 1:
                return None
            bias, node = held[0], t.node(live[0])
        if node is None or node.op not in ("MatMul", "Gemm"):
            return None
        live, held = t.sides(node)
        if len(live) != 1 or not held or held[0].ndim != 2 or node.inputs[0] != live[0]:
            return None
        if node.op == "Gemm":
            if node.attrs.get("transA") or node.attrs.get("alpha", 1.0) != 1.0:
                return None
            bias = held[1].reshape(-1) if len(held) > 1 else bias
        w = held[0] if node.op == "Gemm" and node.attrs.get("transB") else held[0].T
        return _Product(value, live[0], w, bias)

    def _norm(self, name: str, value: str) -> str:
        """The value that an RMS norm is of; keeps its vector.

        Raises:
            UnsupportedModel: it is no such norm.
        """
        t = self._trace
        node = t.node(value)
        live, held = t.sides(node) if node is not None and node.op == "Mul" else ([], [])
        mean = [n for n in t.before(value, ()) if n.op == "ReduceMean" and n.outputs[0] in t.live]
        if len(live) != 1 or len(held) != 1 or held[0].ndim != 1 or not mean:
            raise strange("a norm", value)
        square = t.node(mean[-1].inputs[0])
        if square is None or square.op not in ("Pow", "Mul"):
            raise strange("a norm", value)
        x = t.strip(square.inputs[0])
        w = held[0]
        eps = rounded(self._epsilon(value, x))
        for size in (1.0, 1e-3):  # of small numbers what is added to the mean shows
            given = self._random(t.values[x].shape) * np.float32(size)
            want = given / np.sqrt(np.mean(given**2, axis=-1, keepdims=True) + eps) * w
            if not close(t.part(value, {x: given}), want):
                raise strange("a norm", value)
        self._eps.add(eps)
        self._tensors[name] = w
        return x

    def _epsilon(self, value: str, x: str) -> float:
        """What a norm adds to the mean of squares: the number of its only sum."""
        t = self._trace
        for node in t.before(value, (x,)):
            live, held = t.sides(node)
            if node.op == "Add" and len(live) == 1 and held and held[0].size == 1:
                return float(held[0].reshape(-1)[0])
        raise strange("a norm", value)

    def _embedding(self, value: str) -> tuple[Array, float] | None:
        """The table that tokens are looked up in and its factor, if a value is that."""
        t = self._trace
        node, scale = t.node(value), 1.0
        if node is not None and node.op == "Mul":
            live, held = t.sides(node)
            if len(live) == 1 and len(held) == 1 and held[0].size == 1:
                scale, node = float(held[0].reshape(-1)[0]), t.node(live[0])
        if node is None or node.op != "Gather" or node.inputs[0] in t.live:
            return None
        table = t.values[node.inputs[0]]
        return (table, scale) if table.ndim == 2 else None

    def _layer(self, x: str, i: int, layers: list[_Layer]) -> str:
        """Takes a layer in, from its end; the value that it begins with."""
        layer = _Layer()
        x, down = self._block(x)
        h = self._feed_forward(f"blk.{i}.", down, layer)
        if self._norm(f"blk.{i}.ffn_norm.weight", h) != x:
            raise strange("the input of a feed-forward part", h)
        x, o = self._block(x)
        h = self._attention(f"blk.{i}.", o, layer)
        if self._norm(f"blk.{i}.attn_norm.weight", h) != x:
            raise strange("the input of an attention", h)
        layers.append(layer)
        return x

    def _block(self, value: str) -> tuple[str, _Product]:
        """The stream before a sum, and the product that is added to it."""
        t = self._trace
        node = t.node(value)
        live = t.sides(node)[0] if node is not None and node.op == "Add" else []
        found = (
            [(a, p) for a, b in (live, live[::-1]) if (p := self._product(b))]
            if len(live) == 2
            else []
        )
        if len(found) != 1:
            raise strange("a sum of the stream", value)
        stream, product = found[0]
        return t.strip(stream), product

    def _inner(self, value: str) -> list[_Product]:
        """The products that a value is computed from, without what lies behind them."""
        t = self._trace
        found: dict[str, _Product] = {}
        wanted, seen = [value], set()
        while wanted:
            name = wanted.pop()
            if name in seen or name not in t.live:
                continue
            seen.add(name)
            node = t.maker.get(name)
            if node is None:
                raise strange("a block", value)
            product = self._product(name) if node.op in ("Add", "MatMul", "Gemm") else None
            if product is not None:
                found[product.value] = product
            else:
                wanted.extend(node.inputs)
            if len(found) > 3:
                raise strange("a block", value)
        order = {o: i for i, n in enumerate(t.graph.nodes) for o in n.outputs}
        return sorted(found.values(), key=lambda p: order[p.value])

    def _keep(self, name: str, product: _Product) -> None:
        self._tensors[name + ".weight"] = product.w
        if product.bias is not None:
            self._tensors[name + ".bias"] = product.bias

    def _feed_forward(self, p: str, down: _Product, layer: _Layer) -> str:
        t, products = self._trace, self._inner(down.x)
        self._keep(p + "ffn_down", down)
        ffn = down.w.shape[1]
        given = {q.value: self._random(t.values[q.value].shape) for q in products}
        out = t.part(down.x, given).reshape(TOKENS, -1)
        values = [v.reshape(TOKENS, -1) for v in given.values()]
        if len(products) == 1:
            values = [values[0][:, :ffn], values[0][:, ffn:]]
        names = [("gate", "up"), ("up", "gate")]
        for order in names if len(values) == 2 else ():
            gate, up = values if order[0] == "gate" else values[::-1]
            for act, computed in (("silu", silu(gate)), ("gelu", gelu(gate))):
                if gate.shape != up.shape or not close(out, computed * up):
                    continue
                layer.feed_forward = {"act": act, "ffn": ffn}
                if len(products) == 1 and order[0] == "gate":
                    self._keep(p + "ffn_up", products[0])
                elif len(products) == 2:
                    for name, product in zip(order, products, strict=True):
                        self._keep(f"{p}ffn_{name}", product)
                else:
                    continue
                return self._common(products, down.x)
        raise strange("a feed-forward part", down.x)

    def _common(self, products: list[_Product], value: str) -> str:
        inputs = {self._trace.strip(q.x) for q in products}
        if len(inputs) != 1:
            raise strange("the input of a block", value)
        return inputs.pop()

    def _attention(self, p: str, o: _Product, layer: _Layer) -> str:
        t, products = self._trace, self._inner(o.x)
        self._keep(p + "attn_output", o)
        heads, dim = heads_of(t, o.x, o.w.shape[1])
        q_rows = heads * dim
        given = {q.value: self._random(t.values[q.value].shape) for q in products}
        out = t.part(o.x, given).reshape(TOKENS, heads, dim)
        values = {name: v.reshape(TOKENS, -1) for name, v in given.items()}
        orders: list[tuple[list[Array], list[_Product] | None]]
        if len(products) == 1:
            whole = values[products[0].value]
            kv = (whole.shape[1] - q_rows) // 2
            cuts = [whole[:, :q_rows], whole[:, q_rows : q_rows + kv], whole[:, q_rows + kv :]]
            orders = [(cuts, None)]
        else:
            orders = [
                ([values[q.value] for q in order], order) for order in _orders(products, q_rows)
            ]
        eps = min(self._eps)
        both = head_norms(t, o.x, given, dim)
        tries = [(a, order, norms) for a, order in orders for norms in (both, both[::-1])]
        for arrays, order, norms in tries:
            found = recognised(t, o.x, arrays, heads, dim, norms, eps, out)
            if found is None:
                continue
            layer.attention = found
            if order is None:
                self._keep(p + "attn_qkv", products[0])
            else:
                for name, product in zip("qkv", order, strict=True):
                    self._keep(f"{p}attn_{name}", product)
            for name, w in zip("qk", norms, strict=False):
                self._tensors[f"{p}attn_{name}_norm.weight"] = w
            return self._common(products, o.x)
        raise strange("an attention", o.x)

    def _random(self, shape: tuple[int, ...]) -> Array:
        return self._rng.standard_normal(shape).astype(np.float32)


def _orders(products: list[_Product], q_rows: int) -> list[list[_Product]]:
    """Q, K and V among three products: Q is known by its rows, K and V are tried both ways."""
    if len(products) != 3:
        return []
    found = []
    for i, q in enumerate(products):
        rest = products[:i] + products[i + 1 :]
        if q.w.shape[0] == q_rows:
            found += [[q, *rest], [q, *rest[::-1]]]
    return found
