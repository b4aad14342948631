# SPDX-License-Identifier: Apache-2.0
"""Frames among workers that are slow, stuck or die, in simulated time: one answer each, in order,
and none later than it may be.
"""

from __future__ import annotations

import heapq
import itertools
import random
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import pytest

from pvrd.ladder import Ladder, Level, Pace, Use
from pvrd.slot_socket import DONE, DROP, SUBMIT, SlotMessage
from pvrd.stats import Stats
from pvrd.video_frames import GRACE_S, Frame, Line
from pvrd.video_seat import AHEAD, Seat

INTERVAL, SLOTS, FRAMES = 0.04, 6, 450
ALONE = {"gpu": [0.02, 0.01], "cpu": [0.03, 0.006]}  # the CPU's last is plain


@dataclass(eq=False)
class Worker:
    """Makes frames one after the other; `speed` 0 is one that is stuck."""

    kind: str
    world: World
    speed: float = 1.0
    queue: list[dict[str, Any]] = field(default_factory=list)
    counters: Any = field(default_factory=lambda: SimpleNamespace(frames=0))
    turn: int = 0  # of the frames that it began with

    def send(self, message: dict[str, Any]) -> None:
        self.queue.append(message)
        if len(self.queue) == 1:
            self.begin()

    def begin(self) -> None:
        """The next of the queue, to its end or to that of its lease."""
        if not self.queue or not self.speed:
            return
        self.queue.sort(key=lambda m: m["level"] == 0 or self.kind == "gpu")  # plain ones first
        message, now = self.queue[0], self.world.now
        level = message["level"]
        alone = ALONE[self.kind][level] if level < len(ALONE[self.kind]) else 0.006
        took = alone / self.speed
        lease = message["lease_ns"] / 1e9 or float("inf")
        end, given_up = now + took, now + took > lease
        if given_up:
            end = max(now, lease)
        self.turn += 1
        turn = self.turn

        def over() -> None:
            if turn == self.turn and self.speed:
                self.queue.pop(0)
                word = {"seq": message["seq"], "level": level, "ms": 1e3 * took}
                if given_up:
                    word |= {"given_up": True, "part": 0.5}
                self.world.word(self, word)
                self.begin()

        self.world.at(end, over)


class Place:
    """As Seat, without a bus."""

    def __init__(self, worker: Worker) -> None:
        self.id, self.worker, self.ready = worker.kind, worker, True
        self.held: dict[int, int] = {}
        self.leases: dict[int, float] = {}
        self.last_done = 0.0
        self.use = Use()
        # As sessions have them: a plain level behind the networks of a GPU.
        self.ways = [0] * 2

    def forget(self) -> None:
        self.held.clear()
        self.leases.clear()

    def has_room(self) -> bool:
        return self.ready and len(self.held) < AHEAD


