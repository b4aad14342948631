# SPDX-License-Identifier: Apache-2.0
"""Several greedy tokens in one slice: exactly those of single ones, and no more than are wanted."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.backends.base import Backend
from engine.backends.cpu import CpuBackend
from engine.backends.crosscheck import CheckedBackend
from engine.errors import ContextFull
from engine.lower import lower
from engine.text import generate
from engine.text.generate import Generation
from engine.text.model import State, TextModel
from engine.text.request import End, Request, Token


@pytest.fixture(scope="module", params=["cpu", pytest.param("gpu", marks=pytest.mark.gpu)])
def backend(request: Any) -> Iterator[Backend]:
    if request.param == "cpu":
        yield CpuBackend(2)
        return
    # Imported here: collecting the tests needs no Vulkan.
    from engine.backends.vulkan import VulkanBackend

    gpu = VulkanBackend(allow_software=True)
    yield gpu
    gpu.close()


@pytest.fixture
def model(backend: Backend, tiny_q8: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[TextModel]:
    monkeypatch.setattr(generate, "_AHEAD_S", 3600.0)  # however slow the device is
    made = TextModel.load(tiny_q8, "", backend)
    made.guesses = False  # a slice with guesses has several tokens, too
    yield made
    made.close()


def answer(state: State, most: int = 100, **settings: Any) -> tuple[list[int], End, list[int]]:
    """Ids, the end, and how many tokens each slice brought about."""
    request = Request("generate", "tell me", settings={"max_tokens": 30, **settings})
    g = Generation(state, request)
    ids, slices = [], []
    end: End | None = None
    while not g.finished:
        events = g.step(most)
        tokens = [e for e in events if isinstance(e, Token)]
        ids += [e.id for e in tokens]
        slices.append(len(tokens))
        end = events[-1] if isinstance(events[-1], End) else None
    assert end is not None
    return ids, end, slices


def test_the_same_tokens_in_fewer_slices(model: TextModel) -> None:
    model.ahead = 1
    state = model.state(64)
    ids, end, slices = answer(state)
    cached = list(state.tokens)
    assert max(slices) == 1
    state.close()
    model.ahead = 8
    state = model.state(64)
    again, same, fewer = answer(state)
    assert (again, same.reason, same.text) == (ids, end.reason, end.text)
    assert fewer[-4:] == [8, 8, 8, 4]
    assert state.tokens == cached
    assert same.stats["decode_tokens"] == end.stats["decode_tokens"]
    # The next answer begins where this cache ends; one with fewer tokens a slice is the same.
    assert answer(state, most=3)[0] == ids
    assert max(answer(state, most=3)[2]) == 3
    state.close()


def test_what_is_past_the_end_is_nothing(model: TextModel) -> None:
    model.ahead = 8
    state = model.state(64)
    ids, _, _ = answer(state)
    assert answer(state, max_tokens=13)[0] == ids[:13]
    settings = model.tokenizer.settings
    last = max(map(ids.index, ids))  # the token that comes late for the first time
    assert last > 3
    model.tokenizer.settings = replace(settings, ends=(ids[last],))
    stopped, end, slices = answer(state)
    assert stopped == ids[: last + 1]
    assert end.reason == "stop"
    assert max(slices) > 1
    assert state.tokens[-last:] == ids[:last]
    state.close()


def test_up_to_the_end_of_the_context(model: TextModel) -> None:
    model.ahead = 1
    state = model.state(24)
    ids, end, _ = answer(state)
    state.close()
    model.ahead = 8
    state = model.state(24)
    again, same, slices = answer(state)
    assert again == ids
    assert end.reason == same.reason == "length"
    assert max(slices) > 1
    with pytest.raises(ContextFull):
        state.run_ahead(5, 8)
    state.close()


@pytest.mark.parametrize(
    "settings", [{"temperature": 0.7}, {"repeat_penalty": 1.2}, {"logit_bias": {"5": 2}}]
)
def test_where_the_host_chooses_it_is_asked(model: TextModel, settings: dict[str, Any]) -> None:
    model.ahead = 8
    state = model.state(64)
    assert max(answer(state, **settings)[2]) == 1
    state.close()


def test_chances_are_those_of_single_tokens(model: TextModel) -> None:
    request = Request("generate", "tell me", settings={"max_tokens": 12, "logprobs": 3})

    def told(ahead: int) -> list[Any]:
        model.ahead = ahead
        state = model.state(64)
        g, out = Generation(state, request), []
        while not g.finished:
            out += [(e.id, e.logprob, e.logprobs) for e in g.step() if isinstance(e, Token)]
        state.close()
        return out

    assert told(8) == told(1)


@pytest.mark.gpu
def test_slices_of_several_tokens_are_checked(tiny_q8: Path, model: TextModel) -> None:
    if model.backend.info.kind != "gpu":
        return
    inner: Any = model.backend
    checked = CheckedBackend(inner, 1.0, np.random.default_rng(1))
    own = TextModel.load(tiny_q8, "", checked)
    own.ahead = 4
    state = own.state(64)
    answer(state)
    assert checked.checks > 4
    assert checked.failed == 0
    passed: dict[str, int] = state.executable.passed  # type: ignore[attr-defined]
    assert passed["advance.base"] >= 1
    state.close()
    own.close()


def test_without_the_kernel_each_token_is_a_slice(model: TextModel) -> None:
    def allow(op: str, variant: str) -> bool:
        return op != "advance"

    program = lower(model.graph, model.backend.info, 64, 8, allow)
    assert not {"advance", "ahead"} & program.sequences.keys()
    model.ahead = 8
    state = State(model, program, model.backend.executable(program, model.weights))
    assert max(answer(state)[2]) == 1
    with pytest.raises(ValueError, match="2 tokens in a slice of 1"):
        state.run_ahead(5, 2)
    state.close()
