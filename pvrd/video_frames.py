# SPDX-License-Identifier: Apache-2.0
"""The frames of a video session, from SUBMIT to the answer: who makes each, and by when.

A frame with a deadline is lent to a worker until there is just time left to interpolate it: then
the floor, or whoever is there, does that, or it is dropped for a client that wants to do it itself.
What nobody can make is dropped soon after its deadline.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pvrd.ladder import Ladder, Pace, Spare
from pvrd.slot_socket import DEVICES, DONE, DROP, SlotMessage
from pvrd.stats import Stats
from pvrd.video_seat import Seat

QUICK_S = 5e-9  # that plain interpolation takes for a pixel, until it was measured
SPARE_S = 0.003  # for messages and turns of the loop
GRACE_S = 0.05  # after its deadline, a frame that nobody made is dropped
# What a frame's time is split into (pvrd/workers/timings.py).
PARTS = ("input", "queue", "upload", "compute", "download", "host")
NAMED_MS = 5.0  # from here on a wait is named
MAP_CHARS = 4096
WORD_S = 0.05  # in which a worker says that it gave a frame up, unless it is stuck
SOON_S = 0.002  # a frame that nobody could take is offered again


@dataclass
class Frame:
    """A frame between SUBMIT and DONE."""

    submit: SlotMessage
    seat: Seat | None = None  # that makes it
    level: int = 0
    issued: float = 0.0
    budget: float | None = None
    rescued: bool = False  # it is being interpolated
    kills: int = 0
    answer: SlotMessage | None = None
    tried: set[Seat] = field(default_factory=set)  # seats that were to interpolate it

    def drop(self, level: int = 0) -> None:
        """Nobody makes it; level: of plain interpolation, which is left to the client."""
        self.seat, self.level = None, level
        self.answer = SlotMessage(DROP, self.submit.seq, self.submit.slot, pts=self.submit.pts)


class Line:
    """Frames in the order of SUBMIT; the first is the oldest.

    places: for each level of the ladder the seat that has it and its number there; of a session
    that adapts the last one is plain interpolation, which each seat has as a further level.
    interpolate: False where that is left to the client.
    """

    def __init__(
        self,
        places: Sequence[tuple[Seat, int]],
        seats: Sequence[Seat],
        ladder: Ladder,
        pace: Pace,
        adapt: bool,
        stats: Stats,
        interpolate: bool = True,
    ) -> None:
        self.frames: deque[Frame] = deque()
        self.timed = False  # the client has deadlines, or a pace
        self.tile_map = ""
        self.reused = 0
        self.times = dict.fromkeys(PARTS, 0.0)  # milliseconds of all frames
        self._places, self._seats, self._ladder, self._pace = places, seats, ladder, pace
        self._adapt, self._stats = adapt, stats
        self._leaves = adapt and not interpolate
        self._last: Seat | None = None  # that was given the last frame
        self._plain = len(places) - 1

    def add(self, submit: SlotMessage, now: float, free_before: bool) -> None:
        """A SUBMIT came; free_before as of Pace."""
        self._pace.submitted(now, submit.deadline, free_before)
        self.frames.append(Frame(submit))
        if self._adapt and not self.timed:
            self.timed = bool(submit.deadline) or self._pace.interval is not None

    # -- time

    def _rescue_at(self, frame: Frame) -> float:
        """When it has to be interpolated (CLOCK_MONOTONIC seconds)."""
        plain_s = 0.0 if self._leaves else self._ladder.levels[self._plain].takes or 0.0
        return frame.submit.deadline / 1e9 - 1.25 * plain_s - SPARE_S

    @property
    def _grace(self) -> float:
        return max(GRACE_S, self._pace.interval or 0.0)

    def next_look(self, now: float) -> float | None:
        """Seconds until a frame may be late."""
        times = []
        for frame in self.frames:
            deadline = frame.submit.deadline / 1e9
            if not deadline or frame.answer is not None:
                continue
            if self._adapt:
                end = deadline + self._grace + SOON_S
                times.append(end if frame.rescued else min(self._rescue_at(frame), end))
            elif frame.seat is None:
                times.append(deadline)
        return max(min(times) - now, SOON_S) if times else None

    def look(self, now: float) -> None:
        """Interpolates and drops what is late. A frame whose deadline went by before it was seen
        (this process got no time) is not lost for that: it has the grace, too.
        """
        for frame in self.frames:
            deadline = frame.submit.deadline
            if not deadline or frame.answer is not None:
                continue
            over = now - deadline / 1e9
            if self._adapt and over > self._grace:
                frame.drop()
            elif self._adapt and not frame.rescued and now >= self._rescue_at(frame):
                self._rescue(frame, now)
            if over > 0 and frame.seat is None and not frame.tried and frame.answer is None:
                frame.drop()

    def _rescue(self, frame: Frame, now: float) -> None:
        """Plain interpolation, by the floor or else by any worker that answers."""
        if frame.seat is not None:
            self._ladder.done(now, frame.level, now - frame.issued, frame.budget, False)
        if self._leaves:
            frame.drop(self._plain)
            return
        floor = self._places[self._plain][0]
        for seat in (floor, *self._seats):
            if seat.ready and seat not in frame.tried and not self.stuck(seat):
                if frame.submit.seq in seat.held:
                    continue
                frame.seat = None
                self._give(frame, seat, self._plain, now, None)
                return

    def stuck(self, seat: Seat, now: float | None = None) -> bool:
        """Does it still have a frame that was taken from it? now: longer than it may need to say
        that it gave it up.
        """
        making = {f.submit.seq for f in self.frames if f.seat is seat}
        taken = [seq for seq in seat.held if seq not in making]
        return any(now is None or now > seat.leases.get(seq, 0.0) + WORD_S for seq in taken)

    # -- giving

    def issue(self, now: float, barred: Mapping[int, str]) -> None:
        """Gives waiting frames to workers."""
        for frame in self.frames:
            if frame.seat is not None or frame.answer is not None or frame.rescued:
                continue
            slot, seq = frame.submit.slot, frame.submit.seq
            if any(self._writes(seat, slot, seq, now) for seat in self._seats):
                continue
            budget, wait = self._budget(frame, now)
            calm = not any(seat.held or not seat.use.calm(now) for seat in self._seats)
            level = self._ladder.pick(now, budget, barred, calm, wait, self._spare(now))
            if level == self._plain and self._leaves:
                frame.drop(level)
                continue
            if level is None or not self._places[level][0].has_room():
                return
            if level < self._ladder.at:
                self._places[level][0].use.tries(now)
            self._give(frame, self._places[level][0], level, now, budget)

    def _spare(self, now: float) -> dict[str, Spare]:
        """What devices have to spare, by what frames took of late."""
        interval = self._pace.interval or 0.0
        uses = {seat.worker.kind: seat.use for seat in self._seats if seat.ready}
        parts = {kind: 1.0 - use.part(now) for kind, use in uses.items()}
        return {kind: Spare(interval * part, part) for kind, part in parts.items()}

    def _writes(self, seat: Seat, slot: int, seq: int, now: float) -> bool:
        """May the seat be writing another frame into the slot? Its lease is over, but it has not
        said so: it is given a moment.
        """
        return any(
            held == slot and other != seq and now < seat.leases.get(other, 0.0) + WORD_S
            for other, held in seat.held.items()
        )

    def _budget(self, frame: Frame, now: float) -> tuple[float | None, float]:
        """Seconds that it may take, None: any time; and until the present level's seat is free."""
        if not self._adapt:
            return None, 0.0
        interval = self._pace.interval
        if not frame.submit.deadline:
            return interval, 0.0
        seat = self._places[self._ladder.at][0]
        ahead = [f for f in self.frames if f.seat is seat and f.submit.seq in seat.held]
        wait = sum(self._ladder.levels[f.level].takes or 0.0 for f in ahead)
        if ahead:
            wait = max(0.0, wait - (now - max(ahead[0].issued, seat.last_done)))
        left = self._rescue_at(frame) - now
        # A client that waits for long evens out frames that take longer than others.
        return left if interval is None else min(left, max(interval, left / 2) + wait), wait

    def _give(
        self, frame: Frame, seat: Seat, level: int, now: float, budget: float | None
    ) -> None:
        submit = frame.submit
        home, at = self._places[level]
        plain = self._adapt and level == self._plain
        if plain:
            frame.rescued = True
            frame.tried.add(seat)
            at = at if seat is home else len(seat.ways)
        deadline, lease = submit.deadline / 1e9, 0.0
        if deadline and self._adapt:
            lease = deadline + self._grace if plain else self._rescue_at(frame)
        frame.seat, frame.level, frame.issued, frame.budget = seat, level, now, budget
        seat.held[submit.seq] = submit.slot
        seat.leases[submit.seq] = lease or float("inf")
        seat.worker.send(
            {
                "t": "frame", "session": seat.id, "seq": submit.seq, "slot": submit.slot,
                "level": at, "fresh": self._last is not seat, "lease_ns": int(1e9 * lease),
                "deadline_ns": int(1e9 * (min(lease, deadline) if lease else deadline)),
                "issued_ns": int(1e9 * now),
            }
        )  # fmt: skip
        self._last = seat

    def take_back(self, seat: Seat, now: float) -> list[Frame]:
        """Frames that the seat was to make are for others."""
        found = [f for f in self.frames if f.seat is seat and f.answer is None]
        for frame in found:
            self._ladder.done(now, frame.level, now - frame.issued, frame.budget, False)
            frame.seat = None
            frame.rescued = False
            self._stats.frames_reissued += 1
        seat.forget()
        return found

    # -- answers

    def done(self, seat: Seat, message: Mapping[str, Any], before: float, now: float) -> None:
        """A worker's last word about a frame. before: when it said its last one before that."""
        ms = message.get("ms")
        seat.use.took(now, ms / 1e3 if isinstance(ms, (int, float)) else 0.0)
        frame = next((f for f in self.frames if f.submit.seq == message.get("seq")), None)
        if frame is None or frame.answer is not None:
            return  # it is over; its slot is free for the next one now
        mine, took = frame.seat is seat, now - max(frame.issued, before)
        # What the worker computed again meanwhile tells nothing of the level.
        aside = message.get("aside_ms")
        aside = min(max(aside / 1e3, 0.0), took) if isinstance(aside, (int, float)) else 0.0
        took -= aside
        if message.get("given_up"):
            if mine:
                part = message.get("part")
                if isinstance(part, float) and part > 0.05:
                    took /= part
                fine = aside > 0 and took <= (frame.budget or 0.0)
                self._ladder.done(now, frame.level, took, frame.budget, fine)
                frame.seat = None
                self._rescue(frame, now)
            return
        deadline = frame.submit.deadline / 1e9
        if mine:
            fine = not deadline or now - aside <= deadline
            self._ladder.done(now, frame.level, took, frame.budget, fine)
        # Done after all, by whom it was taken from, it is the better one.
        place = seat, message.get("level", 0)
        frame.level = self._places.index(place) if place in self._places else self._plain
        self._answer(frame, seat, message)

    def _answer(self, frame: Frame, seat: Seat, message: Mapping[str, Any]) -> None:
        submit = frame.submit
        fallback = _count(message.get("tiles_fallback"), 32)
        frame.answer = SlotMessage(
            DONE, submit.seq, submit.slot,
            status=1 if message.get("status") or fallback else 0,
            pts=submit.pts,
            deadline=frame.level,
            tiles=_count(message.get("tiles"), 32),
            tiles_fallback=fallback,
            work_ns=_count(float(message.get("ms") or 0.0) * 1e6, 64),
            device=DEVICES[seat.worker.kind],
        )  # fmt: skip
        seat.worker.counters.frames += 1
        stats = self._stats
        stats.tiles += frame.answer.tiles
        stats.tiles_fallback += fallback
        stats.tiles_cpu += _count(message.get("tiles_cpu"), 32)
        reused = _count(message.get("tiles_reused"), 32)
        stats.tiles_reused += reused
        self.reused += reused
        times = message.get("times")
        for part, ms in times.items() if isinstance(times, dict) else ():
            if part in self.times and isinstance(ms, (int, float)):
                self.times[part] += max(0.0, float(ms))
                if ms > NAMED_MS and part not in ("compute", "host"):
                    longest = self.times.get(f"{part}_wait", 0.0)
                    self.times[f"{part}_wait"] = max(longest, float(ms))
        if isinstance(message.get("map"), str):
            self.tile_map = message["map"][:MAP_CHARS]

    def answered(self, send: Callable[[Frame], None]) -> None:
        """Hands answers over, in the order of SUBMIT."""
        while self.frames and self.frames[0].answer is not None:
            send(self.frames.popleft())


def _count(value: Any, bits: int) -> int:
    number = int(value) if isinstance(value, (int, float)) else 0
    return min(max(number, 0), (1 << bits) - 1)
