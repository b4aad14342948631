# SPDX-License-Identifier: Apache-2.0
"""Plain scaling of frames inside `pvrupscale` by GStreamer's own scaler (`videoscale`): as fast as
in a pipeline without pvrd, and without Python's lock. Also buffers and the planes in them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import gi

gi.require_version("Gst", "1.0")
gi.require_version("GstVideo", "1.0")
import numpy as np  # noqa: E402
from gi.repository import Gst, GstVideo  # noqa: E402


def planes_in(info: Any, memory: Any, meta: Any = None) -> list[Any]:
    """The planes of a frame in a mapped buffer, as (rows, samples) arrays on it. meta: of the
    buffer, where its planes lie in a way of their own."""
    lie = meta or info
    stride, offset = list(lie.stride), list(lie.offset)
    height, width = info.height, info.width
    half = ((height + 1) // 2, (width + 1) // 2)
    shapes = [(height, width), half, half]
    if info.finfo.format == GstVideo.VideoFormat.NV12:
        shapes = [(height, width), (half[0], 2 * half[1])]
    return [
        np.ndarray(shape, np.uint8, memory, offset[i], (stride[i], 1))
        for i, shape in enumerate(shapes)
    ]


def buffers(info: Any) -> Any:
    """An active pool of buffers for frames; set_active(False) ends it."""
    pool = Gst.BufferPool.new()
    config = pool.get_config()
    Gst.BufferPool.config_set_params(config, None, info.size, 2, 0)
    pool.set_config(config)
    pool.set_active(True)
    return pool


def filled(pool: Any, info: Any, planes: Sequence[Any]) -> Any:
    """A buffer of the pool with these planes."""
    _, buffer = pool.acquire_buffer(None)
    with buffer.map(Gst.MapFlags.WRITE) as memory:
        for target, plane in zip(planes_in(info, memory.data), planes, strict=True):
            target[:] = plane
    return buffer


def _size(info: Any) -> Any:
    """Caps of samples alone: what colours they are is nothing to a scaler."""
    kind = f"video/x-raw,format={info.finfo.name},framerate=0/1"
    return Gst.Caps.from_string(f"{kind},width={info.width},height={info.height}")


class Scaler:
    """A `videoscale` between two pads of ours: a frame goes in by one, and comes out by the other
    before the call returns."""

    def __init__(self, element: Any, small: Any, large: Any) -> None:
        self._info, self._pool, self._made = small, buffers(small), None
        self._element = element
        element.props.method = 1  # bilinear
        element.props.qos = element.props.add_borders = False
        self._into = Gst.Pad.new("into", Gst.PadDirection.SRC)
        self._out = Gst.Pad.new("out", Gst.PadDirection.SINK)
        self._out.set_chain_function_full(self._chain)
        self._out.set_query_function_full(self._query)
        self._caps = _size(large)
        for pad in (self._into, self._out):
            pad.set_active(True)
        self._into.link(element.get_static_pad("sink"))
        element.get_static_pad("src").link(self._out)
        element.set_state(Gst.State.PAUSED)
        segment = Gst.Segment()
        segment.init(Gst.Format.TIME)
        for event in (
            Gst.Event.new_stream_start("pvrupscale"),
            Gst.Event.new_caps(_size(small)),
            Gst.Event.new_segment(segment),
        ):
            self._into.push_event(event)

    @classmethod
    def of(cls, small: Any, large: Any) -> Self | None:
        """None where GStreamer has no scaler here."""
        element = Gst.ElementFactory.make("videoscale", None)
        return None if element is None else cls(element, small, large)

    def scale(self, planes: Sequence[Any]) -> Any:
        """A buffer with the enlarged frame, of no time; None while it is being closed."""
        self._made = None
        self._into.push(filled(self._pool, self._info, planes))
        made, self._made = self._made, None
        return made

    def close(self) -> None:
        """Ends it. Nobody is in scale()."""
        self._element.set_state(Gst.State.NULL)
        for pad in (self._into, self._out):
            pad.set_active(False)
        self._pool.set_active(False)

    def _chain(self, _pad: Any, _parent: Any, buffer: Any) -> Any:
        self._made = buffer
        return Gst.FlowReturn.OK

    def _query(self, pad: Any, parent: Any, query: Any) -> bool:
        if query.type == Gst.QueryType.CAPS:
            wanted = query.parse_caps()
            query.set_caps_result(self._caps if wanted is None else wanted.intersect(self._caps))
            return True
        return bool(pad.query_default(parent, query))
