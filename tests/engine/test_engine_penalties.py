# SPDX-License-Identifier: Apache-2.0
"""Penalties, biases and mirostat against plain implementations; their settings."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import InvalidArgument
from engine.text.penalties import LONGEST, penalised, repeats
from engine.text.sampler import Candidates, Mirostat, sample, uniform
from engine.text.settings import Settings

RNG = np.random.default_rng(4)
LOGITS = (RNG.standard_normal(50) * 3).astype(np.float32)


def plain_repeats(history: list[int]) -> dict[int, int]:
    """By the definition: the longest common end of what stands before a token and of all."""
    found: dict[int, int] = {}
    for at in range(1, len(history)):
        n = 0
        while n < min(at, LONGEST) and history[at - 1 - n] == history[-1 - n]:
            n += 1
        if n:
            found[history[at]] = max(found.get(history[at], 0), n)
    return found


@given(st.lists(st.integers(0, 3), max_size=90))
def test_repeats(history: list[int]) -> None:
    assert repeats(history) == plain_repeats(history)


def test_repeats_of_a_long_loop() -> None:
    assert repeats([5] * 200) == {5: LONGEST}


def test_each_penalty() -> None:
    history = [1, 2, 3, 2, 9, 2]
    settings = Settings(
        repeat_penalty=1.5, frequency_penalty=0.25, presence_penalty=0.5, repeat_last_n=4
    )
    want = LOGITS.astype(np.float64)
    for token in (2, 3, 9):  # the last four
        times = history[-4:].count(token)
        v = want[token]
        want[token] = (v / 1.5 if v > 0 else v * 1.5) - 0.25 * times - 0.5
    np.testing.assert_allclose(penalised(LOGITS, settings, history), want, rtol=1e-6)


def test_dry() -> None:
    # "7 8 9" was said before: a 9 now would make three of a kind, a 4 one.
    history = [7, 8, 9, 4, 8, 4, 7, 8]
    out = penalised(LOGITS, Settings(dry_multiplier=0.8, dry_allowed_length=2), history)
    want = LOGITS.copy()
    want[9] -= 0.8
    np.testing.assert_allclose(out, want)
    out = penalised(LOGITS, Settings(dry_multiplier=0.8, dry_allowed_length=1), history)
    want[9] = LOGITS[9] - 0.8 * 1.75
    want[4] -= 0.8
    np.testing.assert_allclose(out, want, rtol=1e-6)


def test_bias_decides() -> None:
    settings = Settings.parse({"temperature": 0, "logit_bias": {"17": 100.0, "4000": 5}})
    best = Candidates.of(LOGITS)
    assert sample(best, settings, 0, 50, lambda: LOGITS) == 17
    never = Settings.parse({"temperature": 0, "logit_bias": {str(int(best.ids[0])): -1000}})
    assert sample(best, never, 0, 50, lambda: LOGITS) == best.ids[1]


def test_mirostat_by_its_paper() -> None:
    settings = Settings(temperature=0.9, mirostat=2, mirostat_tau=2.0, mirostat_eta=0.2, seed=5)
    state = Mirostat.of(settings)
    again = Mirostat.of(settings)
    assert state is not None
    assert again is not None
    mu = 4.0
    best = Candidates.of(LOGITS)
    for n in range(30):
        p = np.exp(best.logits / 0.9)
        p /= p.sum()
        kept = max(1, int((-np.log2(p) <= mu).sum()))
        q = p[:kept] / p[:kept].sum()
        at = int(np.searchsorted(np.cumsum(q), uniform(5, n), side="right"))
        token = sample(best, settings, n, 50, lambda: LOGITS, (), state)
        assert token == best.ids[at]
        mu -= 0.2 * (-math.log2(q[at]) - 2.0)
        assert state.mu == pytest.approx(mu)
        again.follow(best, 0.9, token)
        assert again.mu == pytest.approx(mu)


def test_mirostat_is_for_chance() -> None:
    assert Mirostat.of(Settings(mirostat=2, temperature=0)) is None
    assert Mirostat.of(Settings(mirostat=0, temperature=1)) is None


@pytest.mark.parametrize(
    "bad",
    [
        {"mirostat": 1},
        {"mirostat": 3},
        {"repeat_penalty": 0},
        {"repeat_penalty": "1"},
        {"frequency_penalty": math.nan},
        {"logit_bias": {"x": 1}},
        {"logit_bias": {"-1": 1}},
        {"logit_bias": {"1": True}},
        {"logit_bias": [1]},
        {"logit_bias": {str(i): 1 for i in range(1025)}},
        {"logprobs": 21},
        {"dry_base": 0.5},
    ],
)
def test_nonsense(bad: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument) as e:
        Settings.parse(bad)
    assert next(iter(bad)) in str(e.value)
