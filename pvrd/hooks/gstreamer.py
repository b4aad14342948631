# SPDX-License-Identifier: Apache-2.0
"""The GStreamer element `pvrupscale`: I420 or NV12 in, the same in a larger size out.

    gst-launch-1.0 v4l2src ! videoconvert ! pvrupscale scale=2 ! autovideosink

Upstream's thread feeds frames to pvrd, a thread of the element's own pushes what comes back, so
that several are under way. Serialised events wait until all frames before them are through. In a
live pipeline each frame carries the moment at which it is due. What pvrd makes by no network until
then, and all while there is no daemon, is scaled plainly here, by GStreamer's own scaler
(pvrd/hooks/frames.py).
"""

from __future__ import annotations

import threading
import time
from typing import Any

import gi

gi.require_version("Gst", "1.0")
gi.require_version("GstVideo", "1.0")
from gi.repository import GObject, Gst, GstVideo  # noqa: E402

from pvrd.errors import PvrdError  # noqa: E402
from pvrd.hooks.frames import START_S, Closed, Frames, Result, Shape  # noqa: E402
from pvrd.hooks.gst_caps import CAPS, MOST, enlarged, larger, smaller, structure_of  # noqa: E402
from pvrd.hooks.gst_plain import Scaler, buffers, filled, planes_in  # noqa: E402

_PIXEL = {"I420": "i420", "NV12": "nv12"}
# Events that do not wait for the frames before them; the others are serialised, or are no one's.
_BESIDE = (Gst.EventType.FLUSH_START, Gst.EventType.CUSTOM_DOWNSTREAM_OOB)
LATENCY_FRAMES = 2  # periods that a live frame may take: pvrd makes it by less, rather than late
_FRAME_NS = 40_000_000  # of a stream that does not tell its rate
_FAR_NS = 3600 * 1_000_000_000  # what is due later than that, or at no time, waits for nothing


