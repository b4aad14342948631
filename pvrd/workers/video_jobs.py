# SPDX-License-Identifier: Apache-2.0
"""Video sessions: frames in a ring that pvrd made, each enlarged in place, some tiles a slice.

A session has levels: its network, smaller ones, plain interpolation. pvrd says with each frame by
which one it is to be made. A frame that would miss its deadline is finished by plain interpolation
while there is time for it; one that is only lent (`lease`) is given up at the end of that, and from
then on nothing is written to its slot, since another worker may be doing it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from engine.backends.crosscheck import Suspect
from engine.errors import DeviceLost, InvalidArgument, PvrError
from engine.pace import ASIDE, LIMIT, clock, device_clock
from engine.video.chain import Enlarger, Plain, check_size, choose
from engine.video.frames import FrameFormat, planes_of, views
from engine.video.upscale import as_planes
from pvrd.workers import devices
from pvrd.workers.models import Models
from pvrd.workers.ring import Expired, Leased, map_ring
from pvrd.workers.timings import Spans

DEFAULT_PRIORITY = 5
OK, DEGRADED = 0, 1
MAP_CHARS = 3000  # fits a line of a progress pipe
QUICK_S = 5e-9  # that plain interpolation takes for a pixel, until it was measured

Send = Callable[[Mapping[str, Any]], None]
Later = Callable[["VideoTask", Callable[[], None]], None]


def tile_map(made_by: npt.NDArray[np.uint8], size: tuple[float, float]) -> str:
    """Who made each tile, row by row: "COLUMNS ROWS WIDTH HEIGHT" and runs such as 12g, at most
    MAP_CHARS. size: width and height of a tile.
    """
    flat = made_by.reshape(-1)
    starts = np.flatnonzero(np.diff(flat, prepend=flat[:1] + 1))
    counts = np.diff(np.append(starts, flat.size))
    text = f"{made_by.shape[1]} {made_by.shape[0]} {size[0]:.8g} {size[1]:.8g} "
    for start, count in zip(starts.tolist(), counts.tolist(), strict=True):
        run = f"{count}{chr(flat[start])}"
        if len(text) + len(run) > MAP_CHARS:
            break
        text += run
    return text


@dataclass
class Level:
    """A way to make the session's frames; pipeline None: left out, and why."""

    keys: list[str]  # models, none: plain interpolation
    pipeline: Enlarger | Plain | None = None
    why: str = ""
    slice_s: float = 0.0  # the longest of late
    work_s: float = 0.0  # the same without waits for a turn on the device


@dataclass(eq=False)
class Frame:
    """A frame that pvrd handed over."""

    seq: int
    slot: int
    deadline: int  # CLOCK_MONOTONIC ns, 0 none
    level: int = 0
    fresh: bool = False  # the slots were written to by others since the session's last frame here
    lease: int = 0  # CLOCK_MONOTONIC ns from which on it is another's, 0: never
    came: float = 0.0  # CLOCK_MONOTONIC seconds
    issued: float = 0.0  # by pvrd
    begun: bool = False
    leased: Leased | None = None  # where its rows go, while it is lent
    plain: bool = False  # finished by plain interpolation
    seconds: float = 0.0  # spent on it so far


