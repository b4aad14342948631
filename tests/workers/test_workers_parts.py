# SPDX-License-Identifier: Apache-2.0
"""Slices in parts that leave a compositor its turns: they compute the same, and waits are told from
work.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.backends.base import RunStats
from engine.backends.vulkan import VulkanBackend
from engine.backends.vulkan.segments import Part, Run, Segments
from engine.pace import LIMIT, TURN
from engine.text.model import TextModel
from pvrd.workers import paced
from pvrd.workers.paced import Cut
from pvrd.workers.timings import Meter, Metered, Spans
from tests.workers.conftest import Peer


def test_a_wait_for_the_compositor_is_queue() -> None:
    now, meter = [0.0], Meter()
    spans = Spans(meter, lambda: now[0])
    spans.begins(1.0)
    meter.gate.waited, meter.compute, now[0] = 0.006, 0.002, 1.009
    taken = spans.take()
    assert (taken["queue"], taken["compute"], taken["host"]) == pytest.approx((6.0, 2.0, 1.0))


@pytest.mark.gpu
def test_a_text_in_parts_is_the_same_text(peer: Callable[..., Peer], tiny: Path) -> None:
    worker = peer("gpu", allow_software=True)
    worker.load(tiny)
    said = []
    for number, hz in enumerate((0.0, 60.0)):
        worker.send("govern", slice_ms=2.0, group_scale=1.0, share=1.0, refresh_hz=hz)
        worker.text(str(number), "Once upon a time", max_tokens=40)
        said.append([token["id"] for token in worker.answer(str(number))[:-1]])
    assert len(said[0]) == 40
    assert said[0] == said[1]


@pytest.mark.gpu
def test_parts_compute_what_the_whole_does(tiny: Path, tmp_path: Path) -> None:
    with contextlib.closing(VulkanBackend(allow_software=True)) as backend:
        model = TextModel.load(tiny, str(tmp_path / "tiny.pvrm"), backend)
        state = model.state(64)
        parts, seen = Segments(state.executable), []
        for count in (0, 1, 3, 500):
            state.common([])
            state.run([1, 2, 3], head=True)
            if count:
                kinds: list[Part] = []

                def run(
                    runs: Sequence[Run], submit: Callable[[Run], None], to: list[Part] = kinds
                ) -> int:
                    chosen = runs[min(len(to) % 3, len(runs) - 1)]  # one, two or three of them
                    to += chosen
                    submit(chosen)
                    return len(chosen)

                exe: Any = state.executable
                with pytest.MonkeyPatch.context() as patch:
                    cut = partial(parts.run, cut="decode", count=count, paced=run)
                    patch.setattr(exe, "run", lambda *names, cut=cut: RunStats(*cut(names)))
                    state.run([4], head=True, decode=True)
                assert len(kinds) == min(count, len(exe.program.sequences["decode"]))
            else:
                state.run([4], head=True, decode=True)
            seen.append(state.logits())
        state.close()
        model.close()
    assert all(np.array_equal(seen[0], other) for other in seen[1:])


@pytest.mark.gpu
@pytest.mark.parametrize("others", [True, False])
def test_tokens_that_go_together_are_the_same(tiny: Path, tmp_path: Path, others: bool) -> None:
    """Whole tokens where each is one part, as a small model's are, and parts with tokens behind."""
    with contextlib.closing(VulkanBackend(allow_software=True)) as backend:
        model = TextModel.load(tiny, str(tmp_path / "tiny.pvrm"), backend)
        model.ahead = 16
        state = model.state(64)
        exe: Any = state.executable
        parts, cut = Segments(exe), "decode" if others else "ahead"
        said, sizes = [], []
        for count, first in ((0, 1), (1, 1), (3, 1), (3, 2), (500, 1)):
            state.common([])
            state.run([1, 2, 3], head=True)
            lengths: list[int] = []

            def run(
                runs: Sequence[Run],
                submit: Callable[[Run], None],
                to: list[int] = lengths,
                first: int = first,
            ) -> int:
                chosen = runs[-1] if to else runs[first - 1]  # as many as may be, but at first
                to.append(len(chosen))
                submit(chosen)
                return len(chosen)

            with pytest.MonkeyPatch.context() as patch:
                if count:

                    def slice(*names: str, count: int = count, run: Any = run) -> RunStats:
                        spent, done = parts.run(names, cut, count, run)
                        return RunStats(spent, None, done)

                    patch.setattr(exe, "run", slice)
                before = backend.counters()
                records = state.run_ahead(4, 11, others)
                said.append([int(record[:4].view(np.uint32)[0]) for record in records])
                sizes.append(lengths)
                after = backend.counters()
                said[-1].append(after["dispatches"] - before["dispatches"])
                assert after["submissions"] - before["submissions"] == max(1, len(lengths))
        state.close()
        model.close()
    assert all(other == said[0] for other in said[1:])
    assert sizes[1] == [1, 10]  # tokens
    assert sizes[2] == [1, 20, 12]
    assert sizes[3] == [2, 19, 12]
    assert len(sizes[4]) == 1 + 11  # two of them have more than LONGEST parts


