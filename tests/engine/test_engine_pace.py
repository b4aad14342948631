# SPDX-License-Identifier: Apache-2.0
"""Slices of text keep to the time that is set: pieces of a prompt, tokens in one submission."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from engine import pace
from engine.backends.cpu import CpuBackend
from engine.pace import LIMIT
from engine.text import generate
from engine.text.embed import Embedding
from engine.text.generate import Generation
from engine.text.model import LEAST, State, TextModel
from engine.text.request import Request, Token


@pytest.fixture
def state(tiny_q8: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[State]:
    monkeypatch.setattr(generate, "_AHEAD_S", 3600.0)  # however slow the device is
    model = TextModel.load(tiny_q8, "", CpuBackend(1))
    model.ahead = 8
    made = model.state(96)
    yield made
    made.close()
    model.close()


def slices(state: State, prompt: str, **settings: int) -> tuple[list[int], list[int]]:
    """Ids of the answer, and how many tokens each slice brought about."""
    g = Generation(state, Request("generate", prompt, settings=settings))
    ids, counts = [], []
    while not g.finished:
        tokens = [e for e in g.step() if isinstance(e, Token)]
        ids += [e.id for e in tokens]
        counts.append(len(tokens))
    return ids, counts


def test_a_prompt_comes_in_pieces(state: State, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = "Once upon a time there was" * 3
    whole, counts = slices(state, prompt, max_tokens=4)
    pieces = counts.index(1) + 1
    tokens = len(state.tokens) - 3
    assert pieces == -(-tokens // state.chunk)
    state.common([])
    monkeypatch.setattr(LIMIT, "slice_s", 1e-9)
    again, counts = slices(state, prompt, max_tokens=4)
    assert again == whole
    assert pieces < counts.index(1) + 1 <= -(-tokens // LEAST)


def test_a_vector_of_pieces_is_the_same(state: State, monkeypatch: pytest.MonkeyPatch) -> None:
    def vector() -> tuple[list[float], int]:
        work, count = Embedding(state, ["Once upon a time there was a fox" * 2], "mean"), 0
        while work.step():
            count += 1
        return work.result[0].tolist(), count

    whole, few = vector()
    monkeypatch.setattr(LIMIT, "slice_s", 1e-9)
    cut, many = vector()
    assert cut == pytest.approx(whole, abs=1e-5)
    assert many > few


def test_tokens_in_one_slice_are_as_many_as_the_time_allows(
    state: State, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids, counts = slices(state, "tell me", max_tokens=24)
    if max(counts) == 1:
        pytest.fail("the CPU's program has no advance")
    monkeypatch.setattr(LIMIT, "slice_s", 1e-9)
    again, counts = slices(state, "tell me", max_tokens=24)
    assert (again, max(counts)) == (ids, 1)
    monkeypatch.setattr(LIMIT, "slice_s", 0.0)
    monkeypatch.setattr(LIMIT, "scale", 0.5)
    again, counts = slices(state, "tell me", max_tokens=24)
    assert (again, max(counts)) == (ids, 4)


def test_what_was_aside_of_a_time_and_the_clock_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [10.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    monkeypatch.setattr(pace, "ASIDE", pace.Aside())
    began = pace.clock()
    for ends, seconds in ((11.0, 0.5), (12.0, 1.0), (13.0, 0.25)):
        now[0] = ends
        pace.ASIDE.add(seconds)
    assert pace.clock() - began == 3.0 - 1.75
    assert [pace.ASIDE.since(then) for then in (10.0, 11.0, 11.75, 12.5, 13.0)] == [
        1.75, 1.25, 0.5, 0.25, 0.0
    ]  # fmt: skip