class PvrUpscale(Gst.Element):  # type: ignore[misc]
    """The element."""

    __gtype_name__ = "PvrUpscale"

    __gstmetadata__ = (
        "pvrd upscaler",
        "Filter/Effect/Converter/Video/Scaler",
        "Enlarges video by the networks of pvrd, the accelerator daemon",
        "The pvrd project",
    )
    __gsttemplates__ = (
        Gst.PadTemplate.new(
            "sink", Gst.PadDirection.SINK, Gst.PadPresence.ALWAYS, Gst.Caps.from_string(CAPS)
        ),
        Gst.PadTemplate.new(
            "src", Gst.PadDirection.SRC, Gst.PadPresence.ALWAYS, Gst.Caps.from_string(CAPS)
        ),
    )

    scale = GObject.Property(
        type=float, default=0.0, minimum=0.0, maximum=float(MOST), nick="Scale",
        blurb="How many times larger, 1 to 8; 0: what downstream asks for, else 2",
    )  # fmt: skip
    model = GObject.Property(
        type=str, default="", nick="Model",
        blurb="A model or a tier (fast, balanced, quality); empty: the default one",
    )  # fmt: skip
    priority = GObject.Property(
        type=GObject.TYPE_UINT, default=5, minimum=0, maximum=15, nick="Priority",
        blurb="Above 11 needs authorisation",
    )  # fmt: skip
    device = GObject.Property(
        type=str, default="auto", nick="Device", blurb="auto, gpu or cpu"
    )  # fmt: skip
    bus = GObject.Property(
        type=str, default="", nick="Bus",
        blurb="user, system or an address; empty: $PVRD_BUS, else where pvrd is",
    )  # fmt: skip
    qos = GObject.Property(
        type=bool, default=True, nick="QoS", blurb="Leave out frames that are late already"
    )  # fmt: skip
    frames_done = GObject.Property(
        type=GObject.TYPE_UINT64, default=0, nick="Frames", blurb="Frames that went out",
    )  # fmt: skip
    frames_plain = GObject.Property(
        type=GObject.TYPE_UINT64, default=0, nick="Plain",
        blurb="Those of them that were scaled plainly, for want of a daemon or of time",
    )  # fmt: skip

    def __init__(self) -> None:
        super().__init__()
        self.sinkpad = Gst.Pad.new_from_template(self.get_pad_template("sink"), "sink")
        self.srcpad = Gst.Pad.new_from_template(self.get_pad_template("src"), "src")
        self.sinkpad.set_chain_function_full(self._chain)
        self.sinkpad.set_event_function_full(self._sink_event)
        self.sinkpad.set_query_function_full(self._sink_query)
        self.srcpad.set_event_function_full(self._src_event)
        self.srcpad.set_query_function_full(self._src_query)
        self.add_pad(self.sinkpad)
        self.add_pad(self.srcpad)
        self._frames: Frames | None = None
        self._thread: threading.Thread | None = None
        self._scaler: Scaler | None = None
        self._in: Any = None
        self._out: Any = None
        self._segment = Gst.Segment()
        self._flow = Gst.FlowReturn.OK
        self._latency = -1  # ns that the pipeline was configured for; -1: not, or not live
        self._live = False
        self._earliest = -1
        self._left_out = self._sent = 0

    # -- sizes

    def _caps(self, pad: Any, wanted: Any) -> Any:
        """What a pad takes, by what the other one's peer takes."""
        template = pad.get_pad_template_caps()
        other, change = (self.srcpad, smaller) if pad is self.sinkpad else (self.sinkpad, larger)
        peer = other.peer_query_caps(other.get_pad_template_caps())
        caps = Gst.Caps.new_empty()
        for index in range(peer.get_size()):
            caps.append_structure(change(structure_of(peer, index), self.scale))
        caps = caps.intersect(template)
        return caps if wanted is None else wanted.intersect_full(caps, Gst.CapsIntersectMode.FIRST)

    def _set_caps(self, caps: Any) -> bool:
        info = GstVideo.VideoInfo.new_from_caps(caps)
        if info is None or info.interlace_mode != GstVideo.VideoInterlaceMode.PROGRESSIVE:
            return self._fail("the video is interlaced; put `deinterlace` before pvrupscale")
        wanted = Gst.Caps.new_empty()
        wanted.append_structure(larger(structure_of(caps), self.scale))
        found = self.srcpad.peer_query_caps(wanted).intersect(wanted)
        if found.is_empty():
            return self._fail(
                f"downstream takes no {info.width}x{info.height} video that is enlarged "
                + (f"{self.scale:g} times" if self.scale else f"1 to {MOST} times")
            )
        made = enlarged(caps, info, found, self.scale)
        self._drain()
        self._stop()
        if not self.srcpad.push_event(Gst.Event.new_caps(made)):
            return False
        self._in, self._out = info, GstVideo.VideoInfo.new_from_caps(made)
        self._ready_pools(made)
        return True

    def _open(self) -> Frames | None:
        """Frames of the size that was agreed on; None before that. With the first frame of a size,
        for some sources do not know before whether they are live."""
        info, out = self._in, self._out
        if info is None:
            return None
        self._live = self._ask_latency()[0]
        shape = Shape(
            info.width, info.height, _PIXEL[info.finfo.name],
            "left" if info.chroma_site & GstVideo.VideoChromaSite.H_COSITED else "centre",
            info.colorimetry.range == GstVideo.VideoColorRange(1),
        )  # fmt: skip
        settings = {
            "model": self.model or None, "device": self.device, "priority": self.priority,
            "adapt": self._live, "interpolate": not self._live,
        }  # fmt: skip
        # A live picture is there at once, however long models load.
        start = 0.0 if self._live else START_S
        size = out.width, out.height
        self._scaler = Scaler.of(info, out)
        plain = None if self._scaler is None else self._scaler.scale
        frames = Frames(shape, size, settings, self.bus or None, start=start, plain=plain)
        self._frames = frames
        self._thread = threading.Thread(
            target=self._push_all, args=(frames, out), name="pvrupscale", daemon=True
        )
        self._thread.start()
        if self._flow != Gst.FlowReturn.OK:
            frames.close()  # whoever ends the stream may not have seen it
        return frames

    def _ready_pools(self, caps: Any) -> None:
        """Tells downstream's pools what a frame takes where they do not know: pipewiresink has
        shown its node by now, and crashes (0.3.65) when a program takes it before that."""
        query = Gst.Query.new_allocation(caps, True)
        if not self.srcpad.peer_query(query):
            return
        for index in range(query.get_n_allocation_pools()):
            pool, size, least, most = query.parse_nth_allocation_pool(index)
            if pool is not None and not size:
                config = pool.get_config()
                Gst.BufferPool.config_set_params(config, caps, self._out.size, least, most)
                pool.set_config(config)
                pool.set_active(True)

    def _fail(self, sentence: str) -> bool:
        self.message_full(
            Gst.MessageType.ERROR, Gst.StreamError.quark(), int(Gst.StreamError.FAILED),
            sentence, None, __file__, "pvrupscale", 0,
        )  # fmt: skip
        return False

    def _warn(self, sentence: str) -> None:
        self.message_full(
            Gst.MessageType.WARNING, Gst.StreamError.quark(), int(Gst.StreamError.DECODE),
            sentence, None, __file__, "pvrupscale", 0,
        )  # fmt: skip

    # -- frames

    def _chain(self, _pad: Any, _parent: Any, buffer: Any) -> Any:
        if self._flow != Gst.FlowReturn.OK:
            return self._flow
        frames = self._frames or self._open()
        if frames is None:
            return Gst.FlowReturn.NOT_NEGOTIATED
        running = self._segment.to_running_time(Gst.Format.TIME, buffer.pts)
        if self._is_late(running, buffer):
            return Gst.FlowReturn.OK
        ticket = buffer.pts, buffer.dts, buffer.duration, buffer.offset, buffer.offset_end
        try:
            with buffer.map(Gst.MapFlags.READ) as memory:
                meta = GstVideo.buffer_get_video_meta(buffer)
                try:
                    planes = planes_in(self._in, memory.data, meta)
                except ValueError:
                    self._warn("a frame is cut short; it is left out")
                    return Gst.FlowReturn.OK
                frames.feed(planes, ticket, self._deadline(running))
        except Closed:
            return Gst.FlowReturn.FLUSHING
        except PvrdError as error:
            self._fail(str(error))
            return Gst.FlowReturn.ERROR
        return self._flow

    def _is_late(self, running: int, buffer: Any) -> bool:
        if not self.qos or self._earliest < 0 or not 0 <= running <= self._earliest:
            return False
        self._left_out += 1
        message = Gst.Message.new_qos(
            self, self._live, running,
            self._segment.to_stream_time(Gst.Format.TIME, buffer.pts), buffer.pts, buffer.duration,
        )  # fmt: skip
        message.set_qos_values(self._earliest - running, 1.0, 1_000_000)
        message.set_qos_stats(Gst.Format.BUFFERS, self._sent, self._left_out)
        self.post_message(message)
        return True

    def _deadline(self, running: int) -> int:
        """When a frame is due, of CLOCK_MONOTONIC; 0 where nothing waits for it."""
        clock = self.get_clock()
        if not self._live or clock is None or not 0 <= running < Gst.CLOCK_TIME_NONE:
            return 0
        if self._latency < self._frame_ns():
            return 0  # a sink that does not wait (sync=false) leaves no time for anything
        left = self.get_base_time() + running + self._latency - clock.get_time()
        return int(time.monotonic_ns() + max(left, 1)) if left < _FAR_NS else 0

    def _push_all(self, frames: Frames, info: Any) -> None:
        pool = buffers(info)
        try:
            self._push_from(frames, info, pool)
        finally:
            pool.set_active(False)

    def _push_from(self, frames: Frames, info: Any, pool: Any) -> None:
        while True:
            try:
                result = frames.take()
            except Closed:
                return
            except Exception as error:
                self._fail(f"{type(error).__name__}: {error}")
                self._flow = Gst.FlowReturn.ERROR
                return
            buffer = self._buffer(pool, result, info)
            if buffer is None:
                continue  # the pipeline is ending
            self.frames_done, self.frames_plain = frames.done, frames.plain
            flow = self.srcpad.push(buffer)
            self._sent += 1
            if flow != Gst.FlowReturn.OK:
                self._flow = flow
                frames.flush()

    def _buffer(self, pool: Any, result: Result, info: Any) -> Any:
        if self._scaler is not None and not result.device:
            buffer = result.planes  # the scaler's
        else:
            buffer = filled(pool, info, result.planes)
        if buffer is not None:
            self._stamp(buffer, result)
        return buffer

    @staticmethod
    def _stamp(buffer: Any, result: Result) -> None:
        buffer.pts, buffer.dts, buffer.duration, buffer.offset, buffer.offset_end = result.ticket

    def _drain(self) -> None:
        if self._frames is not None and self._thread is not threading.current_thread():
            try:
                self._frames.drain()
            except Closed:
                return

    def _stop(self) -> None:
        if self._frames is not None:
            self._frames.close()
            self._frames = None
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
            self._thread = None
        if self._scaler is not None:
            self._scaler.close()
            self._scaler = None

    # -- events

    def _sink_event(self, pad: Any, parent: Any, event: Any) -> bool:
        kind = event.type
        if kind == Gst.EventType.FLUSH_START:
            self._flow = Gst.FlowReturn.FLUSHING
            if self._frames is not None:
                self._frames.flush()
            return bool(self.srcpad.push_event(event))
        if kind == Gst.EventType.FLUSH_STOP:
            self._drain()
            self._segment = Gst.Segment()
            self._flow, self._earliest = Gst.FlowReturn.OK, -1
            return bool(self.srcpad.push_event(event))
        if kind == Gst.EventType.CAPS:
            return self._set_caps(event.parse_caps())
        if kind not in _BESIDE:
            self._drain()
        if kind == Gst.EventType.SEGMENT:
            self._segment = event.parse_segment().copy()
        return bool(pad.event_default(parent, event))

    def _src_event(self, pad: Any, parent: Any, event: Any) -> bool:
        if event.type == Gst.EventType.QOS:
            _, _, late, timestamp = event.parse_qos()
            self._earliest = timestamp + (2 * late + self._frame_ns() if late > 0 else late)
        elif event.type == Gst.EventType.LATENCY:
            self._latency = event.parse_latency()
        return bool(pad.event_default(parent, event))

    # -- queries

    def _frame_ns(self) -> int:
        info = self._in
        if info is None or info.fps_n <= 0:
            return _FRAME_NS
        return int(Gst.SECOND * info.fps_d // info.fps_n)

    def _ask_latency(self) -> tuple[bool, int, int]:
        query = Gst.Query.new_latency()
        if not self.sinkpad.peer_query(query):
            return False, 0, Gst.CLOCK_TIME_NONE
        live, least, most = query.parse_latency()
        return bool(live), int(least), int(most)

    def _sink_query(self, pad: Any, parent: Any, query: Any) -> bool:
        if query.type == Gst.QueryType.CAPS:
            query.set_caps_result(self._caps(pad, query.parse_caps()))
            return True
        if query.type == Gst.QueryType.ALLOCATION:
            return False  # planes lie as their format says; dma-bufs are not taken by the daemon
        return bool(pad.query_default(parent, query))

    def _src_query(self, pad: Any, parent: Any, query: Any) -> bool:
        if query.type == Gst.QueryType.CAPS:
            query.set_caps_result(self._caps(pad, query.parse_caps()))
            return True
        if query.type == Gst.QueryType.LATENCY:
            live, least, most = self._ask_latency()
            own = LATENCY_FRAMES * self._frame_ns()
            none = Gst.CLOCK_TIME_NONE
            query.set_latency(live, least + own, none if most == none else most + own)
            return True
        return bool(pad.query_default(parent, query))

    def do_change_state(self, change: Any) -> Any:
        """Starts and ends with PAUSED."""
        if change == Gst.StateChange.READY_TO_PAUSED:
            self._flow, self._earliest, self._latency = Gst.FlowReturn.OK, -1, -1
            self._left_out = self._sent = 0
        if change == Gst.StateChange.PAUSED_TO_READY:
            self._flow = Gst.FlowReturn.FLUSHING
            frames = self._frames
            if frames is not None:
                frames.close()  # or the pads' threads would wait for a frame
        done = Gst.Element.do_change_state(self, change)
        if change == Gst.StateChange.PAUSED_TO_READY:
            self._stop()
            self._in = None
        return done