class World:
    """Time, two workers, a client."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.now = 0.0
        self._events: list[tuple[float, int, Any]] = []
        self._number = itertools.count()
        self.look: float | None = None  # when the session looks again
        self.gpu, self.cpu = (Place(Worker(kind, self)) for kind in ("gpu", "cpu"))
        seats = cast("list[Seat]", [self.gpu, self.cpu])
        places = [(seat, i) for seat in seats for i in range(2)]
        levels = [Level(f"{s.worker.kind} {i}", s.worker.kind) for s, i in places]
        self.ladder = Ladder(levels)
        for i, (seat, level) in enumerate(places):
            self.ladder.know(i, ALONE[seat.worker.kind][level])
        self.line = Line(places, seats, self.ladder, Pace(SLOTS), True, Stats())
        self.free = list(range(SLOTS))
        self.sent: list[float] = []
        self.answers: list[tuple[float, Frame]] = []

    def at(self, when: float, what: Any) -> None:
        heapq.heappush(self._events, (when, next(self._number), what))

    def word(self, worker: Worker, message: dict[str, Any]) -> None:
        seat = self.gpu if worker is self.gpu.worker else self.cpu
        assert seat.held.pop(message["seq"]) is not None
        seat.leases.pop(message["seq"])
        before, seat.last_done = seat.last_done, self.now
        self.line.done(cast("Seat", seat), message, before, self.now)

    def submit(self) -> None:
        if self.free:
            seq, slot = len(self.sent), self.free.pop(0)
            self.sent.append(self.now + 2.5 * INTERVAL)
            deadline = int(1e9 * self.sent[-1])
            self.line.add(SlotMessage(SUBMIT, seq, slot, deadline=deadline), self.now, True)

    def kill(self, seat: Place) -> None:
        """And a successor, after a while."""
        worker = seat.worker
        worker.turn += 1
        worker.queue.clear()
        seat.ready = False
        self.line.take_back(cast("Seat", seat), self.now)

        def again() -> None:
            seat.ready, worker.speed = True, 1.0

        self.at(self.now + self.rng.uniform(0.05, 0.5), again)

    def disturb(self, seat: Place, speed: float) -> None:
        was, seat.worker.speed = seat.worker.speed, speed
        if not was and speed:
            seat.worker.begin()

    def pump(self) -> None:
        barred = {}
        for at, (seat, _) in enumerate(self.line._places):
            if not seat.ready or self.line.stuck(seat):
                barred[at] = "it is not there"
        self.line.look(self.now)
        self.line.issue(self.now, barred)
        self.line.answered(self.answer)
        pause = self.line.next_look(self.now)
        self.look = None if pause is None else self.now + pause

    def answer(self, frame: Frame) -> None:
        self.answers.append((self.now, frame))
        self.free.append(frame.submit.slot)

    def run(self, end: float) -> None:
        while self._events or self.look is not None:
            first = self._events[0][0] if self._events else float("inf")
            if self.look is not None and self.look < first:
                self.now = self.look
            else:
                self.now, _, what = heapq.heappop(self._events)
                what()
            if self.now > end:
                return
            self.pump()


def play(seed: int, trouble: bool) -> World:
    world, rng = World(seed), random.Random(seed)
    for n in range(FRAMES):
        world.at(n * INTERVAL, world.submit)
    for _ in range(12 if trouble else 0):
        seat, when = rng.choice((world.gpu, world.cpu)), rng.uniform(0, 7)
        kind = rng.choice(("slow", "stuck", "killed"))
        if kind == "killed":
            world.at(when, lambda s=seat: world.kill(s))
        else:
            speed = rng.uniform(0.05, 0.6) if kind == "slow" else 0.0
            world.at(when, lambda s=seat, v=speed: world.disturb(s, v))
            world.at(when + rng.uniform(0.05, 1), lambda s=seat: world.disturb(s, 1.0))
    world.run(FRAMES * INTERVAL + 20)
    return world


@pytest.mark.parametrize("seed", range(60))
def test_each_frame_has_one_answer_in_order_and_in_time(seed: int) -> None:
    world = play(seed, True)
    assert [f.submit.seq for _, f in world.answers] == list(range(len(world.sent)))
    for when, frame in world.answers:
        assert frame.answer is not None
        # At the latest it is dropped.
        assert when <= frame.submit.deadline / 1e9 + GRACE_S + 0.01
    # All is well at the end, and by a network of the GPU.
    last = [f for _, f in world.answers[-10:]]
    assert {f.answer.type for f in last if f.answer} == {DONE}
    assert all(f.level <= 1 for f in last)
    assert not world.gpu.held
    assert not world.cpu.held


def test_an_undisturbed_session_makes_all_by_its_own_network() -> None:
    world = play(0, False)
    assert {(f.answer.type, f.level) for _, f in world.answers if f.answer} == {(DONE, 0)}
    assert len(world.answers) == FRAMES


def test_frames_that_are_seen_late_are_interpolated_within_the_grace() -> None:
    """As when the control process got no time: the first one is too old, the others are not."""
    world = World(0)
    late = [GRACE_S + 0.01, GRACE_S - 0.02, 0.01]
    world.now = 10.0
    for seq, over in enumerate(late):
        submit = SlotMessage(SUBMIT, seq, seq, deadline=int(1e9 * (world.now - over)))
        world.line.add(submit, world.now, True)
    world.pump()
    assert [(f.submit.seq, f.answer.type) for _, f in world.answers if f.answer] == [(0, DROP)]
    world.run(world.now + 1)
    done = [(f.answer.type, f.level) for _, f in world.answers[1:] if f.answer]
    assert done == [(DONE, 3)] * 2
    for seat in (world.gpu, world.cpu):
        world.kill(seat)
    submit = SlotMessage(SUBMIT, 3, 3, deadline=int(1e9 * (world.now - 0.01)))
    world.line.add(submit, world.now, True)
    world.pump()
    assert [f.answer.type for _, f in world.answers[3:] if f.answer] == [DROP], "nobody is there"


NETWORK_S = 0.011


class Crowd:
    """Sessions of small frames whose clients interpolate, all on one CPU that makes first what is
    due first."""

    def __init__(self, sessions: int, seed: int) -> None:
        self.rng = random.Random(seed)
        self.now, self.slow = 0.0, lambda now: 1.0
        self._events: list[tuple[float, int, Any]] = []
        self._number = itertools.count()
        self._queue: list[tuple[float, int, int, Any]] = []  # lease, number, session, message
        self._works = False
        self._use = Use()
        self.lines, self.seats, self.ladders = [], [], []
        self._looks = [float("inf")] * sessions
        self.made: list[list[tuple[float, bool]]] = []  # of each session: when, by the network
        for at in range(sessions):
            worker = SimpleNamespace(kind="cpu", counters=SimpleNamespace(frames=0))
            worker.send = lambda message, at=at: self.take(at, message)
            seat = Place(cast("Worker", worker))
            seat.use = self._use
            ladder = Ladder([Level("network", "cpu"), Level("plain", "cpu")])
            ladder.know(0, NETWORK_S)
            places = [(cast("Seat", seat), i) for i in range(2)]
            line = Line(places, [places[0][0]], ladder, Pace(SLOTS), True, Stats(), False)
            self.lines.append(line)
            self.seats.append(seat)
            self.ladders.append(ladder)
            self.made.append([])

    def at(self, when: float, what: Any) -> None:
        heapq.heappush(self._events, (when, next(self._number), what))

    def take(self, session: int, message: dict[str, Any]) -> None:
        heapq.heappush(
            self._queue, (message["lease_ns"] / 1e9, next(self._number), session, message)
        )
        if not self._works:
            self._works = True
            self.at(self.now, self.begin)

    def begin(self) -> None:
        if not self._queue:
            self._works = False
            return
        lease, _, session, message = heapq.heappop(self._queue)
        took = NETWORK_S * self.rng.uniform(0.9, 1.2) * self.slow(self.now)
        given_up = self.now + took > lease
        end = max(self.now, lease) if given_up else self.now + took
        word = {"seq": message["seq"], "level": 0, "ms": 1e3 * (end - self.now)}
        if given_up:
            word |= {"given_up": True, "part": 0.5 if end > self.now else 0.0}

        def over() -> None:
            seat = self.seats[session]
            seat.held.pop(message["seq"])
            seat.leases.pop(message["seq"])
            before, seat.last_done = seat.last_done, self.now
            self.lines[session].done(cast("Seat", seat), word, before, self.now)
            self.begin()

        self.at(end, over)

    def submit(self, session: int, n: int) -> None:
        deadline = int(1e9 * (self.now + 2.5 * INTERVAL))
        message = SlotMessage(SUBMIT, n, n % SLOTS, deadline=deadline)
        self.lines[session].add(message, self.now, True)

    def pump(self) -> None:
        for session, line in enumerate(self.lines):
            line.look(self.now)
            line.issue(self.now, {})
            line.answered(lambda frame, session=session: self.answer(session, frame))
            pause = line.next_look(self.now)
            self._looks[session] = float("inf") if pause is None else self.now + pause

    def answer(self, session: int, frame: Frame) -> None:
        assert frame.answer is not None
        assert self.now <= frame.submit.deadline / 1e9
        self.made[session].append((self.now, frame.answer.type == DONE))

    def run(self, seconds: float, sessions: Any = None) -> None:
        """More of it, with frames of these sessions."""
        begin = self.now
        for session in range(len(self.lines)) if sessions is None else sessions:
            count = len(self.made[session])
            for n in range(round(seconds / INTERVAL)):
                self.at(begin + n * INTERVAL, lambda s=session, n=count + n: self.submit(s, n))
        while self._events or min(self._looks) < float("inf"):
            if not self._events or min(self._looks) < self._events[0][0]:
                self.now = min(self._looks)
            else:
                self.now, _, what = heapq.heappop(self._events)
                what()
            self.pump()

    def part(self, session: int, since: float) -> float:
        """Of a session's frames those that the network made."""
        late = [network for when, network in self.made[session] if when >= since]
        return sum(late) / len(late)


