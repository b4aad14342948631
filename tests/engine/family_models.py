# SPDX-License-Identifier: Apache-2.0
"""Tiny random models of each family, as Hugging Face folders and as GGUF files.

Weights are functions of their names, so that tests/data/family_logits.py, which runs transformers,
and the tests, which do not, have the same. All are exact as halves.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
IDS = [
    5,
    17,
    260,
    299,
    3,
    44,
    44,
    150,
    1,
    280,
    99,
    12,
    13,
    14,
    200,
    7,
    7,
    31,
    62,
    250,
    8,
    90,
    2,
    77,
]
VOCAB = 320

_BASE: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 96,
    "rms_norm_eps": 1e-5, "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2,
    "pad_token_id": 0, "torch_dtype": "float32",
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A model: its config.json, GGUF's name of the architecture ("" where it has none), and the
    context that a session needs to have (0: any).
    """

    config: Mapping[str, Any]
    arch: str = ""
    context: int = 0


def _case(kind: str, arch: str = "", context: int = 0, **config: Any) -> Case:
    name = {
        "gemma3_text": "Gemma3", "qwen2_moe": "Qwen2Moe", "qwen3_moe": "Qwen3Moe", "olmoe": "Olmoe",
    }.get(kind)  # fmt: skip
    name = name or kind.capitalize()
    own = {"model_type": kind, "architectures": [f"{name}ForCausalLM"], **config}
    return Case({**_BASE, **own}, arch, context)


_LONG = {
    "type": "longrope",
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7],
    "long_factor": [1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0],
}
_LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 24}
_GEMMA = {
    "head_dim": 32, "hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 32,
    "sliding_window": 8, "tie_word_embeddings": True,
}  # fmt: skip

CASES: dict[str, Case] = {
    "llama": _case("llama", "llama", rope_theta=10000.0),
    "llama 3.1": _case("llama", "llama", rope_theta=5e5, rope_scaling=_LLAMA3),
    "llama tied, linear": _case(
        "llama",
        "llama",
        tie_word_embeddings=True,
        rope_scaling={"rope_type": "linear", "factor": 4.0},
    ),
    "mistral": _case("mistral", "llama", sliding_window=8, head_dim=32),
    "mixtral": _case(
        "mixtral", "llama", num_local_experts=4, num_experts_per_tok=2, rope_theta=1e6
    ),
    "qwen2": _case("qwen2", "qwen2", rope_theta=1e6, tie_word_embeddings=True),
    "qwen2 yarn": _case("qwen2", "qwen2", rope_scaling=_YARN),
    "qwen2 window": _case(
        "qwen2", "", use_sliding_window=True, sliding_window=8, max_window_layers=1
    ),
    "qwen2_moe": _case(
        "qwen2_moe", "qwen2moe", num_experts=6, num_experts_per_tok=2, norm_topk_prob=False,
        moe_intermediate_size=32, shared_expert_intermediate_size=160, decoder_sparse_step=1,
        mlp_only_layers=[], rope_theta=1e6,
    ),
    "qwen3": _case("qwen3", "qwen3", head_dim=32, rope_theta=1e6),
    "qwen3_moe": _case(
        "qwen3_moe", "qwen3moe", head_dim=32, num_experts=8, num_experts_per_tok=3,
        moe_intermediate_size=32, norm_topk_prob=True, decoder_sparse_step=1, mlp_only_layers=[],
    ),
    "olmoe": _case("olmoe", "olmoe", num_experts=8, num_experts_per_tok=3, norm_topk_prob=False),
    "phi3": _case("phi3", "phi3", sliding_window=10),
    "phi3 short": _case(
        "phi3", "phi3", 48, rope_scaling=_LONG, original_max_position_embeddings=48
    ),
    "phi3 long": _case(
        "phi3", "phi3", rope_scaling=_LONG, original_max_position_embeddings=16
    ),
    "phi3 partial": _case("phi3", "phi3", partial_rotary_factor=0.5),
    "gemma2": _case(
        "gemma2", "gemma2", attn_logit_softcapping=2.0, final_logit_softcapping=3.0, **_GEMMA
    ),
    "gemma3": _case(
        "gemma3_text", "gemma3", num_hidden_layers=7, rope_theta=1e6, rope_local_base_freq=10000.0,
        **_GEMMA,
    ),
    "gemma3 scaled": _case(
        "gemma3_text", "gemma3", num_hidden_layers=7, rope_theta=1e6,
        rope_scaling={"rope_type": "linear", "factor": 8.0}, **_GEMMA,
    ),
}  # fmt: skip


