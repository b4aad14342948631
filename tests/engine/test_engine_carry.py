# SPDX-License-Identifier: Apache-2.0
"""An answer goes on in another state with the KV caches that the first one had."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.backends.cpu import CpuBackend
from engine.text import carry
from engine.text.generate import Generation
from engine.text.model import State, TextModel
from engine.text.request import Request
from kernels import kv

PROMPT = "once upon a time"


@pytest.fixture
def file() -> Iterator[int]:
    fd = os.memfd_create("carried", os.MFD_CLOEXEC)
    yield fd
    os.close(fd)


def generation(
    state: State, delivered: list[int], notes: dict[str, float] | None = None, **settings: Any
) -> Generation:
    settings = {"max_tokens": 16, "temperature": 0, **settings}
    return Generation(state, Request("generate", PROMPT, settings=settings), delivered, notes)


def whole(found: Generation) -> list[int]:
    while not found.finished:
        found.step()
    return found.answer


@pytest.mark.parametrize("context", [40, 96])  # most of the caches, and little of them
def test_an_answer_goes_on(model: TextModel, file: int, context: int) -> None:
    truth = whole(generation(model.state(context), [], max_tokens=8))
    first = generation(model.state(context), [], max_tokens=8)
    while first.delivered < 5:
        first.step()
    size = carry.export(first.state, file, 1 << 30)
    assert size == os.fstat(file).st_size
    assert size >= carry.nbytes(first.state) > 0
    second = model.state(context)
    assert carry.adopt(second, file) == {}
    assert second.tokens == first.state.tokens
    assert second.tokens == first.state.tokens
    for name, (heads, dim) in carry.shapes(second).items():
        shape, count = (heads, context, dim), len(second.tokens)
        a, b = (
            kv.load("f16", s.executable.read(name, kv.nbytes("f16", *shape)), shape)[:, :count]
            for s in (first.state, second)
        )
        assert np.array_equal(a, b)
    rest = generation(second, first.answer, max_tokens=8)
    fed = len(second.tokens)
    assert whole(rest) == truth
    assert rest.step() == []
    assert rest._stats["prefill_tokens"] == len(rest._ids) - len(truth) + 5 - fed == 1


MIROSTAT = {"temperature": 0.9, "seed": 3, "mirostat": 2, "mirostat_tau": 2.0, "mirostat_eta": 0.3}


@pytest.mark.parametrize("told", [True, False, "of another token", "damaged"])
def test_mirostat_goes_on_where_it_was(model: TextModel, file: int, told: Any) -> None:
    truth = generation(model.state(64), [], **MIROSTAT)
    assert len(whole(truth)) == 16
    first = generation(model.state(64), [], **MIROSTAT)
    while first.delivered < 7:
        first.step()
    assert carry.export(first.state, file, 1 << 30, first.notes)
    second = model.state(64)
    found = carry.adopt(second, file)
    assert found == first.notes
    notes = {
        True: found, False: None,
        "of another token": {**first.notes, "tokens": 6.0},
        "damaged": {"tokens": 7.0, "mirostat": float("nan")},
    }[told]  # fmt: skip
    rest = generation(second, first.answer, notes, **MIROSTAT)
    assert whole(rest) == truth.answer
    # Without its value the tokens that were chosen have to be looked at again, one by one.
    assert rest._stats["prefill_tokens"] == (1 if told is True else 8)
    assert rest.notes["mirostat"] == pytest.approx(truth.notes["mirostat"], abs=1e-3)


def test_only_what_is_known_is_noted(model: TextModel, file: int) -> None:
    assert generation(model.state(64), []).notes == {}
    first = generation(model.state(64), [], **MIROSTAT)
    while first.delivered < 4:
        first.step()
    resumed = generation(model.state(64), first.answer, **MIROSTAT)
    resumed.step()
    assert resumed.notes == {}, "it has not seen all that was chosen"
    assert carry.export(first.state, file, 1 << 30, first.notes)
    line = os.pread(file, carry.ALIGN, 0).partition(b"\n")[0]
    for damage in (1, {"mirostat": "x"}, None):
        changed = json.dumps({**json.loads(line), "notes": damage}).encode()
        os.pwrite(file, changed.ljust(len(line)) + b"\n", 0)
        second = model.state(64)
        assert carry.adopt(second, file) == {}
        assert second.tokens == first.state.tokens


@pytest.mark.parametrize(("form", "other"), [("f16", "q8"), ("q8", "f16"), ("q8", "q8")])
def test_caches_of_another_form(model: TextModel, file: int, form: str, other: str) -> None:
    first = generation(model.state(64, form), [])
    while first.delivered < 3:
        first.step()
    assert carry.export(first.state, file, 1 << 30)
    second = model.state(64, other)
    assert carry.adopt(second, file) == {}
    assert second.tokens == first.state.tokens
    count = len(second.tokens)
    for name, (heads, dim) in carry.shapes(second).items():
        shape = heads, 64, dim
        a, b = (
            kv.load(s.kv, s.executable.read(name, kv.nbytes(s.kv, *shape)), shape)[:, :count]
            for s in (first.state, second)
        )
        assert np.abs(a - b).max() <= (0.01 * np.abs(a).max() if form != other else 0)


def test_a_file_that_does_not_fit_is_left(model: TextModel, file: int) -> None:
    first = generation(model.state(64), [])
    assert carry.export(first.state, file, 1 << 30) == 0  # nothing was computed
    while first.delivered < 3:
        first.step()
    assert carry.export(first.state, file, 100) == 0  # too large
    size = carry.export(first.state, file, 1 << 30)
    assert carry.adopt(model.state(32), file) is None  # another context
    state = model.state(64)
    os.ftruncate(file, size - 1)
    assert carry.adopt(state, file) is None
    os.ftruncate(file, size)
    os.pwrite(file, (1 << 30).to_bytes(4, "little"), carry.ALIGN)  # no such token
    assert carry.adopt(state, file) is None
    for damage in (b"", b"{}", b'{"version": 1}', b"[1]"):
        os.pwrite(file, damage + b"\n", 0)
        assert carry.adopt(state, file) is None
    assert state.tokens == []


@pytest.mark.gpu
def test_between_a_gpu_and_the_cpu(tiny_q8: Path, file: int) -> None:
    from engine.backends.vulkan import VulkanBackend

    gpu, cpu = VulkanBackend(allow_software=True), CpuBackend(2)
    models = [TextModel.load(tiny_q8, "", backend) for backend in (gpu, cpu)]
    for source, target in (models, models[::-1]):
        first = generation(source.state(64), [])
        while first.delivered < 3:
            first.step()
        assert carry.export(first.state, file, 1 << 30)
        second = target.state(64)
        assert carry.adopt(second, file) == {}
        count = len(second.tokens)
        assert count == len(first.state.tokens)
        # The next logits are those of one who computed all of it by itself.
        own = target.state(64)
        ids = first._ids[: count + 1]
        for at in range(0, len(ids), own.chunk):
            own.run(ids[at : at + own.chunk], at + own.chunk >= len(ids))
        second.run(ids[count:], True)
        assert np.abs(second.logits() - own.logits()).max() < 0.1
        os.ftruncate(file, 0)
    for made in models:
        made.close()
