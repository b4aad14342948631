# SPDX-License-Identifier: Apache-2.0
"""Do the sizes in a text model's graph fit each other and its weights?

Kernels believe what they are told: a compiled model from a stranger has to be looked at before any
of them runs. The widths of values follow from the operations (engine/graph.py), those that the
passes leave.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from engine.errors import BadModel
from engine.forms import MAX_WIDTH
from engine.graph import Graph, Node, Weight
from engine.importers.decoder import MAX_DIM, MAX_EXPERTS, MAX_LAYERS
from engine.passes.move_in import movable
from kernels.route.op import MAX_USED

# What computes one row, whatever the number of tokens: all else would write past the last row.
_OF_A_ROW = ("linear", "softcap", "topk")
_TILES = ("f16", "q8", "q4")
# Buffers that lowering makes by itself: no weight may lie where one of them is written.
_OWN = frozenset(
    {"params", "ids", "x", "h", "last", "logits", "a", "f", "route", "part", "topk", "records",
     "best_part"}
)  # fmt: skip


class _Misfit(Exception):
    """A size that does not fit; the message says which."""


class _Check:
    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._widths: dict[str, int] = {}  # floats of a token
        self._routes: dict[str, tuple[int, int]] = {}  # experts, used
        self._caches: dict[int, tuple[int, int]] = {}  # of a layer: heads, elements of one
        self._head = False
        self._hidden = 0  # floats of what the layers hand on
        self._movable = movable(graph)

    def node(self, node: Node) -> None:
        """Raises _Misfit, KeyError, TypeError, IndexError, ValueError."""
        rules: Mapping[str, Callable[[Node], int]] = {
            "lookup": self._lookup, "rms_norm": self._rms_norm, "linear": self._linear,
            "bias": self._bias, "qk_norm": self._qk_norm, "rope_kv": self._rope_kv,
            "attend": self._attend, "swiglu": self._swiglu, "route": self._route,
            "expert_linear": self._expert_linear, "expert_sum": self._expert_sum,
            "row_gate": self._row_gate, "softcap": self._softcap, "topk": self._topk,
        }  # fmt: skip
        _same(not node.attrs.get("inside") or node.output in self._movable, "what reads it")
        _same(not self._head or node.op in _OF_A_ROW, "its place behind the last row")
        rule = rules.get(node.op)
        if rule is not None:  # lowering names what is left
            self._widths[node.output] = rule(node)

    def _size(self, node: Node, key: str, most: int = MAX_WIDTH, step: int = 1) -> int:
        value = node.int(key)
        _same(0 < value <= most and value % step == 0, key)
        return value

    def _reads(self, node: Node, *widths: int) -> None:
        _same(len(node.inputs) == len(widths), "its inputs")
        for name, width in zip(node.inputs, widths, strict=True):
            _same(self._widths[name] == width, f"the width of {name}")

    def _residual(self, node: Node, width: int, rest: int) -> None:
        if len(node.inputs) == 2:
            self._reads(node, width, rest)
        else:
            self._reads(node, width)

    def _weight(self, node: Node, i: int = 0) -> Weight:
        return self._graph.weights[node.weights[i]]

    def _vector(self, node: Node, length: int) -> None:
        w = self._weight(node)
        _same(w.layout == "rows" and w.shape == (1, length), "its vector")

    def _matrix(self, node: Node, i: int, k: int) -> int:
        w = self._weight(node, i)
        fits = w.layout == "tile16" and w.format in _TILES and w.shape[1] == k and w.shape[0] > 0
        _same(fits, "its matrix")
        return w.shape[0]

    def _named(self, node: Node) -> None:
        """A product's buffer has the end of its name."""
        end = node.name.rpartition(".")[2]
        free = end not in self._graph.weights and end not in _OWN - {"logits"}
        _same(free and not node.name.endswith("."), "its name")

    def _lookup(self, node: Node) -> int:
        k = self._size(node, "k", step=32)
        _same(node.inputs == ("ids",), "its inputs")
        _same(self._matrix(node, 0, k) == self._graph.attrs["vocab"], "its table")
        self._hidden = k
        return k

    def _rms_norm(self, node: Node) -> int:
        k = self._size(node, "k", step=4)
        self._residual(node, k, k)
        self._vector(node, k)
        if node.attrs["last"]:
            _same(len(node.inputs) == 1 and k == self._hidden, "its last row")
            self._head = True
        return k

    def _linear(self, node: Node) -> int:
        n, k = self._size(node, "n"), self._size(node, "k", step=32)
        self._named(node)
        _same(not self._head or len(node.inputs) == 1, "its sum")
        self._residual(node, k, n)
        _same(sum(self._matrix(node, i, k) for i in range(len(node.weights))) == n, "its rows")
        return n

    def _bias(self, node: Node) -> int:
        n = self._size(node, "n")
        self._reads(node, n)
        self._vector(node, n)
        return n

    def _heads(self, node: Node) -> tuple[int, int, int]:
        heads, kv_heads = self._size(node, "heads", 1 << 12), self._size(node, "kv_heads", 1 << 12)
        dim = self._size(node, "dim", MAX_DIM, step=4)
        _same(heads % kv_heads == 0, "its heads")
        self._reads(node, (heads + 2 * kv_heads) * dim)
        return heads, kv_heads, dim

    def _qk_norm(self, node: Node) -> int:
        heads, kv_heads, dim = self._heads(node)
        self._vector(node, (heads + kv_heads) * dim if node.attrs["whole"] else 2 * dim)
        return (heads + 2 * kv_heads) * dim

    def _cache(self, node: Node, kv_heads: int, dim: int) -> None:
        layer = node.int("layer")
        _same(0 <= layer < MAX_LAYERS, "its layer")
        _same(self._caches.setdefault(layer, (kv_heads, dim)) == (kv_heads, dim), "its layer")

    def _rope_kv(self, node: Node) -> int:
        heads, kv_heads, dim = self._heads(node)
        self._cache(node, kv_heads, dim)
        turned = self._size(node, "rope_dims", dim, step=4)
        for i in range(len(node.weights)):
            w = self._weight(node, i)
            fits = w.layout == "rows" and w.shape == (self._graph.attrs["context"], turned)
            _same(fits, "its table")
        return (heads + 2 * kv_heads) * dim

    def _attend(self, node: Node) -> int:
        heads, kv_heads, dim = self._heads(node)
        self._cache(node, kv_heads, dim)
        return heads * dim

    def _swiglu(self, node: Node) -> int:
        f, each = self._size(node, "f"), self._size(node, "each", MAX_USED)
        self._reads(node, 2 * f * each)
        return f * each

    def _route(self, node: Node) -> int:
        experts = self._size(node, "experts", MAX_EXPERTS)
        used = self._size(node, "used", min(experts, MAX_USED))
        self._reads(node, experts)
        self._routes[node.output] = experts, used
        return 2 * used

    def _stack(self, node: Node, width: int, *rest: int) -> tuple[int, int, int]:
        n, k = self._size(node, "n", step=16), self._size(node, "k", step=32)
        experts, used = self._size(node, "experts", MAX_EXPERTS), self._size(node, "used", MAX_USED)
        _same(self._routes[node.inputs[1]] == (experts, used), "its route")
        self._reads(node, k * (used if width else 1), 2 * used, *(rest and (n,)))
        each = n // len(node.weights)
        _same(each * len(node.weights) == n and each % 16 == 0, "its stacks")
        for i in range(len(node.weights)):
            _same(self._matrix(node, i, k) == experts * each, "its stack")
        return n, k, used

    def _expert_linear(self, node: Node) -> int:
        self._named(node)
        n, _, used = self._stack(node, 0)
        return n * used

    def _expert_sum(self, node: Node) -> int:
        _same(len(node.weights) == 1, "its stack")
        return self._stack(node, 1, 1)[0]

    def _row_gate(self, node: Node) -> int:
        n = self._size(node, "n", step=4)
        self._reads(node, n, 1)
        return n

    def _logits(self, node: Node) -> int:
        v = self._size(node, "v")
        self._reads(node, v)
        _same(self._head and v == self._graph.attrs["vocab"], "the vocabulary")
        return v

    _softcap = _topk = _logits


def _same(true: bool, what: str) -> None:
    if not true:
        raise _Misfit(f"{what} does not fit")


def check(graph: Graph) -> None:
    """Raises BadModel when a size does not fit; what no kernel does is lowering's to name."""
    for key in ("vocab", "context", "layers"):
        value = graph.attrs.get(key)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= 1 << 30:
            raise BadModel(f"The compiled model's {key} makes no sense.")
    if any(name in _OWN or name.startswith(("kc.", "vc.")) for name in graph.weights):
        raise BadModel("The compiled model has a weight with the name of a buffer.")
    if not any(n.op == "topk" for n in graph.nodes):
        raise BadModel("The compiled model ends without a choice of tokens.")
    checking, users = _Check(graph), graph.users()
    for node in graph.nodes:
        if node.op != "topk" and node.output not in users:
            raise BadModel(f"The compiled model's node {node.name} is read by none.")
        try:
            checking.node(node)
        except _Misfit as e:
            raise BadModel(f"The compiled model's node {node.name} is damaged: {e}.") from None
        except (KeyError, TypeError, IndexError, ValueError, OverflowError):
            raise BadModel(f"The compiled model's node {node.name} is damaged.") from None
