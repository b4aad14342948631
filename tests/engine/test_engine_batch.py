# SPDX-License-Identifier: Apache-2.0
"""Sessions that decode in one slice say what each of them says alone."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.backends.cpu import CpuBackend
from engine.backends.null import NullBackend
from engine.lower_batch import NoBatch, lower_batch
from engine.text.batch import Batch, Batches
from engine.text.generate import Generation
from engine.text.model import State, TextModel
from engine.text.request import Request, Token

PROMPTS = ["once", "upon a time", "a", "in a land far away", "so it goes"]


def making() -> contextlib.nullcontext[None]:
    return contextlib.nullcontext()


@pytest.fixture(params=["cpu", "null", pytest.param("gpu", marks=pytest.mark.gpu)])
def backend(request: pytest.FixtureRequest) -> Iterator[Any]:
    made: Any
    if request.param == "gpu":
        from engine.backends.vulkan import VulkanBackend

        made = VulkanBackend(allow_software=True)
    else:
        made = CpuBackend(2) if request.param == "cpu" else NullBackend(reference=True)
    yield made
    made.close()


@pytest.fixture
def model(backend: Any, tiny_q8: Path) -> Iterator[TextModel]:
    made = TextModel.load(tiny_q8, "", backend)
    yield made
    made.close()


def begun(model: TextModel, n: int, contexts: tuple[int, ...] = (96, 48)) -> list[Generation]:
    """Generations up to their first token."""
    out = []
    for i in range(n):
        state = model.state(contexts[i % len(contexts)])
        settings = {"max_tokens": 6 + 2 * i, "temperature": 0}
        out.append(Generation(state, Request("generate", PROMPTS[i], settings=settings)))
        while out[-1].next_id is None:
            out[-1].step()
    return out


def alone(generation: Generation) -> list[int]:
    while not generation.finished:
        generation.step()
    return generation.answer


def test_the_same_tokens_as_alone(model: TextModel) -> None:
    truth = [alone(g) for g in begun(model, 5)]
    together, batches = begun(model, 5), Batches()
    slices = 0
    while living := [g for g in together if g.next_id is not None]:
        batch = batches.of([g.state for g in living], making)
        assert batch is not None
        batch.run({g.state: g.next_id for g in living if g.next_id is not None})
        slices += 1
        for g in living:
            state = g.state
            events = g.fed(batch.best(state), lambda b=batch, s=state: b.logits(s), 0.0)
            assert isinstance(events[0], Token)
    assert [g.answer for g in together] == truth
    assert slices == max(map(len, truth)) - 1
    for g in together:
        batches.drop(g.state)
        g.state.close()


def test_logits_of_each_lane(model: TextModel) -> None:
    ids = [[3, 9, 4], [40, 7], [5] * 9]
    states = [model.state(32, kv=("f16", "q8")[i % 2]) for i in range(len(ids))]
    want = []
    for state, some in zip(states, ids, strict=True):
        state.run(some, head=True)
        want.append(state.logits())
        state.common(some[:-1])
    batch = Batch(states)
    batch.run({s: some[-1] for s, some in zip(states, ids, strict=True)})
    for state, expected in zip(states, want, strict=True):
        np.testing.assert_allclose(batch.logits(state), expected, atol=0.02)
    assert [s.tokens for s in states] == ids
    batch.close()
    for state in states:
        state.close()


def test_a_lane_may_sit_out(model: TextModel) -> None:
    states = [model.state(16) for _ in range(3)]
    for state in states:
        state.run([7, 8, 9], head=True)
    batch = Batch(states)
    batch.run({states[0]: 5, states[2]: 6})
    assert [len(s.tokens) for s in states] == [4, 3, 4]
    states[1].run([5], head=True, decode=True)
    np.testing.assert_allclose(states[1].logits(), batch.logits(states[0]), atol=0.02)
    batch.close()
    for state in states:
        state.close()


def test_batches_are_kept_and_dropped(model: TextModel) -> None:
    states = [model.state(8) for _ in range(4)]
    batches = Batches()
    four = batches.of(states, making)
    assert four is not None
    assert batches.of(states[1:3], making) is four  # half of its lanes
    assert batches.of(states[:1] + states[3:], making) is four
    states[3].run([1] * 8, head=False)  # no room: a lane that sits out would write over a token
    two = batches.of(states[:2], making)
    assert two is not None
    assert two is not four
    batches.drop(states[1])
    three = batches.of(states[:3], making)
    assert three is not None
    assert three not in (two, four)
    for state in states:
        batches.drop(state)
        state.close()


def test_rows_that_cannot_be_bound(tiny: Any, tmp_path: Path) -> None:
    shape = tiny.shape(hidden=64, heads=2, kv_heads=1, dim=16)  # a row of qkv has 4 * 64 bytes,
    path = tiny.write(tmp_path / "odd.gguf", "Q8_0", shape)  # one of attention's 4 * 32
    backend = CpuBackend(1)
    model = TextModel.load(path, "", backend)
    with pytest.raises(NoBatch):
        lower_batch(model.graph, backend.info, [16, 16])
    states: list[State] = [model.state(16) for _ in range(2)]
    assert Batches().of(states, making) is None
    for state in states:
        state.close()
    model.close()
