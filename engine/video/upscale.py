# SPDX-License-Identifier: Apache-2.0
"""Frames through a device, a slice at a time.

Rows come from a Source and go to a Sink band by band, so that a frame may lie in a ring, or be made
and used up while it passes (pictures). A band's rows go to the device as they lie, once, and come
back once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from engine.backends.base import Backend, Executable
from engine.errors import InvalidArgument
from engine.lower import allowed
from engine.record import recorded
from engine.video import plain
from engine.video.frames import Bytes, FrameFormat, samples
from engine.video.lowering import band_rows, lower
from engine.video.network import VideoModel
from engine.video.tiles import plan
from kernels import video
from kernels.contract import PARAM_WORDS


class Source(Protocol):
    """Where rows come from."""

    def rows(self, plane: int, begin: int, end: int) -> Bytes:
        """Rows begin..end-1 of a plane as uint8 [rows, stride of the format]; contiguous."""


class Sink(Protocol):
    """Where rows go. Rows of a plane come in order, each once; all planes of a band before the next
    band.
    """

    def put(self, plane: int, begin: int, rows: Bytes) -> None:
        """`rows`: uint8 [rows, stride of the enlarged format]; what lies beyond the plane's width
        means nothing.
        """


class Planes:
    """Source and Sink over whole planes (ring slots)."""

    def __init__(self, planes: Sequence[Bytes], row_bytes: Sequence[int]) -> None:
        self._planes, self._row_bytes = planes, row_bytes

    def rows(self, plane: int, begin: int, end: int) -> Bytes:
        return self._planes[plane][begin:end]

    def put(self, plane: int, begin: int, rows: Bytes) -> None:
        n = self._row_bytes[plane]
        self._planes[plane][begin : begin + len(rows), :n] = rows[:, :n]


class VideoPipeline:
    """Enlarges frames of one format with one model. One frame at a time: `begin`, then `step` until
    it says True.

    `tile` is the side of the tiles (0: the device's own). The overlap is always the network's
    radius, the least that makes the tiled frame equal to the untiled one to the bit, so a wider
    `overlap` changes nothing; it is checked and kept for reports.
    """

    def __init__(
        self,
        backend: Backend,
        model: VideoModel,
        fmt: FrameFormat,
        scale: int = 2,
        tile: int = 0,
        overlap: int = 0,
    ) -> None:
        """Raises:
        InvalidArgument: the model does not enlarge by `scale`, or tile or overlap is negative.
        OutOfMemory: as Backend.executable.
        """
        if scale != model.scale:
            raise InvalidArgument(f"The model enlarges x{model.scale}, not x{scale}.")
        if tile < 0 or overlap < 0:
            raise InvalidArgument("Tile and overlap are sizes of 0 and up.")
        self.model, self.format, self.scale = model, fmt, scale
        self.out_format = fmt.scaled(scale)
        networks = self._networks = model.networks
        sizes = (fmt.width, fmt.height, networks.halo, networks.widest)
        self.tiling = plan(*sizes, backend.info, tile, fmt.sample_bytes, scale)
        self.overlap = networks.halo
        given = (networks, backend.info, fmt, self.tiling)
        program, self._exe = recorded(
            backend, lambda: lower(*given, allowed(backend)), model.weights
        )
        self._in, self._out = fmt.planes(), self.out_format.planes()
        self._row_bytes = [p.width * fmt.sample_bytes for p in self._out]
        self._planes_apart = "planes" in program.sequences
        self._words = np.zeros(PARAM_WORDS, np.uint32)
        self._source: Source | None = None
        self._sink: Sink | None = None
        self._band = self._column = 0
        self.tiles = 0
        self.tiles_fallback = 0

    @property
    def executable(self) -> Executable:
        """What it computes with."""
        return self._exe

    @property
    def slices(self) -> int:
        """Slices of a frame."""
        return self.tiling.bands * -(-self.tiling.columns // self.tiling.batch)

    def begin(self, src: Sequence[Bytes] | Source, dst: Sequence[Bytes] | Sink) -> None:
        """A new frame; one that was under way is given up. Planes: uint8 [height, stride] as in
        frames.views.

        Counts `tiles` and `tiles_fallback` from 0.

        Raises:
            InvalidArgument: the planes are not those of the format.
        """
        self._source = self._planes(src, self._in) if isinstance(src, Sequence) else src
        self._sink = self._planes(dst, self._out) if isinstance(dst, Sequence) else dst
        self._band = self._column = 0
        self.tiles = self.tiles_fallback = 0

    def _planes(self, planes: Sequence[Bytes], wanted: Sequence[Any]) -> Planes:
        if [p.shape for p in planes] != [(w.height, w.stride) for w in wanted]:
            raise InvalidArgument("The planes do not fit the format.")
        return Planes(planes, self._row_bytes)

    def step(self) -> bool:
        """One slice. True when the frame is done (again and again after that).

        Raises:
            DeviceLost, OutOfMemory: as Executable.run.
        """
        t = self.tiling
        if self._source is None or self._band >= t.bands:
            return True
        first = self._column == 0
        if first:
            self._load(self._source)
        count = min(t.batch, t.columns - self._column)
        self._words[video.N_TILES] = count
        self._words[video.COL0] = self._column
        self._exe.write("params", self._words)
        if first and self._planes_apart:
            self._exe.run("tiles", "planes")
        else:
            self._exe.run("tiles")
        self._column += count
        if self._column == t.columns:
            assert self._sink is not None
            self._store(self._source, self._sink)
            self._column = 0
            self._band += 1
        if self._band < t.bands:
            return False
        self._source = self._sink = None
        return True

    def _span(self, role: str) -> tuple[int, int, int, int]:
        """Of the band in a plane: its first row and the row after its last, the same of the rows it
        is computed from.
        """
        rows, reach = band_rows(role, self.tiling), self._networks.reach(role)
        height = self.format.pixels(role)[1]
        begin = self._band * rows
        end = min(begin + rows, height)
        return begin, end, max(0, begin - reach), min(height, end + reach)

    def _load(self, source: Source) -> None:
        w = self._words
        for i, role in enumerate(self.format.roles):
            begin, end, low, high = self._span(role)
            width, height = self.format.pixels(role)
            if role == "y":
                w[video.WIDTH], w[video.HEIGHT] = width, height
                w[video.BAND_Y], w[video.SRC_Y] = begin, low
            else:
                # The planes of a format that are not luma are all of one size: one set of words
                # serves them.
                w[video.C_WIDTH], w[video.C_HEIGHT] = width, height
                w[video.C_BAND_Y], w[video.C_SRC_Y], w[video.C_ROWS] = begin, low, end - begin
            self._exe.write(f"in{i}", source.rows(i, low, high))

    def _store(self, source: Source, sink: Sink) -> None:
        for i, role in enumerate(self.format.roles):
            begin, end, _, _ = self._span(role)
            plane = self._out[i]
            first, last = self.scale * begin, min(self.scale * end, plane.height)
            rows = self._exe.read(f"out{i}", (last - first) * plane.stride)
            rows = rows.reshape(last - first, plane.stride)
            if role == "y":
                rows = self._checked(source, begin, end, rows)
            sink.put(i, first, rows)

    def _checked(self, source: Source, begin: int, end: int, rows: Bytes) -> Bytes:
        """The band's luma with implausible tiles done anew by plain interpolation."""
        t, bits, width, scale = self.tiling, self.format.depth, self.format.width, self.scale
        self.tiles += t.columns
        low = samples(source.rows(0, begin, end), width, bits)
        starts = np.arange(t.columns) * t.tw
        bad = plain.implausible(low, samples(rows, scale * width, bits), starts, bits, scale)
        if not bad:
            return rows
        self.tiles_fallback += len(bad)
        top, bottom = max(0, begin - 2), min(self.format.height, end + 2)
        around = samples(source.rows(0, top, bottom), width, bits)
        rows = rows.copy()
        out = samples(rows, scale * width, bits)
        for column in bad:
            x = column * t.tw
            cols = min(t.tw, width - x)
            tile = plain.enlarge(around, begin - top, x, end - begin, cols, bits, scale)
            out[:, scale * x : scale * (x + cols)] = tile
        return rows

    def close(self) -> None:
        self._exe.close()
        self._source = self._sink = None
