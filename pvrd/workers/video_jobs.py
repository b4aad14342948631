# SPDX-License-Identifier: Apache-2.0
"""Video sessions: frames in a ring that pvrd made, each enlarged in place, some tiles a slice.

A frame that would miss its deadline is finished by plain interpolation while there is time for it.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from engine.backends.crosscheck import Suspect
from engine.errors import InvalidArgument
from engine.video.chain import Enlarger, check_size, choose
from engine.video.frames import FrameFormat, planes_of, views
from pvrd.workers import devices
from pvrd.workers.models import Models

DEFAULT_PRIORITY = 5
OK, DEGRADED = 0, 1
MAP_CHARS = 3000  # fits a line of a progress pipe
QUICK_S = 5e-9  # that plain interpolation takes for a pixel, until it was measured

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
class Frame:
    """A frame that pvrd handed over."""

    seq: int
    slot: int
    deadline: int  # CLOCK_MONOTONIC ns, 0 none
    begun: bool = False
    plain: bool = False  # finished by plain interpolation
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
        self._keys = [str(key) for key in message["models"]]
        self._models = models
        self._send = send
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
        self._slice_s, self._quick_s = 0.0, QUICK_S * pixels
        planes = planes_of(layout["in"]["planes"], fmt)
        out_planes = planes_of(layout["out"]["planes"], self._out_format)
        self._slots = [
            (views(ring, planes, slot_bytes * i), views(ring, out_planes, slot_bytes * i))
            for i in range(slots)
        ]
        self._pipeline = self._record()
        for key in self._keys:
            models.acquire(key)
        told = {"tiles": self._pipeline.frame_tiles, "precision": self._precision}
        send({"t": "video.ready", "session": self.session, **told})

    def _record(self) -> Enlarger:
        models, fmt, out = self._models, self._format, self._out_format
        with models.pipelines(self.subject()):
            chain = choose(models.family(self._keys, self._wished), fmt, out)
            self._precision = str(chain[0].info["format"])
            return Enlarger(models.backend, chain, fmt, out, *self._options)

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
        if frame.deadline and self._late(frame.deadline):
            frame.plain = True
            pipeline.finish_plainly()
            done, self._quick_s = True, time.perf_counter() - began
        else:
            done = pipeline.step()
            # A slice takes about as long as the longest of late.
            self._slice_s = max(time.perf_counter() - began, 0.9 * self._slice_s)
        frame.seconds += time.perf_counter() - began
        if done:
            self._frames.popleft()
            self._done(frame)
        return True

    def _late(self, deadline: int) -> bool:
        """Would another slice leave too little time for plain interpolation?"""
        left_s = (deadline - time.monotonic_ns()) / 1e9
        return left_s < self._slice_s + self._quick_s

    def _done(self, frame: Frame) -> None:
        pipeline = self._pipeline
        message: dict[str, Any] = {
            "t": "frame.done",
            "session": self.session,
            "seq": frame.seq,
            "slot": frame.slot,
            "status": DEGRADED if frame.plain or pipeline.tiles_fallback else OK,
            "ms": round(frame.seconds * 1000, 3),
            "tiles": pipeline.tiles,
            "tiles_fallback": pipeline.tiles_fallback,
            "tiles_reused": pipeline.tiles_reused,
            "tiles_cpu": pipeline.tiles_cpu,
        }
        if self._mapped:
            message["map"] = tile_map(pipeline.made_by, pipeline.tile_size)
        self._send(message)

    def close(self) -> None:
        self._frames.clear()
        self._slots.clear()  # the ring is unmapped with the last view of it
        self._pipeline.close()
        for key in self._keys:
            self._models.release(key)