@pytest.mark.parametrize("seed", range(2))
def test_small_streams_have_what_a_cpu_can_make(seed: int) -> None:
    """Eight of 25 frames a second where there is time for three and a half: as many have all their
    frames by the network, the others none, and it stays so."""
    crowd = Crowd(8, seed)
    crowd.run(30)
    before = [ladder.changes for ladder in crowd.ladders]
    crowd.run(30)
    parts = sorted(crowd.part(session, 30.0) for session in range(8))
    assert sum(parts) >= 2.7
    assert sum(part > 0.9 for part in parts) >= 2
    changes = sum(ladder.changes for ladder in crowd.ladders) - sum(before)
    assert changes <= 8 * 4


def test_a_small_stream_comes_back_soon_after_the_others_went() -> None:
    crowd = Crowd(8, 1)
    crowd.run(30)
    begin = crowd.now
    crowd.run(6, range(3))
    crowd.run(1, range(3))
    assert [crowd.part(session, begin + 6.0) for session in range(3)] == [1.0] * 3


@pytest.mark.parametrize("seed", range(3))
def test_programs_beside_it_do_not_make_a_small_stream_flap(seed: int) -> None:
    """They make every other frame too slow, then go."""
    crowd, rng = Crowd(1, seed), random.Random(seed)
    crowd.slow = lambda now: rng.choice((1.0, 2.0, 7.0, 12.0))
    crowd.run(60)
    before = crowd.ladders[0].changes
    crowd.run(60)
    assert crowd.ladders[0].changes - before <= 4
    crowd.slow = lambda now: 1.0
    begin = crowd.now
    crowd.run(12)
    assert crowd.part(0, begin + 10.0) == 1.0


def test_one_slow_moment_costs_no_level() -> None:
    crowd = Crowd(1, 2)
    crowd.slow = lambda now: 8.0 if 3 <= now < 3.05 or 5 <= now < 5.02 else 1.0
    crowd.run(8)
    assert crowd.ladders[0].changes == 0
    assert sum(not network for _, network in crowd.made[0]) <= 4


def test_a_device_that_is_stuck_costs_no_frame_while_the_other_answers() -> None:
    world = World(1)
    for n in range(100):
        world.at(n * INTERVAL, world.submit)
    world.at(1.0, lambda: world.disturb(world.gpu, 0.0))
    world.run(30)
    kinds = [f.answer.type for _, f in world.answers if f.answer]
    assert kinds == [DONE] * 100
    late = [when - f.submit.deadline / 1e9 for when, f in world.answers]
    # The second one waited for a frame of the CPU (whose slices are shorter than that).
    assert sum(by > 0 for by in late) <= 1
    assert max(late) < ALONE["cpu"][0]
    # The two that it had were interpolated; then the CPU has a network for them.
    assert sum(f.level == 3 for _, f in world.answers) <= 4
    assert world.answers[-1][1].level == 2
