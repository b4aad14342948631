# SPDX-License-Identifier: Apache-2.0
"""Rhythm beside a simulated compositor: neither makes the other late, and both get their time."""

from __future__ import annotations

import contextlib
import random
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.backends.base import RunStats
from engine.backends.vulkan import VulkanBackend
from engine.backends.vulkan.segments import Part, Run, Segments
from engine.pace import TURN
from engine.text.model import TextModel
from pvrd.workers import paced
from pvrd.workers.paced import Cut
from pvrd.workers.rhythm import LEAST_S, MARGIN_S, Rhythm
from pvrd.workers.timings import Meter, Metered, Spans
from tests.workers.conftest import Peer

FRAME_S = 6e-3
LOCKED_S = 3.0  # until then it may still search


@dataclass
class Screen:
    """A GPU with a compositor on it; by `kind` it shares half and half (turns), the frame goes
    first (first), or it does as an H200 was seen to (finishes): what is under way it goes on with
    for up to 0.7 ms; a frame under way is done first, but takes a while longer for the switch.
    `turn_s`: what it takes to turn to us after a frame.
    """

    hz: float = 60.0
    frame_s: float = FRAME_S
    kind: str = "turns"
    until_s: float = 1e9
    turn_s: float = 0.0
    seed: int = 1
    now: float = 0.0
    took: list[tuple[float, float]] = field(default_factory=list)  # begin, seconds of a frame

    def __post_init__(self) -> None:
        self._rng = random.Random(self.seed)
        self._left = self._begun = self._turns = 0.0
        self._number = 0
        self._next = 0.0
        self._after()

    def _after(self) -> None:
        self._number += 1
        self._next = self._number / self.hz + 60e-6 * self._rng.random()

    def _begin(self) -> None:
        self._begun = self.now
        self._left = self.frame_s if self.now < self.until_s else 0.0
        self._after()

    def _ended(self) -> None:
        self._left, self._turns = 0.0, self.turn_s
        self.took.append((self._begun, self.now - self._begun))

    def idle(self, until: float) -> None:
        """Time without work of ours."""
        while self.now < until:
            if self._left:
                step = min(self._left, until - self.now)
                self._left -= step
                self.now += step
                if self._left < 1e-9:
                    self._ended()
            elif self._next < until:
                self.now = max(self.now, self._next)
                self._begin()
            else:
                self.now = until

    def _finishes(self, seconds: float) -> None:
        if self._left:
            self.now += self._left + 0.75e-3
            self._ended()
        while self._next < self.now + seconds:
            seconds -= max(0.0, self._next - self.now)
            self.now = max(self.now, self._next)
            ours = min(seconds, 0.7e-3)
            self.now += ours
            seconds -= ours
            self._begin()
            self._begun -= ours
            if seconds < 1e-9:
                return
            self.now += self._left + 0.6e-3
            self._ended()
            seconds += 0.2e-3
        self.now += seconds

    def work(self, seconds: float) -> None:
        """A submission of ours."""
        if self._turns:
            seldom = self._rng.random() * (self._rng.random() < 0.12)
            seconds += self._turns * (0.8 + 0.3 * self._rng.random() + 0.7 * seldom)
            self._turns = 0.0
        if self.kind == "finishes":
            self._finishes(seconds)
            return
        while seconds > 1e-9:
            if self._left and self.kind == "first":
                self.now += self._left
                self._ended()
            elif self._left:
                step = min(seconds, self._left)
                seconds -= step
                self._left -= step
                self.now += 2 * step
                if self._left < 1e-9:
                    self._ended()
            elif self._next < self.now + seconds:
                step = max(0.0, self._next - self.now)
                seconds -= step
                self.now += step
                self._begin()
            else:
                self.now += seconds
                seconds = 0.0


def beside(screen: Screen, part_s: float, seconds: float = 12.0) -> tuple[Rhythm, float]:
    """Submissions of `part_s` in a row, and the share of the time that they had of the device;
    `screen.took` has the frames then.
    """
    rng, rhythm = random.Random(2), Rhythm()
    rhythm.pace(60.0)
    done = 0.0
    while screen.now < seconds:
        if (pause := rhythm.wait(screen.now, rhythm.alone("part"))) > 0:
            screen.idle(screen.now + pause + 80e-6 * rng.random())  # sleeps end late
            continue
        began = screen.now
        screen.idle(began + 20e-6)
        screen.work(part_s)
        screen.idle(screen.now + 40e-6 * rng.random() + (rng.random() < 10 * part_s) * 300e-6)
        rhythm.took("part", began, screen.now)
        screen.idle(screen.now + 30e-6)
        done += part_s if began > LOCKED_S else 0.0
    return rhythm, done / (seconds - LOCKED_S)


