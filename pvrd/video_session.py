# SPDX-License-Identifier: Apache-2.0
"""Video: a ring, a slot socket, and frames that arrive once and in order, whatever workers do.

A frame is recorded at SUBMIT, given to a worker, and given to another one until its answer is
recorded (pvrd/video_frames.py). DONE goes out in the order of SUBMIT. A session has seats
(pvrd/video_seat.py), each with some levels in one worker, and a ladder (pvrd/ladder.py) that picks
the level of each frame; pvrd/video_placement.py has both.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

from pvrd import fds, systemd
from pvrd.bus import Call
from pvrd.core import Core, Session, report
from pvrd.errors import DeviceLost, PvrdError
from pvrd.inbox import WorkerLost, WorkerReleased
from pvrd.ladder import Pace
from pvrd.models import Model
from pvrd.objects import Answer, method, prop
from pvrd.slot_socket import (
    BAD_SEQ,
    BAD_SLOT,
    BEYOND_CREDITS,
    CREDIT,
    DONE,
    DROP,
    ENDING,
    FAILED,
    SlotError,
    SlotMessage,
    SlotSocket,
)  # fmt: skip
from pvrd.supervisor import CHOOSE_S, MAX_KILLS
from pvrd.video_frames import Frame, Line
from pvrd.video_layout import Layout
from pvrd.video_placement import Placement
from pvrd.video_seat import Seat

PAUSED_S = 5.0  # after which a paused session gives up its memory and its share


class VideoSession(Session):
    """org.pvrd.Pvrd1.VideoSession."""

    INTERFACE = "org.pvrd.Pvrd1.VideoSession"

    def __init__(
        self, core: Core, owner: str, uid: int, models: Sequence[Model],
        chosen: Mapping[str, Any], layout: Layout, smaller: Sequence[Sequence[Model]] = (),
    ) -> None:  # fmt: skip
        """models: of one family (pvrd/enlarge.py); the first one's name is shown. smaller: families
        of smaller networks, the largest first.
        """
        super().__init__(core, owner, uid, models[0], chosen)
        self.models = models
        self.layout = layout
        self.charge = layout.ring_bytes
        self.adapt: bool = chosen["adapt"]
        self._asked_share = self.share
        self._wishes = {key: chosen[key] for key in ("tile", "overlap", "unchanged", "precision")}
        self._wishes["map"] = chosen["tile_map"]
        self.ring = fds.memfd(
            "pvrd-ring", layout.ring_bytes, fds.SEAL_SHRINK | fds.SEAL_GROW | fds.SEAL_SEAL
        )
        try:
            self.socket = SlotSocket(self._on_submit, self._on_sent, self.close)
        except BaseException:
            os.close(self.ring)
            raise
        self._busy: set[int] = set()  # slots that are pvrd's
        self._last_seq = -1
        self._free_since = True  # since the last SUBMIT there was always a slot free
        self._task: asyncio.Task[None] | None = None
        self._turn = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None
        self._pause: asyncio.TimerHandle | None = None
        self._paused = False
        self.asleep = False  # paused for so long that it gave all up
        self._lost_workers: set[tuple[str, int]] = set()
        plain: bool = chosen["interpolate"]
        placement = Placement(self, smaller if self.adapt else (), self.adapt and not plain)
        self._placement, self._ladder = placement, placement.ladder
        self._line = Line(
            placement.places, placement.seats, placement.ladder, Pace(layout.slots), self.adapt,
            core.stats, plain,
        )  # fmt: skip
        self.done_count = self.dropped = self.degraded_count = self.restart_count = 0
        self._precision = ""
        self._told_level = 0, ""

    def open(self) -> None:
        super().open()
        self._placement.use()
        self.socket.send(SlotMessage(CREDIT, credits=self.layout.slots))
        self._task = self.core.task(self._run())

    def answer(self) -> Answer:
        """What OpenVideo returns."""
        return Answer(
            [self.path, 0, 1, self.layout.typed(self.model.name)],
            [os.dup(self.ring), self.socket.client.detach()],
        )

    def end(self) -> None:
        if self.asleep:
            self.core.supervisor.use(self.model)  # close() releases it
        self._placement.release()
        if self.core.closing:
            self.socket.fail(ENDING, tell=False)
        self.socket.close()
        self._stop()
        os.close(self.ring)

    def _stop(self) -> None:
        for timer in (self._timer, self._pause):
            if timer is not None:
                timer.cancel()
        self._timer = self._pause = None
        self._placement.close()
        if self._task is not None and self._task is not asyncio.current_task():
            self._task.cancel()

    @method("Close")
    async def close_call(self, call: Call) -> None:
        """Ends the session."""
        self.close()

    @method("Pause", "paused:b")
    async def pause_call(self, call: Call, paused: bool) -> None:
        """Frame callbacks of the surface stopped, or came back."""
        if paused == self._paused:
            return
        self._paused = paused
        if self._pause is not None:
            self._pause.cancel()
            self._pause = None
        if paused:
            self._pause = asyncio.get_running_loop().call_later(PAUSED_S, self._sleep)
        elif self.asleep:
            self.asleep = False
            self.core.supervisor.use(self.model)
            self._placement.use()
            self._regain()
        self.core.tree.changed(self, "Paused")
        self._turn.set()

    def _sleep(self) -> None:
        """A paused session lets go of its memory in the workers, its models and its share."""
        self.asleep = True
        self.share = 0
        self._placement.release()
        self.core.supervisor.release(self.model)
        self._turn.set()

    def _regain(self) -> None:
        """The share, when it is not promised to others meanwhile."""
        others = self.core.shares() - self.share
        if not self.asleep and others + self._asked_share <= 100:
            self.share = self._asked_share

    @prop("Paused", "b")
    def paused(self) -> bool:
        """Did the client say so?"""
        return self._paused

    @prop("Times", "a{sd}")
    def times(self) -> dict[str, float]:
        """Milliseconds of all frames, part by part."""
        return {part: round(ms, 3) for part, ms in self._line.times.items()}

    @prop("Levels", "as")
    def level_names(self) -> list[str]:
        """By which frames may be made, the best first."""
        return self._placement.names()

    @prop("Level", "u")
    def level(self) -> int:
        """By which the last frame was made."""
        return self._told_level[0]

    @prop("LevelReason", "s")
    def level_reason(self) -> str:
        """Why it is not the first."""
        return self._told_level[1]

    @prop("Frames", "t")
    def frames(self) -> int:
        """Frames that are done."""
        return self.done_count

    @prop("Dropped", "t")
    def dropped_frames(self) -> int:
        """Frames whose deadline was over."""
        return self.dropped

    @prop("Degraded", "t")
    def degraded(self) -> int:
        """Frames with plainly interpolated tiles."""
        return self.degraded_count

    @prop("Restarts", "u")
    def restarts(self) -> int:
        """Workers that died under this session."""
        return self.restart_count

    @prop("Reused", "t")
    def reused(self) -> int:
        """Tiles that kept the result of the frame before."""
        return self._line.reused

    @prop("TileMap", "s")
    def tile_map(self) -> str:
        """Who made each tile of the last frame."""
        return self._line.tile_map

    @prop("Precision", "s")
    def precision(self) -> str:
        """What the network is computed in."""
        return self._precision

    # -- the client's side

    def _on_submit(self, message: SlotMessage) -> None:
        if message.slot >= self.layout.slots:
            raise SlotError(BAD_SLOT)
        if message.slot in self._busy:
            raise SlotError(BEYOND_CREDITS)  # with every slot under way no credit is left either
        if message.seq <= self._last_seq:
            raise SlotError(BAD_SEQ)
        self._last_seq = message.seq
        self._busy.add(message.slot)
        self._line.add(message, time.monotonic(), self._free_since)
        self._free_since = len(self._busy) < self.layout.slots
        self._turn.set()

    def _on_sent(self, message: SlotMessage) -> None:
        if message.type in (DONE, DROP):
            self._busy.discard(message.slot)

    def news(self) -> None:
        super().news()
        self._regain()
        self._turn.set()

    # -- seats

    def open_message(self, name: str, levels: Sequence[Sequence[str]]) -> dict[str, Any]:
        """The video.open of a seat of this name; levels: keys of models."""
        # A session that comes from the GPU stays in float32: its frames shall not change.
        home = name == self._placement.home.id
        kept = home and self._precision and self._wishes["precision"] == "model"
        wishes = {**self._wishes, "precision": self._precision} if kept else self._wishes
        return {
            "t": "video.open", "session": name, "format": self.layout.format.message(),
            "models": levels[0], "levels": levels[1:], "measure": self.adapt,
            "slots": self.layout.slots,
            "out": {"width": self.layout.out.width, "height": self.layout.out.height},
            "layout": self.layout.message(), "priority": self.priority, "share": self.share,
            **wishes,
        }  # fmt: skip

    def seat_ready(self, seat: Seat, takes: Sequence[float | None], precision: str) -> None:
        """A worker opened it and knows what its levels take."""
        self._placement.know(seat, takes)
        if seat in (self._placement.gpu, self._placement.home):
            self._precision = precision
            if self._ready:
                self.arrived(seat.worker)
        if seat.left_out:
            self.core.tree.changed(self, "Levels")
        self._turn.set()

    def seat_lost(self, seat: Seat, lost: WorkerLost) -> None:
        """Its worker died: what it held is given to another one. A frame, or opening, that ended
        MAX_KILLS workers ends the session, or leaves the seat out.
        """
        released = isinstance(lost, WorkerReleased)
        worker = seat.worker.kind, seat.worker.generation
        if not released and worker not in self._lost_workers:
            self._lost_workers.add(worker)
            self.restart_count += 1
        worst = seat.kills
        for frame in self._line.take_back(seat, time.monotonic()):
            frame.kills += not released
            worst = max(worst, frame.kills)
        if worst >= MAX_KILLS and (seat.needed or seat.kills < MAX_KILLS):
            self._fail(DeviceLost(f"{worst} workers ended under one frame, the last: {lost}"))
        elif worst >= MAX_KILLS:
            self._placement.leave_out(seat, f"{worst} workers ended over it")
        self._turn.set()

    def seat_failed(self, seat: Seat, error: PvrdError) -> None:
        """It cannot be opened, or a frame there failed."""
        self._line.take_back(seat, time.monotonic())
        if self._placement.failed(seat, error):
            self._fail(error)
        self._turn.set()

    def _fail(self, error: PvrdError) -> None:
        if self._error:
            return
        why = f"{error.name}: {error}"
        self.set(error=why)
        self.core.stats.jobs_failed += 1
        systemd.log(
            systemd.NOTICE, f"video session {self.id} failed", PVRD_SESSION=self.id,
            MESSAGE_ID=systemd.MESSAGE_JOB_FAILED, PVRD_REASON=why.split(":")[0],
        )  # fmt: skip
        # The session object stays, so that its Error can be read.
        self.socket.fail(FAILED, tell=False)
        self._stop()

    def _steer(self) -> None:
        """Opens and closes seats.

        Raises:
            DeviceLost: the device that is asked for is not there.
        """
        self.core.supervisor.check_device(self.choice)
        self._placement.steer(self._line.timed)
        first = self._placement.first()
        if first is not None and not self._ready:
            self.arrived(first.worker)

    async def _run(self) -> None:
        """Serves the session to its end."""
        alone = None  # since when there is no worker for it
        try:
            while True:
                self._turn.clear()
                self._steer()
                self._pump()
                now = time.monotonic()
                here = self.asleep or self._placement.ready()
                nobody = bool(self._line.frames) and not here
                alone = (alone or now) if nobody else None
                if alone is not None and now - alone > CHOOSE_S:
                    why = self._placement.workers()
                    raise DeviceLost(f"no worker came within {CHOOSE_S:g} s ({why})")
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._turn.wait(), CHOOSE_S if nobody else None)
        except Exception as e:  # nobody else would tell the client
            self._fail(report(e))

    # -- frames

    def _pump(self) -> None:
        """Gives waiting frames to workers, interpolates and drops late ones, answers."""
        now, line = time.monotonic(), self._line
        if self._paused:
            for frame in line.frames:
                if frame.submit.deadline and frame.seat is None and frame.answer is None:
                    frame.drop()  # nobody will see it
        line.look(now)
        if not self._paused:
            self._ladder.share(self.core.supervisor.decision.share)
            stuck = {s.worker.kind for s in self._placement.seats if line.stuck(s, now)}
            line.issue(now, self._placement.barred(line.timed, stuck))
        line.answered(self._send)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if (pause := line.next_look(now)) is not None:
            self._timer = asyncio.get_running_loop().call_later(pause, self._turn.set)

    def frame_done(self, seat: Seat, message: Mapping[str, Any], before: float) -> None:
        """A worker's last word about a frame. before: when it said its last one before that."""
        self._line.done(seat, message, before, time.monotonic())
        self._turn.set()

    def _send(self, frame: Frame) -> None:
        answer, stats = frame.answer, self.core.stats
        assert answer is not None
        if answer.type == DROP:
            self.dropped += 1
            stats.frames_dropped += 1
            if frame.level:
                self._tell_level(frame.level)
        else:
            self.done_count += 1
            stats.frames_done += 1
            self.degraded_count += answer.status
            stats.frames_degraded += answer.status
            self._tell_level(frame.level)
        self.socket.send(answer)

    def _tell_level(self, level: int) -> None:
        self.set(device=self._ladder.levels[level].device)
        told = level, self._ladder.reason if level else ""
        if told != self._told_level:
            self._told_level = told
            self.core.tree.changed(self, "Level", "LevelReason")