class VideoTask:
    """One video session and the frames that wait in it, done in the order of arrival."""

    def __init__(
        self,
        models: Models,
        message: Mapping[str, Any],
        fd: int,
        send: Send,
        later: Later | None = None,
    ) -> None:
        """Maps the ring (`fd` stays the caller's), makes the pipeline and says `video.ready`.
        `later`: does the end of a frame for it, while the device works on something else.

        Raises:
            InvalidArgument: ring, layout and format do not fit each other or the model.
            UnknownModel, UnsupportedModel, OutOfMemory
        """
        self.session = self.account = str(message["session"])
        self.priority = int(message.get("priority", DEFAULT_PRIORITY))
        self.share = int(message.get("share") or 0)
        self.spans = Spans(models.meter)
        self._free = 0.0  # since when no frame was in work
        self._models = models
        self._send, self._later = send, later
        self._gate = models.meter.gate
        self._frames: deque[Frame] = deque()
        fmt = self._format = FrameFormat.from_json(message["format"])
        layout, out = message["layout"], message["out"]
        self._out_format = fmt.sized(int(out["width"]), int(out["height"]))
        check_size(fmt, self._out_format)
        slots, slot_bytes = int(layout["slots"]), int(layout["slot_bytes"])
        ring = map_ring(fd, slots * slot_bytes)
        config = models.config
        self._options = (
            int(message.get("tile") or config.get("tile") or 0),
            int(message.get("overlap") or config.get("overlap") or 0),
            str(message.get("unchanged") or "exact"),
        )
        self._wished = str(message.get("precision") or "f32")
        self._mapped = bool(message.get("map"))
        pixels = self._out_format.width * self._out_format.height
        self._quick_s = QUICK_S * pixels
        planes = planes_of(layout["in"]["planes"], fmt)
        out_planes = planes_of(layout["out"]["planes"], self._out_format)
        self._slots = [
            (views(ring, planes, slot_bytes * i), views(ring, out_planes, slot_bytes * i))
            for i in range(slots)
        ]
        families = [message["models"], *(message.get("levels") or [])]
        self._levels = [Level([str(key) for key in keys]) for keys in families]
        self._precision = ""
        self._streams = 0  # that LIMIT knows of it
        self._last = 0  # the level of the last frame
        self._adopted = models.backend.adopt(np.frombuffer(ring, np.uint8), fd)
        try:
            takes = [self._open(level, bool(message.get("measure"))) for level in self._levels]
        except BaseException:
            self._forget_ring()
            raise
        self._tell_ready(takes)
        self._streams = 1
        LIMIT.streams += 1
        self._gate.arrivals.opened(self)

    def _open(self, level: Level, measure: bool) -> float | None:
        """Makes a level's pipeline; seconds of a frame, by a trial. What cannot be made is left
        out, unless it is the session's only level.
        """
        took = None
        try:
            level.pipeline = self._record(level)
            if measure:
                with self._models.pipelines(self.subject()):
                    took = level.pipeline.trial()
        except Suspect:  # the first frame meets it again
            assert level.pipeline is not None
            level.pipeline.forget()
        except DeviceLost:
            raise
        except PvrError as e:
            if level.pipeline is not None:
                level.pipeline.close()
                level.pipeline = None
            if len(self._levels) == 1:
                raise
            level.why = f"{e.name}: {e}"
            return None
        for key in level.keys:
            self._models.acquire(key)
        return took

    def _tell_ready(self, takes: list[float | None]) -> None:
        made = [level.pipeline for level in self._levels if level.pipeline is not None]
        if not made:
            self.close()
            raise InvalidArgument(f"There is no level to make frames by. {self._levels[0].why}")
        told: dict[str, Any] = {"tiles": made[0].frame_tiles, "precision": self._precision}
        if any(takes):
            told["takes"] = takes
        if left_out := {i: x.why for i, x in enumerate(self._levels) if x.pipeline is None}:
            told["left_out"] = left_out
        self._send({"t": "video.ready", "session": self.session, **told})

    def _record(self, level: Level) -> Enlarger | Plain:
        models, fmt, out = self._models, self._format, self._out_format
        with models.pipelines(self.subject()):
            if not level.keys:
                return Plain(models.backend, fmt, out)
            chain = choose(models.family(level.keys, self._wished), fmt, out)
            self._precision = self._precision or str(chain[0].info["format"])
            return Enlarger(models.backend, chain, fmt, out, *self._options)

    def subject(self) -> Mapping[str, str]:
        return {"session": self.session}

    def deadline(self) -> int | None:
        """The earliest of all that wait: those before it have to be done first."""
        return min((f.deadline for f in self._frames if f.deadline), default=None)

    @property
    def rescue_s(self) -> float:
        """What finishing a frame plainly takes; a frame that is lent goes to another worker, unless
        one is here to be interpolated.
        """
        if any(not self._levels[f.level].keys for f in self._frames):
            return self._quick_s
        return 0.0 if any(f.lease for f in self._frames) else self._quick_s

    def ready(self) -> bool:
        self._expire()
        return bool(self._frames)

    def submit(self, message: Mapping[str, Any]) -> None:
        """Takes a frame in.

        Raises:
            InvalidArgument: there is no such slot.
        """
        slot = int(message["slot"])
        if not 0 <= slot < len(self._slots):
            raise InvalidArgument(f"The ring has {len(self._slots)} slots, and no slot {slot}.")
        level = int(message.get("level") or 0)
        if not 0 <= level < len(self._levels) or self._levels[level].pipeline is None:
            raise InvalidArgument(f"The session has no level {level}.")
        frame = Frame(int(message["seq"]), slot, int(message.get("deadline_ns") or 0), level)
        frame.came = time.monotonic()
        frame.issued = int(message.get("issued_ns") or 0) / 1e9 or frame.came
        frame.fresh, frame.lease = bool(message.get("fresh")), int(message.get("lease_ns") or 0)
        self._frames.append(frame)
        self._gate.arrivals.came(self, frame.came)

    def _expire(self) -> None:
        """Frames whose lease ended before their turn came are given up, and pvrd hears it."""
        now = 0
        for frame in [f for f in self._frames if f.lease and not f.begun]:
            now = now or time.monotonic_ns()
            if now >= frame.lease:
                self._give_up(frame)

    def step(self) -> bool:
        """One slice of the oldest frame, or of one that is interpolated: those are short, and late
        already. Says `frame.done` with the last. True: the session goes
        on. A frame in which a check found something wrong is begun again with other kernels.

        Raises:
            DeviceLost, OutOfMemory
            Quarantined: there are no other kernels.
        """
        plain = (f for f in self._frames if not self._levels[f.level].keys)
        frame = next(plain, self._frames[0])
        began = clock()
        try:
            if devices.doubt(self._models.backend, self._pipeline(frame).executable) is not None:
                self._again(frame)
            return self._slice(frame, began)
        except Suspect:
            self._again(frame)
            frame.seconds += clock() - began
            return True

    def _pipeline(self, frame: Frame) -> Enlarger | Plain:
        made = self._levels[frame.level].pipeline
        assert made is not None
        return made

    def _again(self, frame: Frame) -> None:
        level = self._levels[frame.level]
        frame.begun = False
        self._pipeline(frame).close()
        level.pipeline = self._record(level)

    def _slice(self, frame: Frame, began: float) -> bool:
        pipeline, level = self._pipeline(frame), self._levels[frame.level]
        if frame.lease and time.monotonic_ns() >= frame.lease:
            return self._give_up(frame)
        if not frame.begun:
            self._begin(frame, pipeline)
        if frame.deadline and not frame.lease and self._late(frame.deadline, level):
            frame.plain = True
            pipeline.finish_plainly()
            done, self._quick_s = True, clock() - began
            level.slice_s *= 0.9  # or one long slice would be the last one ever
        else:
            if frame.leased is not None:
                wait_s = self._gate.rhythm.ahead(time.monotonic(), level.work_s)
                frame.leased.lend(wait_s, level.work_s)
            work = device_clock()
            try:
                done = pipeline.step()
            except Expired:
                return self._give_up(frame)
            # A slice takes about as long as the longest of late.
            level.slice_s = max(clock() - began, 0.9 * level.slice_s)
            level.work_s = max(device_clock() - work, 0.9 * level.work_s)
        frame.seconds += clock() - began
        if done:
            self._end(frame)
        return True

    def _end(self, frame: Frame) -> None:
        """All slices of a frame are done; what the host has to do besides may come later."""
        self._frames.remove(frame)
        times = self.spans.take(max(0.0, self._free - frame.came))
        self._free = time.monotonic()
        if self._later is not None and self._pipeline(frame).unsettled:
            self._later(self, lambda: self._settle(frame, times))
        else:
            self._done(frame, times)

    def _settle(self, frame: Frame, times: Mapping[str, float]) -> None:
        """The rest of a frame that was left for later."""
        began = clock()
        try:
            self._pipeline(frame).settle()
        except Expired:
            self._given_up(frame)
            return
        frame.seconds += clock() - began
        self._done(frame, times)

    def _begin(self, frame: Frame, pipeline: Enlarger | Plain) -> None:
        if frame.fresh or frame.level != self._last:
            pipeline.forget()  # where its last frame's result was may be another's now
        self._last = frame.level
        frame.begun = True
        pipeline.later = self._later is not None
        source, target = self._slots[frame.slot]
        if not frame.lease:
            pipeline.begin(source, target)
            return
        out = self._out_format
        planes = as_planes(target, out.planes(), out.sample_bytes)
        frame.leased = Leased(planes, frame.lease, self._adopted is not None)
        pipeline.begin(source, frame.leased)

    def _give_up(self, frame: Frame) -> bool:
        """Another worker does it now."""
        self._frames.remove(frame)
        self.spans.take()
        self._free = time.monotonic()
        self._given_up(frame)
        return True

    def _given_up(self, frame: Frame) -> None:
        pipeline = self._pipeline(frame)
        part = pipeline.part if frame.begun else 0.0
        if frame.begun:
            pipeline.forget()
        self._send(
            {
                "t": "frame.done", "session": self.session, "seq": frame.seq, "slot": frame.slot,
                "level": frame.level, "given_up": True, "part": round(part, 4),
                "ms": round(frame.seconds * 1000, 3), **self._aside(frame),
            }
        )  # fmt: skip

    def _aside(self, frame: Frame) -> dict[str, float]:
        """What was computed again while it was here, its own slices and others'."""
        aside = ASIDE.since(frame.issued)
        return {"aside_ms": round(1000 * aside, 3)} if aside else {}

    def _late(self, deadline: int, level: Level) -> bool:
        """Would another slice leave too little time for plain interpolation?"""
        left_s = (deadline - time.monotonic_ns()) / 1e9
        return left_s < level.slice_s + self._quick_s

    def _done(self, frame: Frame, times: Mapping[str, float]) -> None:
        pipeline = self._pipeline(frame)
        message: dict[str, Any] = {
            "t": "frame.done",
            "session": self.session,
            "seq": frame.seq,
            "slot": frame.slot,
            "level": frame.level,
            "status": DEGRADED if frame.plain or pipeline.tiles_fallback else OK,
            "ms": round(frame.seconds * 1000, 3),
            "tiles": pipeline.tiles,
            "tiles_fallback": pipeline.tiles_fallback,
            "tiles_reused": pipeline.tiles_reused,
            "tiles_cpu": pipeline.tiles_cpu,
            "times": times,
            **self._aside(frame),
        }
        if self._mapped:
            message["map"] = tile_map(pipeline.made_by, pipeline.tile_size)
        self._send(message)

    def close(self) -> None:
        LIMIT.streams -= self._streams
        self._streams = 0
        self._gate.arrivals.closed(self)
        self._frames.clear()
        self._slots.clear()  # the ring is unmapped with the last view of it
        for level in self._levels:
            if level.pipeline is not None:
                level.pipeline.close()
                level.pipeline = None
                for key in level.keys:
                    self._models.release(key)
        self._forget_ring()

    def _forget_ring(self) -> None:
        """The device knows the ring no more."""
        if self._adopted is not None:
            self._adopted.close()
            self._adopted = None
