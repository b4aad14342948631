# SPDX-License-Identifier: Apache-2.0
"""What a GGUF file says of its architecture -> Config, family by family, as llama.cpp reads it
(src/models/*.cpp).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from engine.errors import BadModel, UnsupportedModel
from engine.importers import rope
from engine.importers.decoder import LOCAL, LONG, ROPE, Config, Model, build
from engine.importers.gguf import Gguf
from engine.importers.rope import Rope
from engine.importers.source import float_vector

# Tensors that rotary tables are made of.
FREQS = "rope_freqs.weight"
LONG_FACTORS, SHORT_FACTORS = "rope_factors_long.weight", "rope_factors_short.weight"


def import_model(file: Gguf) -> Model:
    """The model of a GGUF file.

    Raises:
        BadModel: what the file says does not fit together.
        UnsupportedModel: an architecture, or a variant of one, that is not served.
    """
    arch = file.text("general.architecture")
    more = _FAMILIES.get(arch)
    if more is None:
        known = ", ".join(sorted(_FAMILIES))
        raise UnsupportedModel(
            f"The model has the architecture {arch!r}, which is not supported (those that are:"
            f" {known})."
        )
    keys = _Keys(file, arch)
    return build(Config(**{**_common(keys), **more(keys)}), file)


class _Keys:
    """The keys of one architecture."""

    def __init__(self, file: Gguf, arch: str) -> None:
        self.file, self.arch = file, arch

    def name(self, key: str) -> str:
        return f"{self.arch}.{key}"

    def int(self, key: str, default: int | None = None, least: int = 1) -> int:
        value = self.file.int(self.name(key), default)
        if not least <= value <= 1 << 30:
            raise BadModel(f"The GGUF file says {self.name(key)} = {value}, which makes no sense.")
        return value

    def float(self, key: str, default: float | None = None) -> float:
        return self.file.float(self.name(key), default)


def _common(keys: _Keys) -> dict[str, Any]:
    hidden, heads = keys.int("embedding_length"), keys.int("attention.head_count")
    dim = keys.int("attention.key_length", max(1, hidden // heads))
    if keys.int("attention.value_length", dim) != dim:
        raise UnsupportedModel("The model's keys and values have different sizes.")
    rope_dims = keys.int("rope.dimension_count", dim)
    context, experts = keys.int("context_length"), keys.int("expert_count", 0, least=0)
    ffn = keys.int("feed_forward_length", 0 if experts else None, least=0)
    config: dict[str, Any] = {
        "arch": keys.arch,
        "layers": keys.int("block_count"),
        "hidden": hidden,
        "ffn": keys.int("expert_feed_forward_length", ffn) if experts else ffn,
        "heads": heads,
        "kv_heads": keys.int("attention.head_count_kv", heads),
        "dim": dim,
        "rope_dims": rope_dims,
        "context": context,
        "eps": keys.float("attention.layer_norm_rms_epsilon"),
        "window": keys.int("attention.sliding_window", 0, least=0),
        "ignored": frozenset({FREQS, LONG_FACTORS, SHORT_FACTORS}),
        "experts": experts,
    }
    if experts:
        config["used"] = keys.int("expert_used_count")
    return {**config, **_ropes(keys, rope_dims, context)}


def _ropes(keys: _Keys, dims: int, context: int) -> dict[str, Any]:
    """The rotary tables: `ropes` and `short_context`."""
    file = keys.file
    base = keys.float("rope.freq_base", 10000.0)
    # As llama.cpp reads it: linear unless said otherwise, and a factor of 0 means none.
    kind = file.text(keys.name("rope.scaling.type"), "linear")
    if kind not in ("none", "linear", "yarn", "longrope"):
        raise UnsupportedModel(f"The model uses the rope scaling {kind!r}, which is not supported.")
    factor = keys.float("rope.scaling.factor", keys.float("rope.scale_linear", 0.0)) or 1.0
    magnitude = keys.float("rope.scaling.attn_factor", 1.0)
    original = keys.int("rope.scaling.original_context_length", context)
    if kind == "yarn":
        freqs = rope.yarn(
            base,
            dims,
            factor,
            original,
            keys.float("rope.scaling.yarn_beta_fast", 32.0),
            keys.float("rope.scaling.yarn_beta_slow", 1.0),
        )
        magnitude *= rope.yarn_magnitude(factor)
    else:
        freqs = rope.plain(base, dims, factor if kind == "linear" else 1.0)
    if FREQS in file.tensors:
        freqs = rope.divided(freqs, float_vector(file, FREQS, dims // 2))
    if LONG_FACTORS not in file.tensors:
        return {"ropes": {ROPE: rope.made(freqs, magnitude)}}
    ropes: dict[str, Rope] = {}
    for table, name in ((ROPE, SHORT_FACTORS), (LONG, LONG_FACTORS)):
        if name not in file.tensors:
            raise BadModel(f"The model lacks the tensor {name}.")
        factors = float_vector(file, name, dims // 2)
        ropes[table] = rope.made(rope.divided(freqs, factors), magnitude)
    return {"ropes": ropes, "short_context": original}


def _pattern(keys: _Keys, every: int) -> tuple[bool, ...]:
    """Which layers see a window: the file's list, or all but the last of each `every`."""
    layers = keys.int("block_count")
    given = keys.file.metadata.get(keys.name("attention.sliding_window_pattern"))
    if isinstance(given, np.ndarray) and len(given) == layers:
        return tuple(bool(v) for v in given)
    if isinstance(given, int) and not isinstance(given, bool) and 1 <= given <= layers:
        every = given
    elif given is not None:
        raise BadModel("The GGUF file's pattern of sliding windows makes no sense.")
    return tuple(i % every < every - 1 for i in range(layers))


