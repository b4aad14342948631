# SPDX-License-Identifier: Apache-2.0
"""Tiles that a GPU got wrong, done anew on the CPU."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

from engine.backends.cpu import CpuBackend
from engine.video.bands import Bands, Source
from engine.video.frames import Bytes, FrameFormat
from engine.video.network import VideoModel
from engine.video.tiles import Tiling

BUDGET_S = 0.25  # of a frame: a device that gets everything wrong must not hold it up


class Spare:
    """The same model, format and cuts on the CPU; made when the first tile needs it."""

    def __init__(self, model: VideoModel, fmt: FrameFormat, tiling: Tiling) -> None:
        self._model, self._format, self._tiling = model, fmt, replace(tiling, batch=1)
        self._bands: Bands | None = None
        self._own: VideoModel | None = None
        self._left_s = 0.0

    def begin(self) -> None:
        """A new frame."""
        self._left_s = BUDGET_S

    def redo(
        self, band: int, source: Source, tiles: Sequence[int], planes: Sequence[Bytes]
    ) -> list[int]:
        """Computes tiles of a band and puts them into the band's enlarged planes; those for which
        there was time.
        """
        done: list[int] = []
        for tile in tiles:
            if self._left_s <= 0:
                break
            began = time.perf_counter()
            bands = self._ready()
            if not done:
                bands.load(band, source)
            bands.run(tile, 1)
            for i, rows in enumerate(planes):
                own = bands.own(i, tile)
                rows[:, own] = bands.rows(band, i)[:, own]
            done.append(tile)
            self._left_s -= time.perf_counter() - began
        return done

    def _ready(self) -> Bands:
        if self._bands is None:
            backend = CpuBackend()
            self._own = VideoModel(self._model.file, backend)
            self._bands = Bands(backend, self._own, self._format, self._tiling)
        return self._bands

    def close(self) -> None:
        """Lets go of its memory."""
        if self._bands is not None and self._own is not None:
            self._bands.close()
            self._own.close()
            self._bands = self._own = None