def shapes(case: Case) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of a model's tensors, as its repository would have them."""
    c = case.config
    kind, hidden, ffn = c["model_type"], c["hidden_size"], c["intermediate_size"]
    heads, kv_heads = c["num_attention_heads"], c["num_key_value_heads"]
    dim = c.get("head_dim") or hidden // heads
    q, kv = heads * dim, kv_heads * dim
    yield "model.embed_tokens.weight", (VOCAB, hidden)
    yield "model.norm.weight", (hidden,)
    if not c["tie_word_embeddings"]:
        yield "lm_head.weight", (VOCAB, hidden)
    norms = ["input_layernorm", "post_attention_layernorm"]
    if kind.startswith("gemma"):
        norms += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
    for i in range(c["num_hidden_layers"]):
        p = f"model.layers.{i}."
        for norm in norms:
            yield f"{p}{norm}.weight", (hidden,)
        if kind == "phi3":
            yield p + "self_attn.qkv_proj.weight", (q + 2 * kv, hidden)
        else:
            for name, n in (("q", q), ("k", kv), ("v", kv)):
                yield f"{p}self_attn.{name}_proj.weight", (n, hidden)
                if kind in ("qwen2", "qwen2_moe"):
                    yield f"{p}self_attn.{name}_proj.bias", (n,)
        if kind in ("qwen3", "qwen3_moe", "gemma3_text", "olmoe"):
            for name, n in (("q", q), ("k", kv)):
                yield f"{p}self_attn.{name}_norm.weight", (n if kind == "olmoe" else dim,)
        yield p + "self_attn.o_proj.weight", (hidden, q)
        experts = c.get("num_experts") or c.get("num_local_experts")
        if not experts:
            if kind == "phi3":
                yield p + "mlp.gate_up_proj.weight", (2 * ffn, hidden)
            else:
                yield p + "mlp.gate_proj.weight", (ffn, hidden)
                yield p + "mlp.up_proj.weight", (ffn, hidden)
            yield p + "mlp.down_proj.weight", (hidden, ffn)
            continue
        f = c.get("moe_intermediate_size", ffn)
        moe = p + ("block_sparse_moe." if kind == "mixtral" else "mlp.")
        names = ("w1", "w3", "w2") if kind == "mixtral" else ("gate_proj", "up_proj", "down_proj")
        yield moe + "gate.weight", (experts, hidden)
        for e in range(experts):
            for name, shape in zip(names, ((f, hidden), (f, hidden), (hidden, f)), strict=True):
                yield f"{moe}experts.{e}.{name}.weight", shape
        if shared := c.get("shared_expert_intermediate_size"):
            for name, shape in zip(
                names, ((shared, hidden), (shared, hidden), (hidden, shared)), strict=True
            ):
                yield f"{moe}shared_expert.{name}.weight", shape
            yield moe + "shared_expert_gate.weight", (1, hidden)


def values(case: Case, name: str, shape: tuple[int, ...]) -> Array:
    """A tensor's values: float32 that halves hold exactly."""
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    x = rng.standard_normal(shape)
    if name.endswith("bias"):
        x *= 0.3
    elif len(shape) == 1:
        x = 0.2 * x + (0 if str(case.config["model_type"]).startswith("gemma") else 1)
    else:
        x *= 2 / np.sqrt(shape[-1])
    return x.astype(np.float16).astype(np.float32)