def _llama(keys: _Keys) -> dict[str, Any]:
    """llama, SmolLM2 and Mistral, whose weights are in the order of neighbouring pairs; with
    experts Mixtral.
    """
    return {"neox": False, "norm_shares": True}


def _plain(keys: _Keys) -> dict[str, Any]:
    """qwen2 (with experts, too) and olmoe: nothing that the tensors do not say."""
    return {}


def _qwen3(keys: _Keys) -> dict[str, Any]:
    return {"norm_shares": True}


def _phi3(keys: _Keys) -> dict[str, Any]:
    # A window as long as the context is none.
    window = keys.int("attention.sliding_window", 0, least=0)
    return {"window": window if window < keys.int("context_length") else 0}


def _scale(keys: _Keys, large: int) -> float:
    """Attention's factor: the largest Gemma of a generation (told by its layers, as llama.cpp does
    it) divides by the hidden size a head, the others by the size of a head.
    """
    heads = keys.int("attention.head_count")
    each = max(1, keys.int("embedding_length") // heads)
    dim = keys.int("attention.key_length", each)
    return float((each if keys.int("block_count") == large else dim) ** -0.5)


def _gemma2(keys: _Keys) -> dict[str, Any]:
    return {
        "act": "gelu",
        "embed_scale": float(keys.int("embedding_length") ** 0.5),
        "window": keys.int("attention.sliding_window", 4096),
        "local": _pattern(keys, 2),
        "attention_cap": keys.float("attn_logit_softcapping", 50.0),
        "logit_cap": keys.float("final_logit_softcapping", 30.0),
        "scale": _scale(keys, 46),
    }


def _gemma3(keys: _Keys) -> dict[str, Any]:
    config: dict[str, Any] = {
        "act": "gelu",
        "embed_scale": float(keys.int("embedding_length") ** 0.5),
        "local": _pattern(keys, 6),
        "logit_cap": keys.float("final_logit_softcapping", 0.0),
        "scale": _scale(keys, 62),
    }
    common = _common(keys)
    local = rope.plain(keys.float("rope.freq_base_swa", 10000.0), common["rope_dims"])
    return {**config, "ropes": {**common["ropes"], LOCAL: rope.made(local)}}


_FAMILIES: Mapping[str, Callable[[_Keys], dict[str, Any]]] = {
    "llama": _llama,
    "qwen2": _plain,
    "qwen2moe": _plain,
    "qwen3": _qwen3,
    "qwen3moe": _qwen3,
    "phi3": _phi3,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "olmoe": _plain,
}
