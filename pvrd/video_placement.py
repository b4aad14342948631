# SPDX-License-Identifier: Apache-2.0
"""Where frames of a video session may be made: its seats, which are open, which levels are barred.

The seats (pvrd/video_seat.py): `gpu` has the session's own network there, `less` smaller ones,
`home` is on the CPU, for when the GPU is not there, `floor` is what is always in time. What the
governor and the workers say decides; frames are given to seats by pvrd/video_frames.py.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from pvrd import systemd
from pvrd.errors import PvrdError
from pvrd.ladder import Ladder, Level
from pvrd.models import Model
from pvrd.supervisor import FALL_BACK
from pvrd.video_frames import QUICK_S
from pvrd.video_seat import Seat, Way

if TYPE_CHECKING:
    from pvrd.video_session import VideoSession

WHY_CHARS = 300


class Placement:
    """`seats`: those that this session may have. `places`: for each level, the best first, the seat
    that has it and its number there. `ladder`: picks among them.
    """

    def __init__(
        self, session: VideoSession, smaller: Sequence[Sequence[Model]], leaves: bool
    ) -> None:
        """smaller: families of smaller networks, the largest first; where there is none, home is
        the floor. leaves: plain interpolation, the last level, is left to the client.
        """
        self._session = session
        self._supervisor = session.core.supervisor
        self._leaves = leaves
        self._stay = False  # the GPU failed this session: it stays where it is
        self._used: list[Model] = []
        self._own = tuple(session.models)
        own = Way(self._own)
        ways = [Way(tuple(models)) for models in smaller]
        plain = [Way(())] if session.adapt else []
        self.gpu = self._seat("", "gpu", [own], True)
        self.less = self._seat(".less", "gpu", ways)
        self.home = self._seat(".home", "cpu", [own, *ways[:-1]], True)
        self.floor = self._seat(".floor", "cpu", [*ways[-1:], *plain]) if ways else self.home
        if not ways:
            self.home.ways += plain
        used = [self.gpu, self.less, self.home, self.floor]
        if session.choice == "cpu":
            used = [self.home, self.floor]
        elif session.choice == "gpu":
            self.floor = self._seat(".floor", "cpu", plain)
            used = [self.gpu, self.less, self.floor]
        self.seats = [s for s in dict.fromkeys(used) if s.ways]
        self.places = [(s, i) for s in self.seats for i in range(len(s.ways))]
        self.ladder = Ladder(
            [Level(s.ways[i].name(s.worker.kind), s.worker.kind) for s, i in self.places]
        )
        if session.adapt:
            out = session.layout.out
            self.ladder.know(len(self.places) - 1, QUICK_S * out.width * out.height)

    def _seat(self, name: str, kind: str, having: list[Way], needed: bool = False) -> Seat:
        worker = self._supervisor.gpu if kind == "gpu" else self._supervisor.cpu
        return Seat(self._session, name, worker, having, needed)

    def use(self) -> None:
        """Takes up all models but the first one, which is the Session's."""
        ways = [way.models for seat in self.seats for way in seat.ways]
        every = {model.key: model for models in ways for model in models}
        every.pop(self._session.model.key, None)
        self._used = list(every.values())
        for model in self._used:
            self._supervisor.use(model)

    def release(self) -> None:
        """Lets go of them."""
        for model in self._used:
            self._supervisor.release(model)
        self._used = []

    def close(self) -> None:
        """Ends all seats."""
        for seat in self.seats:
            seat.close()

    # -- seats that are open

    def steer(self, timed: bool) -> None:
        """Opens seats that are wanted and closes others when they hold nothing. timed: the client
        has deadlines, or a pace.
        """
        wanted = self._wanted(timed)
        for seat in self.seats:
            if seat in wanted:
                seat.open()
            elif seat.wanted and not seat.held:
                seat.close()

    def _wanted(self, timed: bool) -> set[Seat]:
        """The seats that should be open now."""
        if self._session.asleep:
            return set()
        gpu, decision = self._supervisor.gpu, self._supervisor.decision
        choice = self._session.choice
        wanted = {self.floor} if timed else set()
        auto = choice == "auto"
        here = choice != "cpu" and gpu.state not in ("absent", "disabled") and not self._stay
        there = auto and decision.device == "cpu"  # the governor wants it on the CPU
        if here and auto and (decision.parked or decision.release):
            here = False
        # What is open there stays so while the GPU is only busy, to come back at once.
        if here and (not there or self.gpu.wanted):
            wanted |= {self.gpu, self.less}
        if not here or there or gpu.state == "restarting":
            wanted.add(self.home)
        elif self.home.wanted:  # until the GPU has it, and the ladder climbed there
            climbs = timed and self.ladder.levels[self.ladder.at].device == "cpu"
            wanted |= {self.home} if climbs or not self.gpu.ready else set()
        return {seat for seat in wanted if seat in self.seats and not seat.failed}

    def first(self) -> Seat | None:
        """The seat that has the session's own network ready; None while frames would wait there."""
        seat = next((seat for seat in (self.gpu, self.home) if seat.ready), None)
        return None if seat is self.gpu and self._opens_less() else seat

    def _opens_less(self) -> bool:
        """Making the pipelines of smaller networks later would hold the first frames up."""
        return self.less.wanted and not self.less.ready

    def ready(self) -> bool:
        """Is any seat?"""
        return any(seat.ready for seat in self.seats)

    def workers(self) -> str:
        """What keeps them, for an error."""
        workers = {seat.worker.kind: seat.worker for seat in self.seats}.values()
        return "; ".join(f"{w.kind}: {w.reason or w.state}" for w in workers)

    # -- seats that failed

    def failed(self, seat: Seat, error: PvrdError) -> bool:
        """It cannot be opened, or a frame there failed: is that the end of the session? A GPU that
        cannot hold it is not: the CPU can.
        """
        auto = seat.worker.kind == "gpu" and self._session.choice == "auto"
        if seat.needed and not (auto and isinstance(error, FALL_BACK)):
            return True
        if seat.worker.state not in ("absent", "disabled"):
            self._stay = self._stay or seat.needed
            self.leave_out(seat, f"{error.name}: {error}")
        return False

    def leave_out(self, seat: Seat, why: str) -> None:
        """For good."""
        seat.failed = why[:WHY_CHARS]
        seat.close()
        session = self._session
        systemd.log(
            systemd.NOTICE, f"video session {session.id} does without {seat.id}: {why}",
            PVRD_SESSION=session.id, PVRD_DEVICE=seat.worker.kind, PVRD_REASON=why.split(":")[0],
        )  # fmt: skip
        session.core.tree.changed(session, "Levels")

    # -- levels

    def names(self) -> list[str]:
        """Of the levels, with why they are left out."""
        out = []
        for level, (seat, i) in zip(self.ladder.levels, self.places, strict=True):
            why = seat.failed or seat.left_out.get(i, "")
            out.append(f"{level.name} (left out: {why})" if why else level.name)
        return out

    def know(self, seat: Seat, takes: Sequence[float | None]) -> None:
        """Seconds that the seat's levels take, where it measured them."""
        for i, seconds in enumerate(takes[: len(seat.ways)]):
            if seconds is not None:
                self.ladder.know(self.places.index((seat, i)), seconds)

    def barred(self, timed: bool, stuck: Collection[str]) -> dict[int, str]:
        """Levels that cannot be used now, and why. stuck: kinds of workers that do not answer."""
        decision, gpu = self._supervisor.decision, self._supervisor.gpu
        governed = self._session.choice == "auto" and decision.device == "cpu"
        out: dict[int, str] = {}
        for at, (seat, i) in enumerate(self.places):
            kind = seat.worker.kind
            if at == len(self.places) - 1 and self._leaves and timed:
                continue  # the client does it
            if governed and kind == "gpu":
                out[at] = decision.reason or "the governor keeps the GPU free"
            elif not seat.ready or i in seat.left_out:
                why = gpu.reason if kind == "gpu" and gpu.state != "ready" else ""
                out[at] = why or seat.failed or f"the {kind} has not opened it yet"
            elif seat is self.gpu and timed and self._opens_less():
                out[at] = "the gpu opens smaller networks"  # and would hold frames up
            elif kind in stuck:
                out[at] = f"the {kind} does not answer"
            elif not seat.ways[i].models and not timed:
                out[at] = "it is for frames with deadlines"
        if self._session.adapt and decision.precision == "low":
            free = [at for at, (seat, i) in enumerate(self.places)
                    if at not in out and seat.ways[i].models]  # fmt: skip
            own = [at for at in free if self.places[at][0].ways[0].models == self._own
                   and self.places[at][1] == 0]  # fmt: skip
            if len(own) < len(free):
                why = decision.reason or "the governor asks for small networks"
                out.update(dict.fromkeys(own, why))
        return out
