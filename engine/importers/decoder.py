# SPDX-License-Identifier: Apache-2.0
"""A decoder's description and tensors -> Graph, one node an operation as the architecture is
written down.

All families are one form: RMS norm, attention with grouped queries and rotary positions, the
residual sum, RMS norm, a gated feed-forward part (or experts), the residual sum. What a family has
beyond that shows in its tensors (biases, norms of heads, norms behind a block, fused matrices) or
in its Config (windows, caps, factors). A tensor that nobody reads means a model that is not
understood, and is refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from engine.errors import BadModel, UnsupportedModel
from engine.graph import Attr, Graph, Node, Part, Weight
from engine.importers.rope import Rope
from engine.importers.source import Source, TensorInfo
from kernels.route.op import MAX_USED

MAX_CONTEXT = 32768  # more than this is not served; the rotary tables have this many rows at most
MAX_LAYERS = 1024
MAX_DIM = 256  # of a head: what the attention kernels hold
MAX_VOCAB = 1 << 21  # what topk counts
MAX_EXPERTS = 1 << 10
MAX_FFN = 1 << 20

ROPE, LONG, LOCAL = "rope", "rope_long", "rope_local"  # rotary tables


@dataclass(frozen=True)
class Config:
    """What the tensors alone do not say. Sizes are counts of elements.

    `ropes`: the table `rope`; `rope_long` for sessions of more than `short_context` tokens;
    `rope_local` for the layers that see `window` positions (`local`, a flag a layer) where those
    differ. A window of 0 is none, a cap of 0 is none.
    """

    arch: str
    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    dim: int
    rope_dims: int
    context: int
    eps: float
    ropes: Mapping[str, Rope]
    neox: bool = True
    act: str = "silu"
    scale: float = 0.0  # of attention's scores; 0: dim^-0.5
    embed_scale: float = 1.0
    window: int = 0
    local: tuple[bool, ...] = ()
    short_context: int = 0
    attention_cap: float = 0.0
    logit_cap: float = 0.0
    experts: int = 0
    used: int = 0
    norm_shares: bool = False
    ignored: frozenset[str] = field(default_factory=frozenset)  # tensors that need no reader


@dataclass(frozen=True)
class Model:
    """An imported model: its graph names tensors of `source` and tables of `ropes`."""

    graph: Graph
    source: Source
    ropes: Mapping[str, Rope]


def build(config: Config, source: Source) -> Model:
    """The model of a description and tensors.

    Raises:
        BadModel: they do not fit together.
        UnsupportedModel: a size or a tensor that is not served.
    """
    _check(config)
    return Model(_Builder(config, source).graph(), source, config.ropes)


def _check(c: Config) -> None:
    bounds = (
        ("layers", c.layers, MAX_LAYERS),
        ("elements of a token", c.hidden, 1 << 17),
        ("feed-forward elements", c.ffn, MAX_FFN),
        ("heads", c.heads, 1 << 12),
        ("key heads", c.kv_heads, 1 << 12),
        ("elements of a head", c.dim, 1 << 12),
        ("rotated elements", c.rope_dims, 1 << 12),
        ("tokens of context", c.context, 1 << 30),
    )
    for what, value, most in bounds:
        if not 1 <= value <= most:
            raise BadModel(f"The model claims {value} {what}, which makes no sense.")
    if c.heads % c.kv_heads or c.rope_dims > c.dim or c.rope_dims % 2:
        raise BadModel("The model's numbers of heads or sizes of heads make no sense.")
    if c.hidden % 32 or c.ffn % 32 or (c.heads * c.dim) % 32:
        raise UnsupportedModel("The model has a width that is no multiple of 32.")
    if c.dim % 4 or c.rope_dims % 4 or c.dim > MAX_DIM:
        raise UnsupportedModel(f"The model's heads have {c.dim} elements, which is not supported.")
    if not 0 < c.eps < 1:
        raise BadModel("The model's normalisation epsilon makes no sense.")
    if not (c.window >= 0 and 0 <= c.attention_cap < 1e6 and 0 <= c.logit_cap < 1e6):
        raise BadModel("The model's window or soft caps make no sense.")
    if not (0 <= c.scale < 100 and 0 < c.embed_scale < 1e6):
        raise BadModel("The model's scales make no sense.")
    if c.local and len(c.local) != c.layers:
        raise BadModel("The model's windows do not match its layers.")
    if c.experts and not (1 <= c.used <= min(c.experts, MAX_USED) and c.experts <= MAX_EXPERTS):
        raise UnsupportedModel(
            f"The model uses {c.used} of {c.experts} experts, which is not supported."
        )


class _Builder:
    def __init__(self, config: Config, source: Source) -> None:
        self._c = config
        self._source = source
        self._nodes: list[Node] = []
        self._weights: dict[str, Weight] = {}
        self._used: set[str] = set()

    def graph(self) -> Graph:
        c = self._c
        table = self._tensor("token_embd.weight")
        vocab = table.shape[0]
        if table.shape[1] != c.hidden or vocab > MAX_VOCAB:
            raise BadModel("The tensor token_embd.weight has the wrong shape.")
        weight = self._matrix("token_embd.weight", vocab, c.hidden)
        attrs: dict[str, Attr] = {"k": c.hidden, "scale": c.embed_scale}
        x = self._add("lookup", "x", ("ids",), attrs, (weight,))
        for i in range(c.layers):
            x = self._attention(i, x)
            x = self._experts(i, x) if c.experts else self._feed_forward(i, x)
        self._head(x, vocab)
        self._all_used()
        attrs = {
            "arch": c.arch, "layers": c.layers, "hidden": c.hidden, "heads": c.heads,
            "kv_heads": c.kv_heads, "dim": c.dim, "rope_dims": c.rope_dims, "ffn": c.ffn,
            "vocab": vocab, "context": min(c.context, MAX_CONTEXT), "trained_context": c.context,
        }  # fmt: skip
        if c.experts:
            attrs |= {"experts": c.experts, "experts_used": c.used}
        return Graph(tuple(self._nodes), self._weights, attrs).check()

    # Tensors and nodes.

    def _has(self, name: str) -> bool:
        return name in self._source.tensors

    def _tensor(self, name: str) -> TensorInfo:
        tensor = self._source.tensors.get(name)
        if tensor is None:
            raise BadModel(f"The model lacks the tensor {name}.")
        self._used.add(name)
        return tensor

    def _matrix(self, name: str, n: int, k: int, row: int = 0, whole: int = 0) -> str:
        """Rows of a tensor as a weight: all n of it, or n from `row` on of `whole`."""
        tensor = self._tensor(name)
        if tensor.shape != (whole or n, k):
            rows, columns = tensor.shape
            raise BadModel(
                f"The tensor {name} has the shape {columns} x {rows}, not {k} x {whole or n}."
            )
        weight = f"{name}.{row}" if whole else name
        self._weights[weight] = Weight(weight, (n, k), tensor.kind.name, (Part(name, n, row),))
        return weight

    def _vector(self, name: str, k: int) -> str:
        tensor = self._tensor(name)
        if tensor.shape != (1, k) or tensor.kind.block != 1:
            raise BadModel(f"The tensor {name} has the wrong type or shape.")
        self._weights[name] = Weight(name, (1, k), tensor.kind.name, (Part(name, 1),), "f32")
        return name

    def _add(
        self,
        op: str,
        name: str,
        inputs: tuple[str, ...],
        attrs: Mapping[str, Attr],
        weights: tuple[str, ...] = (),
    ) -> str:
        self._nodes.append(Node(name, op, inputs, name, weights, attrs))
        return name

    def _product(self, name: str, weight: str, x: str) -> str:
        n, k = self._weights[weight].shape
        return self._add("linear", name, (x,), {"n": n, "k": k}, (weight,))

    def _linear(self, name: str, weight: str, x: str, n: int, k: int) -> str:
        return self._product(name, self._matrix(weight, n, k), x)

    def _norm(self, name: str, weight: str, x: str) -> str:
        vector = self._vector(weight, self._c.hidden)
        attrs: dict[str, Attr] = {"k": self._c.hidden, "eps": self._c.eps, "last": False}
        return self._add("rms_norm", name, (x,), attrs, (vector,))

    def _behind(self, name: str, weight: str, x: str) -> str:
        """A block's result, normed where the model has a norm behind the block."""
        return self._norm(name, weight, x) if self._has(weight) else x

    # Parts of a layer.

    def _attention(self, i: int, x: str) -> str:
        c, p, w = self._c, f"l{i}.", f"blk.{i}."
        q_rows, kv_rows = c.heads * c.dim, c.kv_heads * c.dim
        h = self._norm(p + "attn_norm", w + "attn_norm.weight", x)
        rows = {"q": (0, q_rows), "k": (q_rows, kv_rows), "v": (q_rows + kv_rows, kv_rows)}
        values = {}
        for name, (row, n) in rows.items():
            if self._has(w + "attn_qkv.weight"):
                fused = w + "attn_qkv.weight"
                weight = self._matrix(fused, n, c.hidden, row, q_rows + 2 * kv_rows)
            else:
                weight = self._matrix(f"{w}attn_{name}.weight", n, c.hidden)
            values[name] = self._product(p + name, weight, h)
            bias = f"{w}attn_{name}.bias"
            if self._has(bias):
                vector = self._vector(bias, n)
                values[name] = self._add(
                    "bias", f"{p}{name}_bias", (values[name],), {"n": n}, (vector,)
                )
        local = bool(c.window) and (c.local[i] if c.local else True)
        for name, heads in (("q", c.heads), ("k", c.kv_heads)):
            value = self._head_norm(p + name, f"{w}attn_{name}_norm.weight", values[name], heads)
            values[name] = self._rope(p + name, value, heads, local)
        attrs: dict[str, Attr] = {
            "heads": c.heads, "kv_heads": c.kv_heads, "dim": c.dim, "layer": i,
            "scale": c.scale or c.dim**-0.5, "window": c.window if local else 0,
            "softcap": c.attention_cap,
        }  # fmt: skip
        a = self._add("attention", p + "attention", tuple(values.values()), attrs)
        o = self._linear(p + "o", w + "attn_output.weight", a, c.hidden, q_rows)
        o = self._behind(p + "o_norm", w + "post_attention_norm.weight", o)
        return self._add("add", p + "x_attn", (x, o), {})

    def _head_norm(self, name: str, weight: str, x: str, heads: int) -> str:
        """Norm of each head, or of all heads together: the vector's length tells."""
        if not self._has(weight):
            return x
        c = self._c
        whole = self._source.tensors[weight].shape[1] != c.dim
        vector = self._vector(weight, heads * c.dim if whole else c.dim)
        attrs: dict[str, Attr] = {"heads": heads, "dim": c.dim, "eps": c.eps, "whole": whole}
        return self._add("head_norm", name + "_norm", (x,), attrs, (vector,))

    def _rope(self, name: str, x: str, heads: int, local: bool) -> str:
        c = self._c
        local = local and LOCAL in c.ropes
        attrs: dict[str, Attr] = {
            "heads": heads, "dim": c.dim, "rope_dims": c.rope_dims, "neox": c.neox,
            "table": LOCAL if local else ROPE,
        }  # fmt: skip
        if LONG in c.ropes and not local:
            attrs |= {"long_table": LONG, "short_context": c.short_context}
        return self._add("rope", name + "_rope", (x,), attrs)

    def _feed_forward(self, i: int, x: str) -> str:
        c, p, w = self._c, f"l{i}.", f"blk.{i}."
        h = self._norm(p + "ffn_norm", w + "ffn_norm.weight", x)
        if self._has(w + "ffn_gate.weight"):
            weights = [self._matrix(f"{w}ffn_{n}.weight", c.ffn, c.hidden) for n in ("gate", "up")]
        else:  # gate above up in one matrix
            fused, both = w + "ffn_up.weight", 2 * c.ffn
            weights = [self._matrix(fused, c.ffn, c.hidden, row, both) for row in (0, c.ffn)]
        gate, up = (
            self._product(p + name, weight, h)
            for name, weight in zip(("gate", "up"), weights, strict=True)
        )
        s = self._add(c.act, p + c.act, (gate,), {})
        m = self._add("mul", p + "gated", (s, up), {})
        down = self._linear(p + "down", w + "ffn_down.weight", m, c.hidden, c.ffn)
        down = self._behind(p + "down_norm", w + "post_ffw_norm.weight", down)
        return self._add("add", p + "x_ffn", (x, down), {})

    def _experts(self, i: int, x: str) -> str:
        c, p, w = self._c, f"l{i}.", f"blk.{i}."
        h = self._norm(p + "ffn_norm", w + "ffn_norm.weight", x)
        router = self._linear(p + "router", w + "ffn_gate_inp.weight", h, c.experts, c.hidden)
        attrs: dict[str, Attr] = {"experts": c.experts, "used": c.used, "norm": c.norm_shares}
        route = self._add("route", p + "route", (router,), attrs)

        def product(op: str, name: str, tensor: str, value: str, n: int, k: int) -> str:
            weight = self._matrix(f"{w}{tensor}.weight", c.experts * n, k)
            sizes: dict[str, Attr] = {"n": n, "k": k, "experts": c.experts, "used": c.used}
            return self._add(op, p + name, (value, route), sizes, (weight,))

        gate = product("expert_linear", "gate", "ffn_gate_exps", h, c.ffn, c.hidden)
        up = product("expert_linear", "up", "ffn_up_exps", h, c.ffn, c.hidden)
        s = self._add(c.act, p + c.act, (gate,), {})
        m = self._add("mul", p + "gated", (s, up), {})
        down = product("expert_sum", "down", "ffn_down_exps", m, c.hidden, c.ffn)
        x = self._add("add", p + "x_ffn", (x, down), {})
        return self._shared_expert(i, x, h) if self._has(w + "ffn_gate_shexp.weight") else x

    def _shared_expert(self, i: int, x: str, h: str) -> str:
        """An expert that every token has, by as much as a gate says: that scales what the expert's
        last product reads, which is the same as to scale the result.
        """
        c, p, w = self._c, f"l{i}.shared.", f"blk.{i}."
        f = self._tensor(w + "ffn_gate_shexp.weight").shape[0]
        if f % 32 or f > MAX_FFN:
            raise UnsupportedModel("The model has a width that is no multiple of 32.")
        gate, up = (
            self._linear(p + name, f"{w}ffn_{name}_shexp.weight", h, f, c.hidden)
            for name in ("gate", "up")
        )
        s = self._add(c.act, p + c.act, (gate,), {})
        m = self._add("mul", p + "gated", (s, up), {})
        score = self._linear(p + "score", w + "ffn_gate_inp_shexp.weight", h, 1, c.hidden)
        m = self._add("row_gate", p + "row_gate", (m, score), {"n": f})
        down = self._linear(p + "down", w + "ffn_down_shexp.weight", m, c.hidden, f)
        return self._add("add", p + "x_shared", (x, down), {})

    def _head(self, x: str, vocab: int) -> None:
        c = self._c
        h = self._norm("output_norm", "output_norm.weight", x)
        name = "output.weight" if self._has("output.weight") else "token_embd.weight"
        logits = self._linear("logits", name, h, vocab, c.hidden)
        if c.logit_cap:
            attrs: dict[str, Attr] = {"v": vocab, "cap": c.logit_cap}
            logits = self._add("softcap", "capped", (logits,), attrs)
        self._add("topk", "topk", (logits,), {"v": vocab})

    def _all_used(self) -> None:
        rest = set(self._source.tensors) - self._used - self._c.ignored
        # Some old files carry a copy of the frequencies in every layer.
        rest = {name for name in rest if not name.endswith("attn_rot_embd")}
        if rest:
            raise UnsupportedModel(f"The model has the tensor {min(rest)}, which is not supported.")
