# SPDX-License-Identifier: Apache-2.0
"""Embeddings and classification against a forward pass in float64."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.backends.cpu import CpuBackend
from engine.errors import ContextFull, InvalidArgument
from engine.text.classify import Classification
from engine.text.embed import Embedding
from engine.text.model import State, TextModel


@pytest.fixture(scope="module")
def model(tiny_q8: Path) -> Iterator[TextModel]:
    made = TextModel.load(tiny_q8, "", CpuBackend(1), chunk=4)
    yield made
    made.close()


@pytest.fixture
def state(model: TextModel) -> Iterator[State]:
    made = model.state()
    yield made
    made.close()


def run(task: Any) -> Any:
    while task.step():
        pass
    return task


@pytest.mark.parametrize("pooling", ["mean", "last"])
def test_vectors(state: State, tiny: Any, tiny_q8: Path, pooling: Any) -> None:
    texts = ["w1 w2 w3 over there", "w9"]
    got = run(Embedding(state, texts, pooling)).result
    truth = tiny.truth(tiny_q8, tiny.shape())
    for row, text in zip(got, texts, strict=True):
        hidden = truth.hidden(state.model.tokenizer.encode(text))
        want = hidden.mean(0) if pooling == "mean" else hidden[-1]
        np.testing.assert_allclose(row, want / np.linalg.norm(want), atol=0.01)
    assert np.linalg.norm(got, axis=1) == pytest.approx(1)


def test_no_text_to_embed(state: State) -> None:
    with pytest.raises(InvalidArgument, match="text"):
        Embedding(state, [])
    with pytest.raises(ContextFull, match="96"):
        Embedding(state, ["x" * 200])


@pytest.mark.parametrize("calibrate", [False, True])
def test_scores_are_chances(state: State, tiny: Any, tiny_q8: Path, calibrate: bool) -> None:
    labels = ["w1", "w2 w3", "w10"]
    got = run(Classification(state, "w5 w6", labels, "q?", calibrate))
    truth = tiny.truth(tiny_q8, tiny.shape())
    encode = state.model.tokenizer

    def points(text: str) -> np.ndarray:
        prompt = encode.encode(f"q?\n\nText: {text}\nLabel:")
        out = []
        for label in labels:
            ids = encode.encode_inside(f" {label}")
            logits = truth.logits([*prompt, *ids])[len(prompt) - 1 : -1]
            chances = logits - np.log(np.exp(logits).sum(1, keepdims=True))
            out.append(chances[np.arange(len(ids)), ids].mean())
        return np.asarray(out)

    want = points("w5 w6") - (points("N/A") if calibrate else 0)
    want = np.exp(want) / np.exp(want).sum()
    assert list(got.scores) == labels
    np.testing.assert_allclose(list(got.scores.values()), want, atol=0.01)
    assert got.best == labels[int(want.argmax())]


@pytest.mark.parametrize(
    ("text", "labels"),
    [
        ("x", ["a"]),
        ("x", ["a", "a"]),
        ("", ["a", "b"]),
        ("x", ["a", " "]),
        ("x", list(map(str, range(65)))),
    ],
)
def test_nonsense(state: State, text: str, labels: list[str]) -> None:
    with pytest.raises(InvalidArgument):
        Classification(state, text, labels)


def test_too_long(state: State) -> None:
    with pytest.raises(ContextFull, match="96"):
        Classification(state, "x" * 300, ["a", "b"])