def write_folder(path: Path, case: Case, dtype: str = "F32", files: int = 1) -> Path:
    """Writes config.json and safetensors, over several files with an index when asked for."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(dict(case.config)))
    tensors = {name: values(case, name, shape) for name, shape in shapes(case)}
    names = sorted(tensors)
    if files == 1:
        write_safetensors(path / "model.safetensors", tensors, dtype)
        return path
    index = {}
    for i in range(files):
        file = f"model-{i + 1:05}-of-{files:05}.safetensors"
        write_safetensors(path / file, {n: tensors[n] for n in names[i::files]}, dtype)
        index.update(dict.fromkeys(names[i::files], file))
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    return path


def write_safetensors(path: Path, tensors: Mapping[str, Array], dtype: str = "F32") -> None:
    """A safetensors file of the format's description."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    data = b""
    for name, value in tensors.items():
        raw = _encoded(value, dtype)
        span = [len(data), len(data) + len(raw)]
        header[name] = {"dtype": dtype, "shape": list(value.shape), "data_offsets": span}
        data += raw
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def _encoded(value: Array, dtype: str) -> bytes:
    if dtype == "BF16":
        return (value.astype(np.float32).view(np.uint32) >> 16).astype("<u2").tobytes()
    return value.astype({"F32": "<f4", "F16": "<f2"}[dtype]).tobytes()


def write_gguf(path: Path, case: Case, kind: str = "F32") -> Path:
    """The model as llama.cpp's converter would write it, with a tokenizer of bytes."""
    c = case.config
    w = gguf.GGUFWriter(path, case.arch)
    w.add_name("tiny")
    w.add_context_length(c["max_position_embeddings"])
    w.add_embedding_length(c["hidden_size"])
    w.add_block_count(c["num_hidden_layers"])
    w.add_feed_forward_length(c["intermediate_size"])
    w.add_head_count(c["num_attention_heads"])
    w.add_head_count_kv(c["num_key_value_heads"])
    w.add_layer_norm_rms_eps(c["rms_norm_eps"])
    dim = c.get("head_dim") or c["hidden_size"] // c["num_attention_heads"]
    w.add_key_length(dim)
    w.add_value_length(dim)
    w.add_rope_dimension_count(int(dim * c.get("partial_rotary_factor", 1)))
    w.add_rope_freq_base(c.get("rope_theta", 10000.0))
    if c.get("sliding_window"):
        w.add_sliding_window(c["sliding_window"])
    if "attn_logit_softcapping" in c:
        w.add_attn_logit_softcapping(c["attn_logit_softcapping"])
        w.add_final_logit_softcapping(c["final_logit_softcapping"])
    experts = c.get("num_experts") or c.get("num_local_experts")
    if experts:
        w.add_expert_count(experts)
        w.add_expert_used_count(c["num_experts_per_tok"])
        if "moe_intermediate_size" in c:
            w.add_expert_feed_forward_length(c["moe_intermediate_size"])
        if "shared_expert_intermediate_size" in c:
            w.add_expert_shared_feed_forward_length(c["shared_expert_intermediate_size"])
    _write_rope(w, case)
    write_tokenizer(w)
    for name, value in _gguf_tensors(case).items():
        q = gguf.GGMLQuantizationType.F32 if value.ndim == 1 else gguf.GGMLQuantizationType[kind]
        w.add_tensor(name, gguf.quants.quantize(value, q), raw_dtype=q)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    return path


def write_tokenizer(w: gguf.GGUFWriter) -> None:
    """Single bytes and words w0, w1 …"""
    words = ["▁".encode(), *(f"w{i}".encode() for i in range(VOCAB - 260))]
    w.add_tokenizer_model("llama")
    w.add_token_list([b"<unk>", b"<s>", b"</s>"] + [b"<0x%02X>" % i for i in range(256)] + words)
    w.add_token_scores([0.0] * VOCAB)
    w.add_token_types([2, 3, 3] + [6] * 256 + [1] * len(words))
    w.add_bos_token_id(1)
    w.add_eos_token_id(2)


