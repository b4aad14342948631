# SPDX-License-Identifier: Apache-2.0
"""Video sessions: frames in a ring that pvrd made, each enlarged in place, some tiles a slice."""

from __future__ import annotations

import fcntl
import mmap
import os
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from engine.backends.crosscheck import Suspect
from engine.errors import InvalidArgument
from engine.video.frames import FrameFormat, planes_of, views
from engine.video.upscale import VideoPipeline
from pvrd.workers import devices
from pvrd.workers.models import Models

DEFAULT_PRIORITY = 5
OK, DEGRADED = 0, 1

Send = Callable[[Mapping[str, Any]], None]


def map_ring(fd: int, nbytes: int) -> mmap.mmap:
    """The frame ring; `fd` stays the caller's.

    Raises:
        InvalidArgument: it could shrink under the mapping, or has another size.
    """
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError:
        raise InvalidArgument("The frame ring is no memfd.") from None
    if not seals & fcntl.F_SEAL_SHRINK:
        raise InvalidArgument("The frame ring is not sealed against shrinking.")
    size = os.fstat(fd).st_size
    if size != nbytes or nbytes <= 0:
        raise InvalidArgument(f"The frame ring has {size} bytes, not {nbytes}.")
    return mmap.mmap(fd, nbytes)


@dataclass
class Frame:
    """A frame that pvrd handed over."""

    seq: int
    slot: int
    deadline: int  # CLOCK_MONOTONIC ns, 0 none
    begun: bool = False
    seconds: float = 0.0  # spent on it so far


class VideoTask:
    """One video session and the frames that wait in it, done in the order of arrival."""

    def __init__(self, models: Models, message: Mapping[str, Any], fd: int, send: Send) -> None:
        """Maps the ring (`fd` stays the caller's), makes the pipeline and says `video.ready`.

        Raises:
            InvalidArgument: ring, layout and format do not fit each other or the model.
            UnknownModel, UnsupportedModel, OutOfMemory
        """
        self.session = str(message["session"])
        self.priority = int(message.get("priority", DEFAULT_PRIORITY))
        self._model = str(message["model"])
        self._models = models
        self._send = send
        self._frames: deque[Frame] = deque()
        fmt = self._format = FrameFormat.from_json(message["format"])
        layout = message["layout"]
        slots, slot_bytes = int(layout["slots"]), int(layout["slot_bytes"])
        ring = map_ring(fd, slots * slot_bytes)
        config = models.config
        self._sizes = (
            int(message["scale"]),
            int(message.get("tile") or config.get("tile") or 0),
            int(message.get("overlap") or config.get("overlap") or 0),
        )
        self._pipeline = self._record()
        try:
            planes = planes_of(layout["in"]["planes"], fmt)
            out_planes = planes_of(layout["out"]["planes"], self._pipeline.out_format)
            self._slots = [
                (views(ring, planes, slot_bytes * i), views(ring, out_planes, slot_bytes * i))
                for i in range(slots)
            ]
        except BaseException:
            self._pipeline.close()
            raise
        models.acquire(self._model)
        tiling = self._pipeline.tiling
        send({"t": "video.ready", "session": self.session, "tiles": tiling.bands * tiling.columns})

    def _record(self) -> VideoPipeline:
        models = self._models
        with models.pipelines(self.subject()):
            return VideoPipeline(
                models.backend, models.video(self._model), self._format, *self._sizes
            )

    def subject(self) -> Mapping[str, str]:
        return {"session": self.session}

    def deadline(self) -> int | None:
        """The earliest of all that wait: those before it have to be done first."""
        return min((f.deadline for f in self._frames if f.deadline), default=None)

    def ready(self) -> bool:
        return bool(self._frames)

    def submit(self, message: Mapping[str, Any]) -> None:
        """Takes a frame in.

        Raises:
            InvalidArgument: there is no such slot.
        """
        slot = int(message["slot"])
        if not 0 <= slot < len(self._slots):
            raise InvalidArgument(f"The ring has {len(self._slots)} slots, and no slot {slot}.")
        self._frames.append(Frame(int(message["seq"]), slot, int(message.get("deadline_ns") or 0)))

    def step(self) -> bool:
        """One slice of the oldest frame; says `frame.done` with the last. True: the session goes
        on. A frame in which a check found something wrong is begun again with other kernels.

        Raises:
            DeviceLost, OutOfMemory
            Quarantined: there are no other kernels.
        """
        frame = self._frames[0]
        began = time.perf_counter()
        try:
            if devices.doubt(self._models.backend, self._pipeline.executable) is not None:
                self._again(frame)
            return self._slice(frame, began)
        except Suspect:
            self._again(frame)
            frame.seconds += time.perf_counter() - began
            return True

    def _again(self, frame: Frame) -> None:
        frame.begun = False
        self._pipeline.close()
        self._pipeline = self._record()

    def _slice(self, frame: Frame, began: float) -> bool:
        pipeline = self._pipeline
        if not frame.begun:
            frame.begun = True
            pipeline.begin(*self._slots[frame.slot])
        done = pipeline.step()
        frame.seconds += time.perf_counter() - began
        if done:
            self._frames.popleft()
            self._send(
                {
                    "t": "frame.done",
                    "session": self.session,
                    "seq": frame.seq,
                    "slot": frame.slot,
                    "status": DEGRADED if pipeline.tiles_fallback else OK,
                    "ms": round(frame.seconds * 1000, 3),
                    "tiles": pipeline.tiles,
                    "tiles_fallback": pipeline.tiles_fallback,
                }
            )
        return True

    def close(self) -> None:
        self._frames.clear()
        self._slots.clear()  # the ring is unmapped with the last view of it
        self._pipeline.close()
        self._models.release(self._model)
