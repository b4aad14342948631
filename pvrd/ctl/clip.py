# SPDX-License-Identifier: Apache-2.0
"""A y4m or raw stream through a video session: one thread, one poll, as many frames under way as
there are credits.

A frame goes from the input's descriptor into the ring by readv and from the ring to the output by
writev; nothing is copied in between and memory does not grow with the clip. Samples of 9 to 15 bits
are shifted, since the daemon's have the whole range of 16.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import stat
import time
from typing import TYPE_CHECKING, Any

from pvrd import rawvideo, y4m
from pvrd.ctl import common, errors, output, realtime

if TYPE_CHECKING:
    import argparse

    from pvrd.client import Client
    from pvrd.client_video import Done, Planes, VideoSession
    from pvrd.ctl.target import Target

    Header = y4m.Header | rawvideo.RawHeader
    Reader = y4m.Reader | rawvideo.RawReader

_PIPE_BYTES = 1 << 20


def enlarge_clip(
    args: argparse.Namespace, source: int, seen: bytes, target: Target
) -> dict[str, Any]:
    """Enlarges the stream, raw as it is described by `--raw`, else y4m; returns the object of
    `--json upscale`.

    Raises:
        CtlError: damaged input (exit code 5), no daemon, a refusal, a full disk.
    """
    reader: Reader
    header: Header
    if args.raw:
        reader, header = rawvideo.RawReader(source), args.raw
    else:
        try:
            reader = y4m.Reader(source)
            header = reader.header(seen)
        except y4m.Y4mError as error:
            raise _bad(error) from error
    pace = realtime.asked(args, getattr(header, "rate", ""))
    settings = {
        "width": header.width,
        "height": header.height,
        "pixel": header.pixel,
        "depth": None if header.bits == 8 else 16,
        "siting": header.siting,
        "full_range": header.full_range,
        "scale": args.scale,
        "out_width": args.size and args.size[0],
        "out_height": args.size and args.size[1],
        "unchanged": args.unchanged,
        "adapt": pace is not None,  # else a file has time
        "tile_map": bool(args.debug_tiles),
        "precision": args.precision,
        "model": args.model,
        "device": args.device,
        "priority": args.priority,
        "share": args.share,
        "tile": args.tile,
        "overlap": args.overlap,
    }
    with common.client(args) as client, client.open_video(settings) as session:
        pump = Pump(session, reader, header, target, _frames_ahead(source, header), pace)
        try:
            pump.run()
        finally:
            pump.meter.clear()
        record = pump.record(client)
        if args.debug_tiles:
            record["tile_map"] = str(session.session.properties().get("TileMap", ""))
        return record


def _bad(error: y4m.Y4mError) -> errors.CtlError:
    return errors.CtlError(str(error), errors.BAD_INPUT, "InvalidArgument")


def _frames_ahead(source: int, header: Header) -> int | None:
    """How many frames a regular file has; None for a stream."""
    status = os.fstat(source)
    if not stat.S_ISREG(status.st_mode):
        with contextlib.suppress(OSError):
            fcntl.fcntl(source, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        return None
    mark = len("FRAME\n") if header.line() else 0
    return (status.st_size - len(header.line())) // (header.frame_bytes + mark)


class Pump:
    """Moves frames until the input ends and everything has come back."""

    def __init__(
        self,
        session: VideoSession,
        reader: Reader,
        header: Header,
        target: Target,
        total: int | None,
        pace: realtime.Pace | None = None,
    ) -> None:
        self._session = session
        self._reader = reader
        layout = session.layout
        self._out_header = header.sized(layout["out_width"], layout["out_height"])
        self._scale = common.ratio(header.width, layout["out_width"])
        self._target = target
        self._total = total
        self._inputs = [_flat(session.input(slot)) for slot in range(session.slots)]
        self._outputs = [_flat(session.output(slot)) for slot in range(session.slots)]
        self._free = list(range(session.slots))
        self._filling: int | None = None  # the slot that the input is being read into
        self._whole: int | None = None  # the slot of a frame whose moment has not come
        self._pace = pace
        self._shown: list[memoryview] = []  # the frame that was written last
        self._kept: int | None = None  # its slot
        self._params: dict[int, bytes] = {}  # what stood behind FRAME, by seq
        self._ended = False
        self._damage: y4m.Y4mError | None = None
        self._shift = 16 - header.bits if header.bits > 8 else 0
        self._upper = isinstance(header, rawvideo.RawHeader) and header.upper
        self._written = 0  # frames
        self._owed: list[bytes] = []  # what stood behind FRAME, of frames that are to be written
        self._times = Times()
        self._tiles = self._fallback = 0
        self._device = ""
        self._began = self._last = 0.0
        self.meter = output.Progress("upscaling")
        sample = 1 if header.bits == 8 else 2
        expected = [width * height * sample for width, height in self._out_header.planes]
        if [sum(map(len, plane)) for plane in session.output(0)] != expected:
            raise errors.CtlError(
                "The daemon's layout of a frame is not the one of y4m.", errors.FAILED, "Internal"
            )

    def run(self) -> None:
        """Runs to the end of the input.

        Raises:
            CtlError, PvrdError, BrokenPipeError: as enlarge_clip.
        """
        poll = select.poll()
        poll.register(self._session.fileno(), select.POLLIN)
        source = self._reader.fileno()
        waiting = False
        while not (self._ended and not self._params):
            if self._whole is not None and self._pause() <= 0:
                self._submit(self._whole)
            if (
                self._filling is None
                and self._whole is None
                and not self._ended
                and self._free
                and self._session.credits > 0
            ):
                self._filling = self._free.pop(0)
                self._reader.begin(self._inputs[self._filling])
            if waiting != (self._filling is not None):
                waiting = not waiting
                if waiting:
                    poll.register(source, select.POLLIN)
                else:
                    poll.unregister(source)
            pause = None if self._whole is None else 1000 * self._pause()
            for fd, _events in poll.poll(pause):
                if fd == source and self._filling is not None:
                    self._read()
                elif fd == self._session.fileno() and (done := self._session.receive()):
                    self._write(done)
        if self._damage:
            raise _bad(self._damage) from self._damage
        if not self._reader.frames:
            raise errors.CtlError("The clip has no frames.", errors.BAD_INPUT, "InvalidArgument")
        if not self._written:
            raise errors.CtlError("No frame was made in time.", errors.FAILED, "Timeout")

    def _pause(self) -> float:
        return 0.0 if self._pace is None else self._pace.left()

    def _submit(self, slot: int) -> None:
        seq = self._reader.frames
        deadline = 0 if self._pace is None else self._pace.goes(seq)
        self._session.submit(seq, slot, pts=seq, deadline=deadline)
        self._whole = None

    def _read(self) -> None:
        """One step of reading; a complete frame is submitted when its moment has come, a damaged
        input ends after the frames before it."""
        assert self._filling is not None
        try:
            got = self._reader.step()
        except y4m.Y4mError as error:
            self._damage, got = error, None
        except OSError as error:
            raise errors.CtlError(
                f"The input cannot be read: {os.strerror(error.errno or 0)}.",
                errors.BAD_INPUT,
                "InvalidArgument",
            ) from error
        if got is None:
            self._ended = True
            self._free.append(self._filling)
            self._filling = None
        elif got:
            self._began = self._began or time.monotonic()
            self._params[self._reader.frames] = self._reader.params
            if self._shift and not self._upper:
                widen(self._session.arrays(self._filling), self._shift)
            self._whole, self._filling = self._filling, None

    def _write(self, done: Done) -> None:
        params = self._params.pop(done.seq)
        self._last = time.monotonic()
        if self._pace is not None:
            self._pace.came(done)
        elif done.dropped:  # only frames with a deadline are, and these have none
            raise errors.CtlError("The daemon dropped a frame.", errors.FAILED, "Internal")
        planes = self._shown if done.dropped else self._made(done)
        self._owed.append(params)
        if planes:  # nothing stands in for first frames that were dropped, until there is one
            self._put(planes)
        self._let_go(done, planes)
        if not done.dropped:
            self._times.add(done.ms)
        self._tiles += done.tiles
        self._fallback += done.tiles_fallback
        self._device = done.device or self._device
        self.meter.update(self._written, self._total, "frames")

    def _put(self, planes: list[memoryview]) -> None:
        """Writes a frame, as often as frames wait for one."""
        head = self._out_header.line()
        for params in self._owed:
            before = [memoryview(head)] if head and not self._written else []
            mark = [memoryview(b"FRAME" + params + b"\n")] if head else []
            self._target.write([*before, *mark, *planes])
            self._written += 1
        self._owed.clear()

    def _made(self, done: Done) -> list[memoryview]:
        """The planes of a frame that is done."""
        if self._shift:
            return narrow(self._session.results(done.slot), self._shift, self._upper)
        return self._outputs[done.slot]

    def _let_go(self, done: Done, planes: list[memoryview]) -> None:
        """The slot is free; in real time what was written last stays, to stand in for a frame that
        is dropped: where it lies, or as a copy where slots are few."""
        if self._pace is None or done.dropped:
            self._free.append(done.slot)
        elif self._shift or self._session.slots < 3:
            self._shown = planes if self._shift else [memoryview(bytes(p)) for p in planes]
            self._free.append(done.slot)
        else:
            if self._kept is not None:
                self._free.append(self._kept)
            self._kept, self._shown = done.slot, planes

    def record(self, client: Client) -> dict[str, Any]:
        """The object that --json prints."""
        state = self._session.session.properties()
        device = self._device or str(state.get("Device", ""))
        seconds = self._last - self._began
        return {
            "frames": self._written,
            "width": self._out_header.width,
            "height": self._out_header.height,
            "scale": self._scale,
            "model": str(self._session.layout.get("model", "")),
            "device": device,
            "device_name": common.device_name(client, device),
            "fps": round(self._written / seconds, 3) if seconds > 0 else 0.0,
            "ms_p50": self._times.percentile(50),
            "ms_p99": self._times.percentile(99),
            "tiles": self._tiles,
            "tiles_reused": int(state.get("Reused", 0)),
            "tiles_fallback": self._fallback,
            "restarts": int(state.get("Restarts", 0)),
            "precision": str(state.get("Precision", "")),
            **({} if self._pace is None else self._pace.record()),
        }


def _flat(planes: list[list[memoryview]]) -> list[memoryview]:
    return [view for plane in planes for view in plane]


def widen(planes: Planes, shift: int) -> None:
    """Samples of 16 - shift bits in the low bits, to the whole range, where they lie."""
    for plane in planes:
        plane[:] = plane.clip(max=(1 << (16 - shift)) - 1) << shift


def narrow(planes: Planes, shift: int, upper: bool) -> list[memoryview]:
    """The other way round, rounded; with `upper` the bits stay where they are.

    Not in place: the daemon takes unchanged tiles of the next frame from what lies in the ring.
    """
    half = 1 << (shift - 1)
    narrowed = []
    for plane in planes:
        made = (plane.clip(max=0xFFFF - half) + half) >> shift
        if upper:
            made <<= shift
        narrowed.append(made.data.cast("B"))
    return narrowed


class Times:
    """How long frames took, in a table that does not grow with the clip: by three digits."""

    def __init__(self) -> None:
        self.count = 0
        self._table: dict[float, int] = {}

    def add(self, ms: float) -> None:
        """A frame."""
        key = float(f"{ms:.3g}")
        self._table[key] = self._table.get(key, 0) + 1
        self.count += 1

    def percentile(self, percent: float) -> float:
        """The value that `percent` of the values do not exceed (nearest rank); 0 where there are
        none."""
        left = max(-(-self.count * percent // 100), 1)
        for ms in sorted(self._table):
            left -= self._table[ms]
            if left <= 0:
                return round(ms, 3)
        return 0.0