def _write_rope(w: gguf.GGUFWriter, case: Case) -> None:
    c = case.config
    how = c.get("rope_scaling") or {}
    kind = how.get("rope_type") or how.get("type")
    dim = c.get("head_dim") or c["hidden_size"] // c["num_attention_heads"]
    if kind == "linear":
        w.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        w.add_rope_scaling_factor(how["factor"])
    elif kind == "yarn":
        w.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        w.add_rope_scaling_factor(how["factor"])
        w.add_rope_scaling_orig_ctx_len(how["original_max_position_embeddings"])
    elif kind == "longrope":
        original = c["original_max_position_embeddings"]
        longer = c["max_position_embeddings"] / original
        w.add_rope_scaling_orig_ctx_len(original)
        w.add_rope_scaling_attn_factors(float(np.sqrt(1 + np.log(longer) / np.log(original))))
        for name in ("long", "short"):
            factors = np.asarray(how[f"{name}_factor"], np.float32)
            w.add_tensor(f"rope_factors_{name}.weight", factors)
    elif kind == "llama3":
        # The converter's loop over pairs, by wave lengths.
        original, low, high = (
            how[k]
            for k in ("original_max_position_embeddings", "low_freq_factor", "high_freq_factor")
        )
        each: list[float] = []
        for freq in 1.0 / c["rope_theta"] ** (np.arange(0, dim, 2) / dim):
            wave = 2 * np.pi / freq
            smooth = (original / wave - low) / (high - low)
            if wave < original / high:
                each.append(1.0)
            elif wave > original / low:
                each.append(how["factor"])
            else:
                each.append(1 / ((1 - smooth) / how["factor"] + smooth))
        w.add_tensor("rope_freqs.weight", np.asarray(each, np.float32))


def _gguf_tensors(case: Case) -> dict[str, Array]:
    """Tensors under the names of the gguf package's own table, in GGUF's order of rows."""
    c = case.config
    arch = next(a for a, n in gguf.MODEL_ARCH_NAMES.items() if n == case.arch)
    table = gguf.get_tensor_name_map(arch, c["num_hidden_layers"])
    found: dict[str, Array] = {}
    stacks: dict[str, list[Array]] = {}
    for name, shape in shapes(case):
        value = values(case, name, shape)
        expert = re.sub(r"\.experts\.\d+\.", ".experts.", name)
        if str(c["model_type"]).startswith("gemma") and name.endswith("norm.weight"):
            value = value + 1
        if case.arch == "llama" and (match := re.search(r"\.([qk])_proj\.weight$", name)):
            heads = c["num_attention_heads" if match[1] == "q" else "num_key_value_heads"]
            halves = value.reshape(heads, 2, -1, shape[1])
            value = halves.swapaxes(1, 2).reshape(shape)
        if name.endswith("shared_expert_gate.weight"):
            value = value[0]
        mapped = table.get_name(expert, try_suffixes=(".weight", ".bias"))
        assert mapped is not None, name
        if expert != name:
            stacks.setdefault(mapped, []).append(value)
        else:
            found[mapped] = value
    return found | {name: np.stack(stack) for name, stack in stacks.items()}


def write_tokenizer_json(path: Path) -> Path:
    """The tokenizer of `write_tokenizer` as tokenizer.json; returns the folder."""
    words = ["▁", *(f"w{i}" for i in range(VOCAB - 260))]
    texts = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), *words]
    added = [{"id": i, "content": texts[i], "special": True, "normalized": False} for i in range(3)]
    model = {
        "type": "BPE", "vocab": {text: i for i, text in enumerate(texts)}, "merges": [],
        "unk_token": "<unk>", "byte_fallback": True,
    }  # fmt: skip
    normalizer = {
        "type": "Sequence",
        "normalizers": [
            {"type": "Prepend", "prepend": "▁"},
            {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
        ],
    }
    data = {"model": model, "added_tokens": added, "normalizer": normalizer}
    (path / "tokenizer.json").write_text(json.dumps(data), encoding="utf-8")
    config = {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True}
    (path / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return path
