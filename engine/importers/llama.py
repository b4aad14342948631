# SPDX-License-Identifier: Apache-2.0
"""GGUF of the architecture `llama` -> Graph, one node an operation as the architecture is written
down.

RMS norm before attention and before the feed-forward part, rotary positions on neighbouring pairs
(the order that GGUF's llama weights are in), grouped-query attention, SiLU-gated feed-forward part;
the output matrix may be the embedding table.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from engine.errors import BadModel, UnsupportedModel
from engine.graph import Attr, Graph, Node, Part, Weight
from engine.importers import ggml
from engine.importers.gguf import Gguf, TensorInfo

MAX_CONTEXT = 32768  # more than this is not served; the rotary table has this many rows at most
MAX_LAYERS = 1024
MAX_DIM = 256  # of a head: what the attention kernels hold
MAX_VOCAB = 1 << 21  # what topk counts


def import_graph(file: Gguf) -> Graph:
    """The Graph of a file; its weights name the file's tensors.

    Raises:
        BadModel: what the file says does not fit together.
        UnsupportedModel: another architecture or a variant of llama that is not served.
    """
    return _Importer(file).graph()


def rope_frequencies(file: Gguf, rope_dims: int) -> list[float]:
    """Turns per position of each pair, as radians: base^(-2i/R), over the scale and the file's
    factors.

    Raises:
        BadModel, UnsupportedModel
    """
    base = file.float("llama.rope.freq_base", 10000.0)
    # As llama.cpp reads it: linear unless said otherwise, and a factor of 0 means none.
    kind = file.text("llama.rope.scaling.type", "linear")
    if kind not in ("none", "linear"):
        raise UnsupportedModel(f"The model uses the rope scaling {kind!r}, which is not supported.")
    scale = file.float("llama.rope.scale_linear", 0.0)
    factor = file.float("llama.rope.scaling.factor", scale) or 1.0
    if kind == "none":
        factor = 1.0
    if not 1 <= base < 1e12 or not 1e-3 < factor < 1e6:
        raise BadModel("The model's rope base or factor makes no sense.")
    freqs = base ** (-np.arange(0, rope_dims, 2) / rope_dims) / factor
    tensor = file.tensors.get("rope_freqs.weight")
    if tensor is not None:
        if tensor.kind.name not in ("F32", "F16", "BF16") or tensor.shape != (1, rope_dims // 2):
            raise BadModel("The tensor rope_freqs.weight has the wrong type or shape.")
        factors = ggml.vector(tensor.kind, file.read(tensor, 0, 1)).astype(np.float64)
        if not (np.isfinite(factors).all() and (factors > 1e-6).all()):
            raise BadModel("The tensor rope_freqs.weight has impossible values.")
        freqs = freqs / factors
    return [float(f) for f in freqs]


class _Importer:
    def __init__(self, file: Gguf) -> None:
        self._file = file
        self._nodes: list[Node] = []
        self._weights: dict[str, Weight] = {}
        self._used: set[str] = set()

    def graph(self) -> Graph:
        file = self._file
        arch = file.text("general.architecture")
        if arch != "llama":
            raise UnsupportedModel(
                f"The model has the architecture {arch!r}; only llama is supported."
            )
        self._dimensions()
        self._embedding()
        x = "x"
        for i in range(self._layers):
            x = self._layer(i, x)
        self._head(x)
        self._all_used()
        attrs: dict[str, Attr] = {
            "arch": arch, "layers": self._layers, "hidden": self._hidden, "heads": self._heads,
            "kv_heads": self._kv, "dim": self._dim, "rope_dims": self._rope, "ffn": self._ffn,
            "vocab": self._vocab, "context": min(self._context, MAX_CONTEXT),
            "trained_context": self._context,
        }  # fmt: skip
        return Graph(tuple(self._nodes), self._weights, attrs).check()

    def _dimensions(self) -> None:
        file = self._file
        self._layers = self._bounded("llama.block_count", MAX_LAYERS)
        self._hidden = self._bounded("llama.embedding_length", 1 << 17)
        self._ffn = self._bounded("llama.feed_forward_length", 1 << 20)
        self._heads = self._bounded("llama.attention.head_count", 1 << 12)
        self._kv = self._bounded("llama.attention.head_count_kv", 1 << 12, self._heads)
        self._context = self._bounded("llama.context_length", 1 << 30)
        self._dim = self._bounded(
            "llama.attention.key_length", 1 << 12, max(1, self._hidden // self._heads)
        )
        value_dim = self._bounded("llama.attention.value_length", 1 << 12, self._dim)
        self._rope = self._bounded("llama.rope.dimension_count", 1 << 12, self._dim)
        self._eps = file.float("llama.attention.layer_norm_rms_epsilon")
        if file.int("llama.expert_count", 0) > 0:
            raise UnsupportedModel("The model is a mixture of experts, which is not supported.")
        if value_dim != self._dim:
            raise UnsupportedModel("The model's keys and values have different sizes.")
        if self._heads % self._kv or self._rope > self._dim or self._rope % 2:
            raise BadModel("The model's numbers of heads or sizes of heads make no sense.")
        if self._hidden % 32 or self._ffn % 32 or (self._heads * self._dim) % 32:
            raise UnsupportedModel("The model has a width that is no multiple of 32.")
        if self._dim % 4 or self._rope % 4 or self._dim > MAX_DIM:
            raise UnsupportedModel(
                f"The model's heads have {self._dim} elements, which is not supported."
            )
        if not 0 < self._eps < 1:
            raise BadModel("The model's normalisation epsilon makes no sense.")
        table = self._tensor("token_embd.weight")
        self._vocab = table.shape[0]
        if table.shape[1] != self._hidden or self._vocab > MAX_VOCAB:
            raise BadModel("The tensor token_embd.weight has the wrong shape.")

    def _bounded(self, key: str, most: int, default: int | None = None) -> int:
        value = self._file.int(key, default)
        if not 1 <= value <= most:
            raise BadModel(f"The GGUF file says {key} = {value}, which makes no sense.")
        return value

    def _tensor(self, name: str) -> TensorInfo:
        tensor = self._file.tensors.get(name)
        if tensor is None:
            raise BadModel(f"The GGUF file lacks the tensor {name}.")
        self._used.add(name)
        return tensor

    def _matrix(self, name: str, n: int, k: int) -> str:
        tensor = self._tensor(name)
        if tensor.shape != (n, k):
            rows, columns = tensor.shape
            raise BadModel(f"The tensor {name} has the shape {columns} x {rows}, not {k} x {n}.")
        self._weights[name] = Weight(name, (n, k), tensor.kind.name, (Part(name, n),))
        return name

    def _vector(self, name: str, k: int) -> str:
        tensor = self._tensor(name)
        if tensor.shape != (1, k) or tensor.kind.name not in ("F32", "F16", "BF16"):
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

    def _linear(self, name: str, weight: str, x: str, n: int, k: int) -> str:
        return self._add("linear", name, (x,), {"n": n, "k": k}, (self._matrix(weight, n, k),))

    def _norm(self, name: str, weight: str, x: str) -> str:
        vector = self._vector(weight, self._hidden)
        attrs: dict[str, Attr] = {"k": self._hidden, "eps": self._eps, "last": False}
        return self._add("rms_norm", name, (x,), attrs, (vector,))

    def _embedding(self) -> None:
        table = self._matrix("token_embd.weight", self._vocab, self._hidden)
        self._add("lookup", "x", ("ids",), {"k": self._hidden}, (table,))

    def _layer(self, i: int, x: str) -> str:
        p, w = f"l{i}.", f"blk.{i}."
        q_rows, kv_rows = self._heads * self._dim, self._kv * self._dim
        h = self._norm(p + "attn_norm", w + "attn_norm.weight", x)
        q = self._linear(p + "q", w + "attn_q.weight", h, q_rows, self._hidden)
        k = self._linear(p + "k", w + "attn_k.weight", h, kv_rows, self._hidden)
        v = self._linear(p + "v", w + "attn_v.weight", h, kv_rows, self._hidden)
        turn: dict[str, Attr] = {"dim": self._dim, "rope_dims": self._rope, "neox": False}
        q = self._add("rope", p + "q_rope", (q,), {**turn, "heads": self._heads})
        k = self._add("rope", p + "k_rope", (k,), {**turn, "heads": self._kv})
        sizes: dict[str, Attr] = {"heads": self._heads, "kv_heads": self._kv, "dim": self._dim}
        a = self._add("attention", p + "attention", (q, k, v), {**sizes, "layer": i})
        o = self._linear(p + "o", w + "attn_output.weight", a, self._hidden, q_rows)
        x = self._add("add", p + "x_attn", (x, o), {})
        h = self._norm(p + "ffn_norm", w + "ffn_norm.weight", x)
        gate = self._linear(p + "gate", w + "ffn_gate.weight", h, self._ffn, self._hidden)
        up = self._linear(p + "up", w + "ffn_up.weight", h, self._ffn, self._hidden)
        s = self._add("silu", p + "silu", (gate,), {})
        m = self._add("mul", p + "gated", (s, up), {})
        down = self._linear(p + "down", w + "ffn_down.weight", m, self._hidden, self._ffn)
        return self._add("add", p + "x_ffn", (x, down), {})

    def _head(self, x: str) -> None:
        h = self._norm("output_norm", "output_norm.weight", x)
        tied = "output.weight" not in self._file.tensors
        name = "token_embd.weight" if tied else "output.weight"
        logits = self._linear("logits", name, h, self._vocab, self._hidden)
        self._add("topk", "topk", (logits,), {"v": self._vocab})

    def _all_used(self) -> None:
        """A tensor that nobody reads means a model that this importer does not understand (biases,
        say).
        """
        rest = set(self._file.tensors) - self._used - {"rope_freqs.weight"}
        # Some old files carry a copy of the frequencies in every layer.
        rest = {name for name in rest if not name.endswith("attn_rot_embd")}
        if rest:
            raise UnsupportedModel(f"The model has the tensor {min(rest)}, which is not supported.")
