# SPDX-License-Identifier: Apache-2.0
"""Guesses of what a text says next: they change what an answer costs, never what it says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.backends import cpu
from engine.backends.cpu import CpuBackend
from engine.backends.null import NullBackend
from engine.errors import ContextFull, OutOfMemory
from engine.text import guess, rows
from engine.text.generate import Generation
from engine.text.guess import SIZES, Guesser, Price
from engine.text.model import State, TextModel
from engine.text.request import End, Request, Token

PROMPT = "so so so so"
SAMPLED = {"temperature": 0.2, "top_k": 3, "seed": 5}
PENALISED = {"repeat_penalty": 1.02, "logit_bias": {"70": 2.0}}


def foreseen(monkeypatch: pytest.MonkeyPatch, model: TextModel, tokens: list[Token]) -> None:
    """From now on guesses are these tokens, but for every fifth."""
    begin = len(model.tokenizer.encode(PROMPT))

    def guess(self: Guesser, most: int, most_s: float = 0.0) -> list[int]:
        at = self._seen - begin
        some = [t.id + (t.n % 5 == 4) for t in tokens[at : at + 7]]
        return [] if most_s else some[: max(0, most)]

    monkeypatch.setattr(Guesser, "guess", guess)
    model.guesses = True


def answer(state: State, most: int = 100, **settings: Any) -> tuple[list[Token], End, list[int]]:
    """Tokens, the end, and how many tokens each slice brought about."""
    g = Generation(state, Request("generate", PROMPT, settings={"max_tokens": 30, **settings}))
    tokens: list[Token] = []
    slices: list[int] = []
    end: End | None = None
    while not g.finished:
        events = g.step(most)
        some = [e for e in events if isinstance(e, Token)]
        tokens += some
        slices.append(len(some))
        end = next((e for e in events if isinstance(e, End)), end)
    assert end is not None
    return tokens, end, slices


@pytest.mark.parametrize(
    "settings",
    [{}, SAMPLED, PENALISED, {"temperature": 0.5, "mirostat": 2, "mirostat_tau": 1.0}],
    ids=["greedy", "sampled", "penalised", "mirostat"],
)
def test_the_same_answer_in_fewer_slices(
    model: TextModel, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model.guesses = False
    state = model.state()
    plain, plain_end, single = answer(state, **settings)
    foreseen(monkeypatch, model, plain)
    whole, whole_end, slices = answer(state, **settings)
    assert [(t.n, t.id, t.text) for t in whole] == [(t.n, t.id, t.text) for t in plain]
    assert (whole_end.reason, whole_end.text) == (plain_end.reason, plain_end.text)
    assert max(single) == 1
    assert sum(slices) == sum(single) == len(plain)
    assert max(slices) == 5
    assert len(slices) < len(plain) / 3
    assert whole_end.stats["decode_tokens"] == len(whole) - 1
    state.close()


def test_chances_are_those_of_single_tokens(
    model: TextModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    model.guesses = False
    state = model.state()
    plain, _, _ = answer(state, logprobs=3)
    foreseen(monkeypatch, model, plain)
    whole, _, slices = answer(state, logprobs=3)
    assert max(slices) > 2
    for a, b in zip(whole, plain, strict=True):
        assert a == b
    state.close()


def test_an_answer_of_a_schema(model: TextModel, monkeypatch: pytest.MonkeyPatch) -> None:
    model.guesses = False
    state = model.state()
    schema = '{"enum": ["in a land far away", "in a town far away", "once"]}'
    plain, plain_end, _ = answer(state, schema=schema)
    foreseen(monkeypatch, model, plain)
    whole, end, slices = answer(state, schema=schema)
    assert [t.id for t in whole] == [t.id for t in plain]
    assert end.reason == plain_end.reason == "stop"
    assert len(slices) < len(plain)
    state.close()


@pytest.mark.parametrize("most", [1, 2, 3])
def test_no_more_than_are_wanted(
    model: TextModel, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model.guesses = False
    state = model.state()
    foreseen(monkeypatch, model, answer(state)[0])
    _, end, slices = answer(state, most, max_tokens=12)
    assert max(slices) == most
    assert sum(slices) == 12
    assert end.reason == "length"
    state.close()


def test_a_context_that_fills(model: TextModel, monkeypatch: pytest.MonkeyPatch) -> None:
    model.guesses = False
    state = model.state(32)
    plain, _, _ = answer(state, max_tokens=100)
    foreseen(monkeypatch, model, plain)
    tokens, end, _ = answer(state, max_tokens=100)
    assert [t.id for t in tokens] == [t.id for t in plain]
    assert end.reason == "length"
    state.close()


def test_an_end_within_a_slice(model: TextModel, monkeypatch: pytest.MonkeyPatch) -> None:
    model.guesses = False
    state = model.state()
    plain, _, _ = answer(state)
    stop = next(t.text for t in plain[6:] if t.text)
    again, again_end, _ = answer(state, stop=[stop])
    foreseen(monkeypatch, model, plain)
    tokens, end, _ = answer(state, stop=[stop])
    assert [(t.id, t.text) for t in tokens] == [(t.id, t.text) for t in again]
    assert (end.reason, end.text) == (again_end.reason, again_end.text) == ("stop", "")
    state.close()


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("kv", ["f16", "q8"])
@pytest.mark.parametrize("isa", cpu.isas())
def test_logits_are_those_of_single_tokens(tiny_q8: Path, isa: str, kv: str, threads: int) -> None:
    before = cpu.isa()
    cpu.set_isa(isa)
    backend = CpuBackend(threads)
    model = TextModel.load(tiny_q8, "", backend)
    assert model.guesses
    state, other = model.state(96, kv), model.state(96, kv)
    for s in (state, other):
        s.run(list(range(7, 77)), head=True)
    some = state.rows
    assert some is not None
    for count in (2, 3, 8):
        ids = [40 + count + i for i in range(count)]
        some.run(ids)
        for i, token in enumerate(ids):
            other.run([token], head=True, decode=True)
            np.testing.assert_array_equal(some.logits(i), other.logits())
            np.testing.assert_array_equal(some.best(i), other.best())
    assert state.tokens == other.tokens
    some.run([1] * 8)
    with pytest.raises(ContextFull):
        some.run([1] * 8)
    for s in (state, other):
        s.close()
    model.close()
    backend.close()
    cpu.set_isa(before)


def test_models_of_halves_do_not_guess(tiny: Any, tmp_path: Path) -> None:
    """Their products of single tokens add in another order."""
    backend = CpuBackend(1)
    model = TextModel.load(tiny.write(tmp_path / "half.gguf", "F16"), "", backend)
    assert not model.guesses
    model.close()


def test_against_the_reference(tiny_q8: Path) -> None:
    backend = NullBackend(reference=True)
    model = TextModel.load(tiny_q8, "", backend)
    assert not model.guesses
    state, other = model.state(16), model.state(16)
    for s in (state, other):
        s.run([3, 9, 4], head=True)
    assert state.rows is not None
    state.rows.run([50, 60, 70])
    for i, token in enumerate([50, 60, 70]):
        other.run([token], head=True)
        np.testing.assert_allclose(state.rows.logits(i), other.logits(), atol=0.03)
    for s in (state, other):
        s.close()
    model.close()


def test_without_memory_for_it(model: TextModel, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OutOfMemory("full")

    monkeypatch.setattr(rows, "recorded", full)
    state = model.state()
    foreseen(monkeypatch, model, answer(state)[0])
    _, _, slices = answer(state)
    assert max(slices) == 1
    state.close()


def told(text: list[int], price: Price, most: int = 7) -> list[list[int]]:
    """The guess after each token of a text."""
    guesser, out = Guesser(price), []
    for n in range(1, len(text) + 1):
        guesser.learn(text[:n])
        out.append(guesser.guess(most))
    return out


def known(*, one: float = 1.0) -> Price:
    price = Price()
    price.decoded(one)
    return price


def test_a_slice_stays_within_its_time() -> None:
    guesser = Guesser(known(one=0.01))
    for n in range(3, 25):
        guesser.learn(([8, 5, 6] * 8)[:n])
    assert len(guesser.guess(7)) == 7
    assert len(guesser.guess(7, 0.017)) == 3
    assert not guesser.guess(7, 0.012)
    assert guesser.guess(7, 1.0)


def test_what_was_said_before_comes_again() -> None:
    text = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 20, 1, 2, 3, 4, 5, 6, 7, 8, 9]
    got = told(text, known())
    assert not any(got[:14])  # nothing before the first guess was found right
    assert got[14] == [5, 6, 7]
    assert all(len(g) <= 2 for g in told(text, known(), 2))
    assert not any(told(text, known(), 0))
    assert not any(told(text, Price()))  # what a token takes is not known


def test_a_text_that_repeats_itself_is_guessed_beyond_its_end() -> None:
    assert told([8, 5, 6] * 8, known())[-1] == [8, 5, 6, 8, 5, 6, 8]


def test_wrong_guesses_end_it_and_right_ones_bring_it_back() -> None:
    wrong = [n for i in range(8) for n in (1, 2, 3, 100 + i)]
    guesser, price = Guesser(known()), known()
    for n in range(1, len(wrong) + 1):
        guesser.learn(wrong[:n])
    assert guesser.chance() < 0.3
    assert not guesser.guess(7)
    again = [*wrong, *([50, 51, 52, 53, 54, 55, 56, 57, 58, 59] * 3)]
    assert told(again, price)[-1]


def test_prices_are_learnt() -> None:
    price = known(one=0.01)
    assert price.of(4) == price.of(3) == guess.Price()._times[4]
    for _ in range(20):
        price.checked(4, 0.05)
        price.checked(8, 0.011)
    assert price.of(4) == pytest.approx(5, rel=0.01)
    assert price.seconds(8) == pytest.approx(0.011, rel=0.01)
    text = list(range(10, 22)) * 2
    assert all(len(g) in (0, 1, *range(4, SIZES[-1])) for g in told(text, price))
