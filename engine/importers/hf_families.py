# SPDX-License-Identifier: Apache-2.0
"""config.json of a Hugging Face folder -> Config, family by family, as transformers reads it
(models/*/configuration_*.py, modeling_rope_utils.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from engine.errors import BadModel, UnsupportedModel
from engine.importers import rope
from engine.importers.decoder import LOCAL, LONG, ROPE, Config, Model, build
from engine.importers.hf import Folder
from engine.importers.rope import Rope

Json = Mapping[str, Any]
_ACTS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu"}
_REQUIRED = object()


def import_folder(folder: Folder) -> Model:
    """The model of a folder, which has to stay open as long as its weights are read.

    Raises:
        BadModel: what is in it does not fit together.
        UnsupportedModel: a kind of model, or a variant of one, that is not served.
    """
    keys = _Keys(folder.config)
    kind = keys.text("model_type")
    more = _FAMILIES.get(kind)
    if more is None:
        known = ", ".join(sorted(_FAMILIES))
        raise UnsupportedModel(
            f"The model is of the type {kind!r}, which is not supported (those that are: {known})."
        )
    return build(Config(**{**_common(keys, kind), **more(keys)}), folder)


class _Keys:
    """Members of a JSON object; null counts as missing."""

    def __init__(self, data: Json, where: str = "config.json") -> None:
        self.data, self._where = data, where

    def _get(self, key: str, default: Any, good: Callable[[Any], bool], what: str) -> Any:
        value = self.data.get(key)
        value = default if value is None else value
        if value is _REQUIRED:
            raise BadModel(f"The model's {self._where} lacks {key}.")
        if value is not None and not good(value):
            raise BadModel(f"The model's {self._where} has something other than {what} as {key}.")
        return value

    def numbers(self, key: str, length: int) -> np.ndarray[Any, np.dtype[np.float64]]:
        def good(v: Any) -> bool:
            return (
                isinstance(v, list)
                and len(v) == length
                and all(type(n) in (int, float) and abs(n) < 1e30 for n in v)
            )

        return np.asarray(self._get(key, _REQUIRED, good, f"{length} numbers"), np.float64)

    def int(self, key: str, default: Any = _REQUIRED) -> int:
        def good(v: Any) -> bool:
            return type(v) is int and 0 <= v < 1 << 53  # what a float can be made of

        value: int = self._get(key, default, good, "a whole number")
        return value

    def float(self, key: str, default: Any = _REQUIRED) -> float:
        def good(v: Any) -> bool:
            return type(v) in (int, float) and abs(v) < 1e30

        return float(self._get(key, default, good, "a number"))

    def text(self, key: str, default: Any = _REQUIRED) -> str:
        value: str = self._get(key, default, lambda v: isinstance(v, str), "a text")
        return value

    def flag(self, key: str, default: bool) -> bool:
        value: bool = self._get(key, default, lambda v: isinstance(v, bool), "true or false")
        return value

    def under(self, key: str) -> _Keys | None:
        """The members of an object in this one."""
        value = self._get(key, None, lambda v: isinstance(v, dict), "an object")
        return None if value is None else _Keys(value, f"{self._where}, {key},")


def _dims(keys: _Keys) -> tuple[int, int]:
    """Elements of a head, and how many of them are rotated."""
    dim = keys.int("head_dim", max(1, keys.int("hidden_size") // max(1, _heads(keys))))
    parameters = keys.under("rope_parameters")
    partial = (parameters or keys).float("partial_rotary_factor", 1.0)
    return dim, int(dim * partial)


def _heads(keys: _Keys) -> int:
    return keys.int("num_attention_heads")


def _common(keys: _Keys, kind: str) -> dict[str, Any]:
    act = keys.text("hidden_activation", keys.data.get("hidden_act") or "silu")
    if act not in _ACTS:
        raise UnsupportedModel(f"The model uses the activation {act!r}, which is not supported.")
    dim, rope_dims = _dims(keys)
    parameters = keys.under("rope_parameters") or keys.under("rope_scaling") or _Keys({})
    usual = 1e6 if kind == "mixtral" else 1e4
    base = parameters.float("rope_theta", keys.float("rope_theta", usual))
    return {
        "arch": kind,
        "layers": keys.int("num_hidden_layers"),
        "hidden": keys.int("hidden_size"),
        "ffn": keys.int("intermediate_size"),
        "heads": _heads(keys),
        "kv_heads": keys.int("num_key_value_heads", _heads(keys)),
        "dim": dim,
        "rope_dims": rope_dims,
        "context": keys.int("max_position_embeddings"),
        "eps": keys.float("rms_norm_eps", 1e-6),
        "act": _ACTS[act],
        **_ropes(keys, parameters, base, rope_dims),
    }


def _ropes(keys: _Keys, how: _Keys, base: float, dims: int) -> dict[str, Any]:
    """The rotary tables: `ropes` and `short_context`. `how` holds rope_type and its numbers."""
    kind = how.text("rope_type", how.data.get("type") or "default")
    longest = keys.int("max_position_embeddings")
    original = keys.int("original_max_position_embeddings", longest)
    original = how.int("original_max_position_embeddings", original)
    if kind in ("default", "linear"):
        factor = how.float("factor") if kind == "linear" else 1.0
        return {"ropes": {ROPE: rope.made(rope.plain(base, dims, factor))}}
    if kind == "llama3":
        low, high = how.float("low_freq_factor"), how.float("high_freq_factor")
        freqs = rope.llama3(rope.plain(base, dims), how.float("factor"), low, high, original)
        return {"ropes": {ROPE: rope.made(freqs)}}
    if kind == "yarn":
        if {"mscale", "mscale_all_dim"} & set(how.data) or not how.flag("truncate", True):
            raise UnsupportedModel("The model uses a variant of YaRN that is not supported.")
        factor = how.float("factor")
        fast, slow = how.float("beta_fast", 32.0), how.float("beta_slow", 1.0)
        magnitude = how.float("attention_factor", rope.yarn_magnitude(factor))
        return {
            "ropes": {
                ROPE: rope.made(rope.yarn(base, dims, factor, original, fast, slow), magnitude)
            }
        }
    if kind in ("longrope", "su"):
        plain = rope.plain(base, dims)
        factor = longest / original if original else 0.0
        magnitude = how.float("attention_factor", rope.longrope_magnitude(factor, original))
        ropes: dict[str, Rope] = {}
        for table, name in ((ROPE, "short_factor"), (LONG, "long_factor")):
            factors = how.numbers(name, dims // 2)
            ropes[table] = rope.made(rope.divided(plain, factors), magnitude)
        return {"ropes": ropes, "short_context": original}
    raise UnsupportedModel(f"The model uses the rope scaling {kind!r}, which is not supported.")


def _local(keys: _Keys, default: Callable[[int], bool]) -> tuple[bool, ...]:
    """Which layers see a window: as layer_types says, or by number."""
    layers = keys.int("num_hidden_layers")
    types = keys.data.get("layer_types")
    if types is None:
        return tuple(default(i) for i in range(min(layers, 1 << 12)))
    known = {"sliding_attention": True, "full_attention": False}
    if not isinstance(types, list) or not all(isinstance(t, str) for t in types):
        raise BadModel("The model's config.json has something other than a list as layer_types.")
    if unknown := [t for t in types if t not in known]:
        raise UnsupportedModel(f"The model has layers of the type {unknown[0]!r}.")
    return tuple(known[t] for t in types)


def _plain(keys: _Keys) -> dict[str, Any]:
    return {}


def _mistral(keys: _Keys) -> dict[str, Any]:
    return {"window": keys.int("sliding_window", 0)}


def _qwen(keys: _Keys) -> dict[str, Any]:
    if not keys.flag("use_sliding_window", False):
        return {}
    first = keys.int("max_window_layers", 28)
    return {"window": keys.int("sliding_window", 0), "local": _local(keys, lambda i: i >= first)}


def _phi3(keys: _Keys) -> dict[str, Any]:
    return {"window": keys.int("sliding_window", 0)}


def _gemma2(keys: _Keys) -> dict[str, Any]:
    scalar = keys.float("query_pre_attn_scalar", 256.0)
    if scalar <= 0:
        raise BadModel("The model's query_pre_attn_scalar makes no sense.")
    return {
        "act": _ACTS.get(keys.text("hidden_activation", "gelu_pytorch_tanh"), "gelu"),
        "embed_scale": keys.int("hidden_size") ** 0.5,
        "scale": scalar**-0.5,
        "window": keys.int("sliding_window", 4096),
        "local": _local(keys, lambda i: i % 2 == 0),
        "attention_cap": keys.float("attn_logit_softcapping", 0.0),
        "logit_cap": keys.float("final_logit_softcapping", 0.0),
    }


def _gemma3(keys: _Keys) -> dict[str, Any]:
    """As Gemma 2, with a rotary table for the layers that see a window."""
    every = keys.int("sliding_window_pattern", 6) or 6
    _, dims = _dims(keys)
    parameters = keys.under("rope_parameters")
    if parameters is None:
        local = _Keys({})
        local_base = keys.float("rope_local_base_freq", 10000.0)
        full = keys.under("rope_scaling") or _Keys({})
        base = keys.float("rope_theta", 1e6)
    else:
        local = parameters.under("sliding_attention") or _Keys({})
        local_base = local.float("rope_theta", 10000.0)
        full = parameters.under("full_attention") or _Keys({})
        base = full.float("rope_theta", 1e6)
    ropes = _ropes(keys, full, base, dims)["ropes"]
    return {
        **_gemma2(keys),
        "local": _local(keys, lambda i: bool((i + 1) % every)),
        "ropes": {**ropes, LOCAL: _ropes(keys, local, local_base, dims)["ropes"][ROPE]},
    }


def _experts(keys: _Keys, count: str, used: int) -> dict[str, Any]:
    return {
        "experts": keys.int(count),
        "used": keys.int("num_experts_per_tok", used),
        "norm_shares": keys.flag("norm_topk_prob", False),
    }


def _olmoe(keys: _Keys) -> dict[str, Any]:
    if keys.data.get("clip_qkv") is not None:
        raise UnsupportedModel("The model clips queries and keys, which is not supported.")
    return _experts(keys, "num_experts", 8)


def _qwen_moe(keys: _Keys, used: int) -> dict[str, Any]:
    if keys.int("decoder_sparse_step", 1) != 1 or keys.data.get("mlp_only_layers"):
        raise UnsupportedModel("The model has experts in some layers only.")
    experts = _experts(keys, "num_experts", used)
    return {**_qwen(keys), **experts, "ffn": keys.int("moe_intermediate_size")}


def _qwen2_moe(keys: _Keys) -> dict[str, Any]:
    if not keys.flag("qkv_bias", True):
        raise UnsupportedModel("The model's queries and keys have no biases.")
    return _qwen_moe(keys, 4)


def _qwen3_moe(keys: _Keys) -> dict[str, Any]:
    return _qwen_moe(keys, 8)


def _mixtral(keys: _Keys) -> dict[str, Any]:
    return {**_mistral(keys), **_experts(keys, "num_local_experts", 2), "norm_shares": True}


_FAMILIES: Mapping[str, Callable[[_Keys], dict[str, Any]]] = {
    "llama": _plain,
    "mistral": _mistral,
    "mixtral": _mixtral,
    "qwen2": _qwen,
    "qwen2_moe": _qwen2_moe,
    "qwen3": _qwen,
    "qwen3_moe": _qwen3_moe,
    "phi3": _phi3,
    "gemma2": _gemma2,
    "gemma3_text": _gemma3,
    "olmoe": _olmoe,
}