def frames(screen: Screen) -> tuple[float, float]:
    """Median and 99th percentile, ms."""
    took = sorted(1e3 * seconds for began, seconds in screen.took if began > LOCKED_S)
    return statistics.median(took), took[len(took) * 99 // 100]


@pytest.mark.parametrize(("kind", "worst"), [("turns", 1.16), ("first", 1.05), ("finishes", 1.27)])
@pytest.mark.parametrize("part_s", [0.5e-3, 0.8e-3, 2e-3])
def test_frames_stay_as_they_are_and_half_of_the_device_is_used(
    kind: str, worst: float, part_s: float
) -> None:
    for seed in range(2):
        screen = Screen(kind=kind, seed=seed)
        _, share = beside(screen, part_s)
        middle, p99 = frames(screen)
        assert middle <= 1.05 * 1e3 * FRAME_S
        assert p99 <= worst * 1e3 * FRAME_S
        assert share >= 0.45


def test_parts_that_rest_and_are_long_when_the_search_begins() -> None:
    """As a worker's are that has a share of the device and does not yet cut what it submits."""
    screen, rng, rhythm = Screen(kind="finishes"), random.Random(3), Rhythm()
    rhythm.pace(60.0)
    while screen.now < 8.0:
        part_s = 3.2e-3 if screen.now < 0.15 else 0.9e-3
        while (pause := rhythm.wait(screen.now, rhythm.alone(part_s))) > 0:
            screen.idle(screen.now + pause + 80e-6 * rng.random())
        began = screen.now
        screen.work(part_s)
        rhythm.took(part_s, began, screen.now)
        screen.idle(screen.now + (1 / 0.75 - 1) * part_s + 0.9e-3 * rng.random())
    assert frames(screen)[0] <= 1.05 * 1e3 * FRAME_S
    assert 0.9 * FRAME_S < rhythm.busy < 1.4 * FRAME_S


@pytest.mark.parametrize("hz", [59.94, 60.06])
def test_a_screen_that_is_not_quite_as_fast_as_it_says(hz: float) -> None:
    screen = Screen(hz=hz)
    _, share = beside(screen, 0.8e-3)
    assert frames(screen)[1] <= 1.10 * 1e3 * FRAME_S
    assert share >= 0.45


def test_turning_to_us_is_no_touch() -> None:
    """After each frame an H200 takes a quarter of a millisecond longer for the first of ours, but
    not after pauses of our own. Taken for a touch that let the part grow: the device was unused.
    """
    screen, rng, rhythm = Screen(kind="finishes", turn_s=0.22e-3), random.Random(2), Rhythm()
    rhythm.pace(60.0)
    lengths = []
    for number in range(4000):
        while (pause := rhythm.wait(screen.now, rhythm.alone("part"))) > 0:
            screen.idle(screen.now + pause + 60e-6 * rng.random())
        began = screen.now
        screen.work(1.05e-3 + 0.05e-3 * rng.random())
        rhythm.took("part", began, screen.now)
        screen.idle(screen.now + (0.9e-3 if not number % 7 else 0.05e-3))
        if screen.now > LOCKED_S:
            lengths.append(rhythm.busy)
    assert frames(screen)[0] <= 1.07 * 1e3 * FRAME_S
    assert statistics.quantiles(lengths, n=20)[-1] < FRAME_S + 1.2e-3


@pytest.mark.parametrize("share", [0.6, 0.99, 1.0])
@pytest.mark.parametrize("late_s", [0.4e-3, 1.2e-3, 5e-3, 16e-3])
def test_sleeps_that_end_late_do_not_let_a_slice_wait_for_ever(share: float, late_s: float) -> None:
    """On a busy machine each sleep may end later than what fits ever allows."""
    rhythm = Rhythm()
    rhythm.pace(60.0)
    rhythm.start = 0.0
    rhythm._begin(3e-3)
    need = share * (rhythm.period - rhythm.busy - sum(MARGIN_S))
    now = 1e-3
    for _ in range(50):
        began = now
        while (pause := rhythm.wait(now, need)) > 0:
            now += pause + late_s
            assert now - began < 0.2
        now += need + 0.1e-3


def test_a_part_where_nobody_works_any_more_closes() -> None:
    rhythm, _ = beside(Screen(until_s=5.0), 0.8e-3, seconds=9.0)
    assert rhythm.start is None or rhythm.busy < 4 * LEAST_S


def test_two_that_never_come_to_an_end_together() -> None:
    screen = Screen(frame_s=0.65 / 60)
    _, share = beside(screen, 0.8e-3)
    assert frames(screen)[1] <= 1.20 * 1e3 * screen.frame_s
    assert share >= 0.1


def test_without_a_compositor_nothing_waits() -> None:
    rhythm = Rhythm()
    for number in range(100):
        assert rhythm.wait(0.01 * number, 1e-3) == 0.0
        rhythm.took("part", 0.01 * number, 0.01 * number + 1e-3 * (1 + number % 2))
    rhythm.pace(60.0)
    first = rhythm.on
    rhythm.pace(0.0)
    assert (first, rhythm.on) == (True, False)
    assert rhythm.wait(5.0, 1e-3) == 0.0


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
                before = backend.counters()["dispatches"]
                records = state.run_ahead(4, 11, others)
                said.append([int(record[:4].view(np.uint32)[0]) for record in records])
                sizes.append(lengths)
                said[-1].append(backend.counters()["dispatches"] - before)
        state.close()
        model.close()
    assert all(other == said[0] for other in said[1:])
    assert sizes[1] == [1, 8, 2]  # tokens
    assert sizes[2] == [1, 8, *[6] * 4]
    assert sizes[3] == [2, 7, *[6] * 4]
    assert len(sizes[4]) == 1 + 11  # of more than LONGEST parts each


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
        for room, length in ((0.0, 1), (2.9e-3, 1), (3.1e-3, 2), (5.9e-3, 2), (1.0, 2)):
            patch.setattr(rhythm, "room", lambda now, room=room: room)
            assert len(cut._longest((), runs)) == length
        known[0, 4] = 3.5e-3  # together they take less
        assert len(cut._longest((), runs)) == 4
        del known[1, 1]
        assert len(cut._longest((), runs)) == 1


@pytest.mark.gpu
def test_a_slice_of_several_tokens_ends_early_for_what_cannot_wait(
    tiny: Path, tmp_path: Path
) -> None:
    """The tokens are the same whether all were computed in one slice or the rest in the next."""
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
