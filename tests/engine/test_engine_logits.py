# SPDX-License-Identifier: Apache-2.0
"""Logits of whole programs against a float64 forward pass that shares no code with the engine."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from engine.backends.base import Backend, Limits
from engine.backends.cpu import CpuBackend
from engine.backends.null import NullBackend
from engine.text.model import TextModel
from engine.text.sampler import Candidates

IDS = [5, 17, 260, 299, 3, 44, 44, 150, 1, 280, 99]


def load(path: Any, backend: Backend, **options: Any) -> TextModel:
    return TextModel.load(path, "", backend, **options)


def answer(model: TextModel, ids: list[int], chunk: int = 0) -> np.ndarray:
    """Logits after the last id, fed `chunk` at a time (0: all at once)."""
    state = model.state()
    step = chunk or len(ids)
    for i in range(0, len(ids), step):
        state.run(ids[i : i + step], head=i + step >= len(ids))
    out = state.logits()
    state.close()
    return out


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q5_0", "Q5_1", "Q4_0", "Q4_1"])
@pytest.mark.parametrize("device", ["null", "cpu"])
def test_every_type_computes_the_model(tmp_path: Any, tiny: Any, kind: str, device: str) -> None:
    shape = tiny.shape()
    path = tiny.write(tmp_path / "m.gguf", kind, shape)
    truth = tiny.truth(path, shape).logits(IDS)[-1]
    backend = NullBackend(reference=True) if device == "null" else CpuBackend(2)
    model = load(path, backend)
    # The CPU rounds activations to int8 for q8 and q4.
    coarse = device == "cpu" and kind in ("Q8_0", "Q5_0", "Q4_0", "Q4_1")
    tolerance = 0.12 if coarse else 0.01
    for chunk in (0, 1, 4):
        assert np.abs(answer(model, IDS, chunk) - truth).max() < tolerance
    model.close()


@pytest.mark.parametrize(
    "options",
    [
        {"tied": True},
        {"scaling": 4.0},
        {"base": 5e5, "factors": True},
        {"dim": 32, "rope_dims": 32},
        {"dim": 8, "rope_dims": 8, "heads": 8, "kv_heads": 1},
        {"rope_dims": 8},
        {"kv_heads": 4},
        {"vocab": 1500},
        {"kinds": {"attn_v": "F16", "ffn_up": "Q4_1", "token_embd": "Q4_0"}},
    ],
    ids=str,
)
def test_variants_of_the_architecture(tmp_path: Any, tiny: Any, options: dict[str, Any]) -> None:
    shape = tiny.shape(**options)
    path = tiny.write(tmp_path / "m.gguf", "Q8_0", shape)
    truth = tiny.truth(path, shape).logits(IDS)[-1]
    model = load(path, NullBackend(reference=True))
    for chunk in (0, 1):
        assert np.abs(answer(model, IDS, chunk) - truth).max() < 0.01


def test_shards_change_nothing(tmp_path: Any, tiny: Any) -> None:
    """Matrices that are larger than a binding are cut; 8 KiB hold 64 rows and more of some of
    these.
    """
    shape = tiny.shape(vocab=2000)
    path = tiny.write(tmp_path / "m.gguf", "Q8_0", shape)
    whole = load(path, NullBackend(reference=True), chunk=8)
    limits = Limits(max_storage_range=26 << 10)
    cut = load(path, NullBackend(reference=True, limits=limits), chunk=8)
    state: Any = whole.state(32)
    other: Any = cut.state(32)
    calls = [len(s.executable.program.sequences["head"]) for s in (state, other)]
    assert calls[1] > calls[0] + 3
    for s in (state, other):
        s.run(IDS[:8], False)
        s.run(IDS[8:], True)
    np.testing.assert_allclose(state.logits(), other.logits(), rtol=0, atol=1e-6)
    assert state.best().tobytes() == other.best().tobytes()


def test_topk_is_the_logits_in_order(tmp_path: Any, tiny: Any) -> None:
    shape = tiny.shape(vocab=1500)
    path = tiny.write(tmp_path / "m.gguf", "F16", shape)
    state = load(path, CpuBackend(2)).state()
    state.run(IDS, True)
    logits = state.logits()
    best = Candidates.parse(state.best())
    whole = Candidates.of(logits)
    assert len(best.ids) == 64
    assert list(best.ids) == list(whole.ids[:64])
    np.testing.assert_array_equal(best.logits, whole.logits[:64])
    assert abs(best.lse - whole.lse) < 1e-4


def test_the_prompt_is_not_limited_by_the_chunk(tmp_path: Any, tiny: Any) -> None:
    """Whole chunks, a remainder and single tokens give the same cache."""
    shape = tiny.shape()
    path = tiny.write(tmp_path / "m.gguf", "F16", shape)
    truth = tiny.truth(path, shape).logits(IDS * 8)[-1]
    model = load(path, CpuBackend(2), chunk=16)
    assert np.abs(answer(model, IDS * 8, 16) - truth).max() < 0.02
    assert np.abs(answer(model, IDS * 8, 13) - truth).max() < 0.02
