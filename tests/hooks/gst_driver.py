# SPDX-License-Identifier: Apache-2.0
"""Runs `pvrupscale` in the system's Python and prints what came out as JSON: gst_driver.py CASE."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import gi

gi.require_version("Gst", "1.0")
gi.require_version("GstVideo", "1.0")
from gi.repository import Gst, GstVideo  # noqa: E402

LIMIT = 60 * Gst.SECOND


class Run:
    """A pipeline whose end is `fakesink name=sink`."""

    def __init__(self, text: str) -> None:
        self.pipeline = Gst.parse_launch(text)
        self.up = self.pipeline.get_by_name("up")
        self.frames: list[tuple[int, int]] = []  # PTS in ms, bytes
        self.durations: set[int] = set()  # ms
        self.caps: list[str] = []
        self.events: list[str] = []
        sink = self.pipeline.get_by_name("sink")
        sink.props.signal_handoffs = True
        sink.connect("handoff", self._frame)
        kinds = Gst.PadProbeType.EVENT_DOWNSTREAM | Gst.PadProbeType.EVENT_FLUSH
        sink.get_static_pad("sink").add_probe(kinds, self._event)

    def _frame(self, _sink: Any, buffer: Any, pad: Any) -> None:
        self.frames.append((buffer.pts // Gst.MSECOND, buffer.get_size()))
        self.durations.add(buffer.duration // Gst.MSECOND)
        # Not by the caps' structure, whose form in Python differs between GStreamer 1.22 and 1.26.
        info = GstVideo.VideoInfo.new_from_caps(pad.get_current_caps())
        size = f"{info.finfo.name} {info.width}x{info.height}"
        if size not in self.caps:
            self.caps.append(size)

    def _event(self, _pad: Any, info: Any) -> Any:
        self.events.append(f"{info.get_event().type.value_nick} {len(self.frames)}")
        return Gst.PadProbeReturn.OK

    def play(self) -> None:
        self.pipeline.set_state(Gst.State.PLAYING)

    def wait(self, *kinds: Any) -> Any:
        """The first message of these kinds, or an error."""
        wanted = Gst.MessageType.ERROR
        for kind in kinds:
            wanted |= kind
        return self.pipeline.get_bus().timed_pop_filtered(LIMIT, wanted)

    def report(self, **more: Any) -> None:
        found = {"frames": self.frames, "caps": self.caps, "events": self.events, **more}
        found["durations"] = sorted(self.durations)
        found["done"] = self.up.props.frames_done
        found["plain"] = self.up.props.frames_plain
        self.pipeline.set_state(Gst.State.NULL)
        print(json.dumps(found), flush=True)


def end(run: Run) -> str:
    message = run.wait(Gst.MessageType.EOS)
    if message is None:
        return "nothing within the limit"
    return message.parse_error()[0].message if message.type == Gst.MessageType.ERROR else "eos"


def case_launch(text: str) -> None:
    run = Run(text)
    run.play()
    run.report(end=end(run))


def case_seek(text: str) -> None:
    """A flushing seek in the middle, back to the beginning."""
    run = Run(text)
    run.pipeline.set_state(Gst.State.PAUSED)
    run.wait(Gst.MessageType.ASYNC_DONE)
    before = len(run.events)
    flags = Gst.SeekFlags.FLUSH | Gst.SeekFlags.ACCURATE
    run.pipeline.seek(
        1.0, Gst.Format.TIME, flags, Gst.SeekType.SET, 80 * Gst.MSECOND,
        Gst.SeekType.SET, 400 * Gst.MSECOND,
    )  # fmt: skip
    run.wait(Gst.MessageType.ASYNC_DONE)
    flushed = [event.split()[0] for event in run.events[before:]]
    run.frames.clear()
    run.play()
    run.report(end=end(run), flushed=flushed)


def case_resize(text: str) -> None:
    """The caps of a filter change while frames run."""
    run = Run(text)
    size = run.pipeline.get_by_name("size")
    run.play()
    run.wait(Gst.MessageType.ASYNC_DONE)
    size.props.caps = Gst.Caps.from_string("video/x-raw,format=NV12,width=80,height=60")
    run.report(end=end(run))


def case_live(text: str) -> None:
    """What a live pipeline says of its latency, and what QoS leaves out."""
    run = Run(text)
    run.play()
    run.wait(Gst.MessageType.ASYNC_DONE)
    query = Gst.Query.new_latency()
    run.pipeline.get_by_name("sink").get_static_pad("sink").peer_query(query)
    live, least, _ = query.parse_latency()
    inside = Gst.Query.new_latency()
    run.up.get_static_pad("sink").peer_query(inside)
    own = least - inside.parse_latency()[1]
    # All that comes is late by a second from here on.
    event = Gst.Event.new_qos(Gst.QOSType.UNDERFLOW, 1.5, Gst.SECOND, 10 * Gst.SECOND)
    run.pipeline.get_by_name("sink").get_static_pad("sink").push_event(event)
    message = run.wait(Gst.MessageType.QOS)
    dropped = message.parse_qos_stats()[2] if message.type == Gst.MessageType.QOS else -1
    told = run.up._latency // Gst.MSECOND
    run.report(live=live, own_ms=own // Gst.MSECOND, told_ms=told, dropped=dropped)


def case_late(text: str) -> None:
    """A live source that says so from its first frame on, as pipewiresrc does."""
    run = Run(text)
    pad = run.pipeline.get_by_name("source").get_static_pad("src")
    began: list[bool] = []

    def asked(_pad: Any, info: Any) -> Any:
        latency = info.get_query().type == Gst.QueryType.LATENCY
        return Gst.PadProbeReturn.DROP if latency and not began else Gst.PadProbeReturn.OK

    def passes(_pad: Any, _info: Any) -> Any:
        began.append(True)
        return Gst.PadProbeReturn.OK

    pad.add_probe(Gst.PadProbeType.QUERY_UPSTREAM | Gst.PadProbeType.PUSH, asked)
    pad.add_probe(Gst.PadProbeType.BUFFER, passes)
    run.play()
    ended = end(run)
    run.report(end=ended, live=run.up._live)


def case_pool(text: str) -> None:
    """Downstream has a pool that does not know what a frame takes, as pipewiresink's."""
    run = Run(text)
    pool = Gst.BufferPool.new()

    def asked(pad: Any, parent: Any, query: Any) -> bool:
        if query.type != Gst.QueryType.ALLOCATION:
            return bool(pad.query_default(parent, query))
        query.add_allocation_pool(pool, 0, 0, 0)
        return True

    run.pipeline.get_by_name("sink").get_static_pad("sink").set_query_function_full(asked)
    run.play()
    ended = end(run)
    size = Gst.BufferPool.config_get_params(pool.get_config())[2]
    run.report(end=ended, active=pool.is_active(), size=size)