@contextlib.contextmanager
def paced_model(file: Path, folder: Path) -> Iterator[tuple[Meter, TextModel]]:
    """A model whose tokens are cut into parts, up to eight tokens a slice."""
    with contextlib.closing(VulkanBackend(allow_software=True)) as backend:
        meter = Meter()
        metered: Any = Metered(backend, meter)
        model = TextModel.load(file, str(folder / "tiny.pvrm"), metered)
        model.ahead = 8
        meter.gate.rhythm.pace(60.0)
        yield meter, model
        model.close()


@pytest.mark.gpu
def test_tokens_that_go_together_are_one_piece_of_a_slice(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By pieces the scheduler tells how long something urgent may have to wait."""
    monkeypatch.setattr(paced, "TOGETHER_S", 100.0)
    with paced_model(tiny, tmp_path) as (meter, model):
        monkeypatch.setattr(meter.gate.rhythm, "room", lambda now: 100.0)
        state = model.state(64)
        state.run([1, 2, 3], head=True)
        assert len(state.run_ahead(4, 6, others=False)) == 6
        state.close()
    assert meter.pieces == 2  # one token, of which nothing is known, and then five


def test_the_longest_goes_that_there_is_room_for() -> None:
    """By what its parts take one by one until it is known itself, and never one that is not."""
    gate = Meter().gate
    cut, rhythm = Cut(gate, None), gate.rhythm
    token = [Part(("ahead",), 2, number, 2) for number in range(2)]
    runs = [(token[0],), tuple(token), (*token, *token)]
    known = {(0, 1): 1e-3, (1, 1): 2e-3}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rhythm, "alone", lambda kind: known.get(kind[-1][2:], 0.0))
        for room, length in ((0.0, 1), (2.9e-3, 1), (3.1e-3, 2), (5.9e-3, 2), (1.0, 4)):
            patch.setattr(rhythm, "room", lambda now, room=room: room)
            assert len(cut._longest((), runs)) == length
        known[1, 1] = 4.6e-3
        assert len(cut._longest((), runs)) == 2  # 11.2 ms: more than go together
        known[0, 2] = 4.3e-3  # together they take less, and what follows them with them
        assert len(cut._longest((), runs)) == 4
        del known[0, 2]
        known[0, 4] = 9e-3
        assert len(cut._longest((), runs)) == 4
        del known[1, 1]
        assert len(cut._longest((), runs)) == 1


def test_where_there_are_streams_less_goes_together() -> None:
    """A frame waits for the end of what went together."""
    gate = Meter().gate
    cut, rhythm = Cut(gate, None), gate.rhythm
    token = [Part(("ahead",), 2, number, 2) for number in range(2)]
    runs = [(token[0],), tuple(token), (*token, *token)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rhythm, "alone", lambda kind: 1.5e-3 if kind[-1][3] == 1 else 0.0)
        patch.setattr(rhythm, "room", lambda now: 9e-3)
        assert len(cut._longest((), runs)) == 4
        patch.setattr(LIMIT, "streams", 1)
        assert len(cut._longest((), runs)) == 2


@pytest.mark.gpu
def test_a_slice_of_several_tokens_ends_early_for_what_cannot_wait(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tokens are the same whether all were computed in one slice or the rest in the next."""
    monkeypatch.setattr(paced, "TOGETHER_S", 0.0)  # it may end after each
    with paced_model(tiny, tmp_path) as (meter, model):
        said = []
        for urgent in (False, True):
            meter.urgent = lambda urgent=urgent: urgent  # type: ignore[misc]
            state = model.state(64)
            state.run([1, 2, 3], head=True)
            token, slices = 4, 0
            tokens: list[int] = []
            while len(tokens) < 6:
                records = state.run_ahead(token, min(3, 6 - len(tokens)), others=False)
                tokens += [int(record[:4].view(np.uint32)[0]) for record in records]
                token, slices = tokens[-1], slices + 1
            said.append((tokens, slices))
            state.close()
    assert [slices for _, slices in said] == [2, 6]
    assert said[0][0] == said[1][0]


def test_a_wait_for_a_turn_is_not_what_a_device_takes() -> None:
    """Else slices that waited for the compositor would make the next ones smaller."""
    gate = Meter().gate
    gate.rhythm.pace(60.0)
    waits = iter([5e-3, 0.0])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gate.rhythm, "wait", lambda now, need: next(waits))
        before = TURN.seconds
        gate.run("part", lambda: None)
    assert gate.waited >= 5e-3
    assert TURN.seconds - before == pytest.approx(gate.waited)
