# SPDX-License-Identifier: Apache-2.0
"""Video: a ring, a slot socket, and frames that arrive once and in order, whatever workers do.

A frame is recorded at SUBMIT, given to the worker, and given to the next one until its frame.done
is recorded. DONE goes out in the order of SUBMIT.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pvrd import fds, systemd
from pvrd.bus import Call
from pvrd.core import Core, Session, report
from pvrd.enlarge import out_size
from pvrd.errors import DeviceLost, PvrdError
from pvrd.models import Model
from pvrd.objects import Answer, method, prop
from pvrd.slot_socket import (
    BAD_SEQ,
    BAD_SLOT,
    BEYOND_CREDITS,
    CREDIT,
    DEVICES,
    DONE,
    DROP,
    ENDING,
    FAILED,
    SlotError,
    SlotMessage,
    SlotSocket,
)  # fmt: skip
from pvrd.supervisor import FALL_BACK, MAX_KILLS
from pvrd.video_layout import Format, Layout, lay_out
from pvrd.worker import Inbox, Worker, WorkerLost

AHEAD = 2  # frames that the worker holds: one in work and the next
DEFAULT_SLOTS = 4
MAP_CHARS = 4096
WAKE = "pvrd.wake"  # our own message in an inbox


@dataclass
class Frame:
    """A frame between SUBMIT and DONE."""

    submit: SlotMessage
    issued: bool = False
    kills: int = 0
    answer: SlotMessage | None = None


def plan(chosen: Mapping[str, Any], free: int) -> Layout:
    """The layout for these options; fewer slots than usual where `free` bytes ask for it.

    Raises:
        InvalidArgument: as out_size.
    """
    form = Format(
        chosen["width"], chosen["height"], chosen["pixel"], chosen["depth"], chosen["siting"],
        chosen["full_range"],
    )  # fmt: skip
    out = form.sized(*out_size(chosen))
    layout = lay_out(form, out, chosen["slots"] or DEFAULT_SLOTS)
    if chosen["slots"] is None and layout.ring_bytes > free:
        layout = lay_out(form, out, max(1, free // layout.slot_bytes))
    return layout


class VideoSession(Session):
    """org.pvrd.Pvrd1.VideoSession."""

    INTERFACE = "org.pvrd.Pvrd1.VideoSession"

    def __init__(
        self, core: Core, owner: str, uid: int, models: Sequence[Model],
        chosen: Mapping[str, Any], layout: Layout,
    ) -> None:  # fmt: skip
        """models: of one family (pvrd/enlarge.py); the first one's name is shown."""
        super().__init__(core, owner, uid, models[0], chosen)
        self.models = models
        self.layout = layout
        self.charge = layout.ring_bytes
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
        self._frames: deque[Frame] = deque()  # in the order of SUBMIT; the first is the oldest
        self._busy: set[int] = set()  # slots that are pvrd's
        self._last_seq = -1
        self._inbox: Inbox | None = None
        self._task: asyncio.Task[None] | None = None
        self._preload: asyncio.Task[None] | None = None
        self._opened = False
        self._stay = False  # the GPU failed this session: it stays where it is
        self.done_count = self.dropped = self.degraded_count = self.restart_count = 0
        self.reused_count = 0
        self._tile_map = self._precision = ""

    def open(self) -> None:
        super().open()
        for model in self.models[1:]:
            self.core.supervisor.use(model)
        self.socket.send(SlotMessage(CREDIT, credits=self.layout.slots))
        self._task = self.core.task(self._run())

    def answer(self) -> Answer:
        """What OpenVideo returns."""
        return Answer(
            [self.path, 0, 1, self.layout.typed(self.model.name)],
            [os.dup(self.ring), self.socket.client.detach()],
        )

    def end(self) -> None:
        for model in self.models[1:]:
            self.core.supervisor.release(model)
        if self.core.closing:
            self.socket.fail(ENDING, tell=False)
        self.socket.close()
        for task in (self._task, self._preload):
            if task is not None and task is not asyncio.current_task():
                task.cancel()
        os.close(self.ring)

    @method("Close")
    async def close_call(self, call: Call) -> None:
        """Ends the session."""
        self.close()

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
        return self.reused_count

    @prop("TileMap", "s")
    def tile_map(self) -> str:
        """Who made each tile of the last frame."""
        return self._tile_map

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
        self._frames.append(Frame(message))
        self._wake()

    def _on_sent(self, message: SlotMessage) -> None:
        if message.type in (DONE, DROP):
            self._busy.discard(message.slot)

    def _wake(self) -> None:
        if self._inbox is not None:
            self._inbox.put({"t": WAKE})

    def news(self) -> None:
        super().news()
        if self._may_move():
            self._wake()

    # -- the worker's side

    async def _run(self) -> None:
        """Serves the session to its end, with one worker after the other."""
        supervisor = self.core.supervisor
        opening_kills = 0
        while True:
            self._opened = False
            worker: Worker | None = None
            try:
                worker = await supervisor.choose("cpu" if self._stay else self.choice)
                try:
                    for model in self.models:
                        await supervisor.load(worker, model)
                    await self._with(worker)
                    continue  # it moves
                except WorkerLost as e:
                    opening_kills = 0 if self._opened else opening_kills + 1
                    self._lost(str(e), opening_kills)
            except asyncio.CancelledError:
                raise
            except Exception as e:
                error = report(e)
                if worker is supervisor.gpu and self._leave_gpu(error):
                    continue
                self._fail(f"{error.name}: {error}")
                return
            finally:
                self._inbox = None

    def _leave_gpu(self, error: Exception) -> bool:
        """A GPU that cannot hold this session is no reason to end it: the CPU can."""
        if self.choice != "auto" or not isinstance(error, FALL_BACK):
            return False
        self._stay = True
        for frame in self._frames:
            if frame.issued and frame.answer is None:
                frame.issued = False
                self.core.stats.frames_reissued += 1
        return True

    def _fail(self, why: str) -> None:
        self.set(error=why)
        self.core.stats.jobs_failed += 1
        systemd.log(
            systemd.NOTICE, f"video session {self.id} failed", PVRD_SESSION=self.id,
            MESSAGE_ID=systemd.MESSAGE_JOB_FAILED, PVRD_REASON=why.split(":")[0],
        )  # fmt: skip
        # The session object stays, so that its Error can be read.
        self.socket.fail(FAILED, tell=False)

    def _lost(self, why: str, opening_kills: int) -> None:
        """The worker died: what it held is given to the next one.

        Raises:
            DeviceLost: a frame, or opening, ended MAX_KILLS workers.
        """
        self.restart_count += 1
        worst = opening_kills
        for frame in self._frames:
            if frame.issued and frame.answer is None:
                frame.issued = False
                frame.kills += 1
                worst = max(worst, frame.kills)
                self.core.stats.frames_reissued += 1
        if worst >= MAX_KILLS:
            raise DeviceLost(f"{worst} workers ended under one frame, the last: {why}")

    async def _with(self, worker: Worker) -> None:
        """Runs frames in this worker until the session moves."""
        with worker.route("session", self.id) as inbox:
            self._inbox = inbox
            message = {
                "t": "video.open", "session": self.id, "format": self.layout.format.message(),
                "models": [model.key for model in self.models], "slots": self.layout.slots,
                "out": {"width": self.layout.out.width, "height": self.layout.out.height},
                "layout": self.layout.message(), "priority": self.priority, **self._wishes,
            }  # fmt: skip
            worker.send(message, [self.ring])
            try:
                ready = await inbox.expect("video.ready")
                self._precision = str(ready.get("precision", ""))[:16]
                self._opened = True
                self.arrived(worker)
                worker.counters.jobs += 1
                while True:
                    self._issue(worker)
                    if self._may_move() and not any(f.issued for f in self._frames):
                        return
                    message = await inbox.get()
                    if message["t"] == "frame.done":
                        self._frame_done(worker, message)
            finally:
                worker.send({"t": "close", "session": self.id})

    def _may_move(self) -> bool:
        """Is the session on the CPU while the GPU is well again and has the model?"""
        gpu = self.core.supervisor.gpu
        if self.choice != "auto" or self._stay or self._device != "cpu" or gpu.state != "ready":
            return False
        loading = [gpu.models.get(model.key) for model in self.models]
        if None in loading:
            if self._preload is None or self._preload.done():
                self._preload = self.core.task(self._load_gpu())
            return False
        return all(one and one.future.done() and not one.future.exception() for one in loading)

    async def _load_gpu(self) -> None:
        """Before the move, so that frames do not wait for it."""
        supervisor = self.core.supervisor
        try:
            for model in self.models:
                await supervisor.load(supervisor.gpu, model)
        except WorkerLost:
            return
        except PvrdError:
            self._stay = True

    def _issue(self, worker: Worker) -> None:
        """Gives waiting frames to the worker, at most AHEAD at a time, and drops late ones."""
        if self._may_move():
            return
        held = sum(1 for f in self._frames if f.issued and f.answer is None)
        for frame in self._frames:
            if held >= AHEAD:
                break
            if frame.issued or frame.answer is not None:
                continue
            submit = frame.submit
            if submit.deadline and time.monotonic_ns() > submit.deadline:
                frame.answer = SlotMessage(DROP, submit.seq, submit.slot, pts=submit.pts)
                continue
            frame.issued = True
            held += 1
            worker.send(
                {
                    "t": "frame", "session": self.id, "seq": submit.seq, "slot": submit.slot,
                    "deadline_ns": submit.deadline,
                }
            )  # fmt: skip
        self._deliver()

    def _frame_done(self, worker: Worker, message: Mapping[str, Any]) -> None:
        frame = next((f for f in self._frames if f.submit.seq == message.get("seq")), None)
        if frame is None or frame.answer is not None or not frame.issued:
            return  # a second word about a frame
        submit = frame.submit
        fallback = _count(message.get("tiles_fallback"), 32)
        frame.answer = SlotMessage(
            DONE, submit.seq, submit.slot,
            status=1 if message.get("status") or fallback else 0,
            pts=submit.pts,
            tiles=_count(message.get("tiles"), 32),
            tiles_fallback=fallback,
            work_ns=_count(float(message.get("ms") or 0.0) * 1e6, 64),
            device=DEVICES[worker.kind],
        )  # fmt: skip
        worker.counters.frames += 1
        stats = self.core.stats
        stats.tiles += frame.answer.tiles
        stats.tiles_fallback += fallback
        stats.tiles_cpu += _count(message.get("tiles_cpu"), 32)
        reused = _count(message.get("tiles_reused"), 32)
        stats.tiles_reused += reused
        self.reused_count += reused
        if isinstance(message.get("map"), str):
            self._tile_map = message["map"][:MAP_CHARS]
        self._deliver()

    def _deliver(self) -> None:
        stats = self.core.stats
        while self._frames and self._frames[0].answer is not None:
            answer = self._frames.popleft().answer
            assert answer is not None
            if answer.type == DROP:
                self.dropped += 1
                stats.frames_dropped += 1
            else:
                self.done_count += 1
                stats.frames_done += 1
                self.degraded_count += answer.status
                stats.frames_degraded += answer.status
            self.socket.send(answer)


def _count(value: Any, bits: int) -> int:
    number = int(value) if isinstance(value, (int, float)) else 0
    return min(max(number, 0), (1 << bits) - 1)
