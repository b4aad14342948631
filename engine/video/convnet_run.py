# SPDX-License-Identifier: Apache-2.0
"""Frames through another's network: window by window, each in parts of about equal work."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from engine import memory
from engine.backends.base import Backend, Executable
from engine.errors import InvalidArgument
from engine.pace import LIMIT
from engine.record import recorded
from engine.variants import allowed
from engine.video.bands import Source
from engine.video.convnet import ConvModel
from engine.video.convnet_colour import planes
from engine.video.convnet_lower import PART_MACS, lower
from engine.video.convnet_windows import Cut, windows
from engine.video.frames import Bytes, FrameFormat
from engine.video.upscale import CPU, GPU, INTERPOLATED, NOBODY, Sink, as_planes
from kernels import maps
from kernels.contract import PARAM_WORDS
from kernels.plane_scale.op import REACH

SLICE_S = 0.02  # a slice takes as many parts as fit into it
MOST_PARTS = 64


class ConvPipeline:
    """Enlarges frames of one format with one network, as engine.video.upscale.VideoPipeline does.

    `tile` is the side of what a window gives (0: as large as memory allows), `overlap` the samples
    around it that it sees (0: the network's radius, at most convnet_windows.OVERLAP). Nothing is
    kept from frame to frame, so `unchanged` changes nothing.
    """

    def __init__(
        self,
        backend: Backend,
        model: ConvModel,
        fmt: FrameFormat,
        tile: int = 0,
        overlap: int = 0,
        unchanged: str = "off",
    ) -> None:
        """Raises:
        InvalidArgument: tile or overlap is negative, or a window does not fit the device.
        OutOfMemory, Quarantined: as record.recorded.
        """
        if tile < 0 or overlap < 0:
            raise InvalidArgument("Tile and overlap are sizes of 0 and up.")
        self.format, self.out_format = fmt, fmt.scaled(model.scale)
        self.scale = model.scale
        self.tiling = windows(model.plan, fmt.width, fmt.height, backend.info, tile, overlap)
        self.overlap = self.tiling.overlap
        self._planes = planes(fmt, model.scale, model.colours)
        size = self.tiling.width, self.tiling.height
        if backend.info.kind == "cpu":
            memory.admit({"maps": model.plan.sample_bytes * size[0] * size[1]})
        # Who multiplies whole matrices needs more work at once to be busy.
        macs = (16 if "coopmat" in backend.info.features else 1) * PART_MACS
        program, self._exe = recorded(
            backend,
            lambda: lower(model.plan, self._planes, *size, backend.info, macs, allowed(backend)),
            model.weights,
        )
        self._parts = int(program.meta["parts"])
        self._apart = "planes" in program.sequences
        self._own = CPU if backend.info.kind == "cpu" else GPU
        self._burst = 1
        self._source: Source | None = None
        self._sink: Sink | None = None
        self._row = self._column = self._part = 0
        self.made_by = np.zeros((len(self.tiling.rows), len(self.tiling.columns)), np.uint8)

    @property
    def executable(self) -> Executable:
        """What it computes with."""
        return self._exe

    @property
    def slices(self) -> int:
        """Parts of a frame; a slice may do several."""
        return self.tiling.tiles * self._parts

    @property
    def tiles(self) -> int:
        return int(np.count_nonzero(self.made_by))

    @property
    def tiles_reused(self) -> int:
        return 0

    @property
    def tiles_cpu(self) -> int:
        return 0

    @property
    def tiles_fallback(self) -> int:
        return int(np.count_nonzero(self.made_by == INTERPOLATED))

    @property
    def rows_done(self) -> int:
        """Luma rows of the enlarged frame that are done."""
        return self.scale * self.tiling.rows[self._row - 1].end if self._row else 0

    def begin(self, src: Sequence[Bytes] | Source, dst: Sequence[Bytes] | Sink) -> None:
        """A new frame; one that was under way is given up.

        Raises:
            InvalidArgument: the planes are not those of the format.
        """
        nbytes = self.format.sample_bytes
        if isinstance(src, Sequence):
            src = as_planes(src, self.format.planes(), nbytes)
        if isinstance(dst, Sequence):
            dst = as_planes(dst, self.out_format.planes(), nbytes)
        self._source, self._sink = src, dst
        self._row = self._column = self._part = 0
        self.made_by[:] = NOBODY

    def step(self) -> bool:
        """One slice. True when the frame is done (again and again after that).

        Raises:
            DeviceLost, OutOfMemory: as Executable.run.
        """
        if self._source is None or self._sink is None:
            return True
        row, column = self.tiling.rows[self._row], self.tiling.columns[self._column]
        run: list[str] = []
        if self._part == 0:
            self._load(self._source, row, column)
            run.append("first")
            if self._column == 0 and self._apart:
                run.append("planes")
        count = min(self._burst, self._parts - self._part)
        run += [f"part{i}" for i in range(self._part, self._part + count)]
        self._part += count
        if done := self._part == self._parts:
            run.append("last")
        spent = self._exe.run(*run).wall_s
        bound = min(SLICE_S, LIMIT.slice_s or SLICE_S)
        if spent < bound / 2 and count == self._burst:
            self._burst = min(2 * self._burst, max(1, int(MOST_PARTS * LIMIT.scale)))
        elif spent > bound:
            self._burst = max(1, self._burst // 2)
        if done:
            self.made_by[self._row, self._column] = self._own
            self._next(self._sink, row)
        return self._source is None

    def _load(self, source: Source, row: Cut, column: Cut) -> None:
        """A window's samples to the device."""
        words = np.zeros(PARAM_WORDS, np.uint32)
        words[maps.X0], words[maps.Y0] = column.begin, row.begin
        words[maps.CORE_X0], words[maps.CORE_X1] = column.core, column.end
        words[maps.CORE_Y0], words[maps.CORE_Y1] = row.core, row.end
        self._exe.write("params", words)
        if self._column:
            return
        for i, plane in enumerate(self._planes):
            if plane.tones:
                end = min(row.begin + self.tiling.height, plane.frame_height)
                low, high = plane.rows(row.begin, end, int(plane.half))
            else:
                low, high = plane.rows(row.core, row.end, REACH)
            self._exe.write(f"in{i}", source.rows(i, low, high))

    def _next(self, sink: Sink, row: Cut) -> None:
        self._part, self._column = 0, self._column + 1
        if self._column < len(self.tiling.columns):
            return
        for i, (plane, out) in enumerate(zip(self._planes, self.out_format.planes(), strict=True)):
            begin, end = self._out_span(row, plane.half, out.height)
            rows: npt.NDArray[Any] = self._exe.look(f"out{i}", (end - begin) * out.stride)
            sink.put(i, begin, rows.reshape(end - begin, out.stride))
        self._column, self._row = 0, self._row + 1
        if self._row == len(self.tiling.rows):
            self._source = self._sink = None

    def _out_span(self, row: Cut, half: bool, height: int) -> tuple[int, int]:
        """First row of a cut's core in an enlarged plane, and the row after its last."""
        begin, end = self.scale * row.core, self.scale * row.end
        if half:
            begin, end = begin // 2, (end + 1) // 2
        return begin, min(end, height)

    def abandon(self) -> None:
        """Ends a frame whose other rows somebody else interpolates."""
        self.made_by[self._row :] = INTERPOLATED
        self._source = self._sink = None

    def close(self) -> None:
        """Gives the device's memory back."""
        self._exe.close()
        self._source = self._sink = None