def fed(text: str, sizes: list[int], time: Callable[[int], int], live: bool = False) -> None:
    """Frames of so many bytes and of these times, by `appsrc name=source`."""
    run = Run(text)
    source = run.pipeline.get_by_name("source")
    source.props.format, source.props.is_live = Gst.Format.TIME, live
    run.play()
    for number, size in enumerate(sizes):
        buffer = Gst.Buffer.new_wrapped(bytes(size))
        buffer.pts = time(number)
        source.emit("push-buffer", buffer)
    source.emit("end-of-stream")
    warned = run.wait(Gst.MessageType.WARNING) if len(set(sizes)) > 1 else None
    said = warned.parse_warning()[0].message if warned else ""
    run.report(end=end(run), said=said)


def case_short(text: str) -> None:
    """The middle frame is cut short."""
    whole = 64 * 48 * 3 // 2
    fed(text, [whole, whole - 1, whole], lambda number: number * 40 * Gst.MSECOND)


def case_timeless(text: str) -> None:
    """A live source that tells no times."""
    fed(text, [64 * 48 * 3 // 2] * 3, lambda _: Gst.CLOCK_TIME_NONE, live=True)


def case_far(text: str) -> None:
    """A live source whose times are nonsense."""
    fed(text, [64 * 48 * 3 // 2] * 3, lambda number: (1 << 63) - 9 + number, live=True)


def case_restart(text: str) -> None:
    """Says how many frames each side has made, until standard input closes."""
    run = Run(text)
    run.play()
    for line in sys.stdin:
        done, plain = run.up.props.frames_done, run.up.props.frames_plain
        print(json.dumps({"done": done, "plain": plain, "asked": line.strip()}), flush=True)
    run.report(end="")


if __name__ == "__main__":
    Gst.init(None)
    globals()[f"case_{sys.argv[1]}"](sys.argv[2])
