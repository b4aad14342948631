# SPDX-License-Identifier: Apache-2.0
"""Frames through a network on a device, a slice at a time.

Rows come from a Source and go to a Sink band by band, so that a frame may lie in a ring, or be made
and used up while it passes (pictures).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from engine.backends.base import Backend, Executable
from engine.errors import InvalidArgument
from engine.memory import copy
from engine.pace import Fit, device_clock
from engine.video import plain
from engine.video.bands import Bands, Source
from engine.video.frames import Bytes, FrameFormat, Plane, samples
from engine.video.fused import fuses
from engine.video.network import FILTER_REACH, VideoModel
from engine.video.spare import Spare
from engine.video.tiles import Tiling, plan
from engine.video.unchanged import MODES, Unchanged, Window

# Who made a tile's result, letters of a tile map.
GPU, CPU, REUSED, INTERPOLATED = b"gcri"
NOBODY = 0


class Sink(Protocol):
    """Where rows go. Rows of a plane come in order, each once; all planes of a band before the next
    band.
    """

    def put(self, plane: int, begin: int, rows: Bytes) -> None:
        """`rows`: uint8 [rows, stride of the enlarged format]; what lies beyond the plane's width
        means nothing.
        """


class Planes:
    """Source and Sink over whole planes (ring slots).

    claims: `place` gives rows for a moment, to which results that are there are brought at once; no
    work may lie between. lasts: but the moment is long enough for the work, too, where `still` says
    so right before it.
    """

    claims = lasts = False

    def __init__(self, planes: Sequence[Bytes], row_bytes: Sequence[int]) -> None:
        self.planes, self._row_bytes = planes, row_bytes

    def rows(self, plane: int, begin: int, end: int) -> Bytes:
        return self.planes[plane][begin:end]

    def place(self, plane: int, begin: int, end: int) -> Bytes | None:
        """Rows begin..end-1 of a plane, to write to at once instead of `put`; None: it has to be
        that.
        """
        rows = self.planes[plane][begin:end]
        return rows if rows.flags.c_contiguous else None

    def still(self) -> None:
        """Raises whatever it likes where rows that were given are not to be written to any more."""

    def put(self, plane: int, begin: int, rows: Bytes) -> None:
        n = self._row_bytes[plane]
        copy(self.planes[plane][begin : begin + len(rows), :n], rows[:, :n])


def as_planes(planes: Sequence[Bytes], wanted: Sequence[Plane], sample_bytes: int) -> Planes:
    """Planes as a Source or Sink.

    Raises:
        InvalidArgument: they are not `wanted`.
    """
    if [p.shape for p in planes] != [(w.height, w.stride) for w in wanted]:
        raise InvalidArgument("The planes do not fit the format.")
    return Planes(planes, [w.width * sample_bytes for w in wanted])


class VideoPipeline:
    """Enlarges frames of one format with one model. One frame at a time: `begin`, then `step` until
    it says True.

    `tile` is the side of the tiles (0: the device's own). The overlap is always the network's
    radius, the least that makes the tiled frame equal to the untiled one to the bit, so a wider
    `overlap` changes nothing; it is checked and kept for reports. `unchanged`: which tiles keep the
    result that they had in the frame before (engine/video/unchanged.py); frames that come and go as
    planes alone have that, and what was written for the last one must then still be there.

    Of the last frame: `tiles`, of these `tiles_reused`, `tiles_cpu` (done anew on the CPU after the
    device's result could not be right), `tiles_fallback` (interpolated plainly), `made_by`.

    `later`: where the sink has a frame's last results already, the host's part of them is left to
    `settle`; the frame is `unsettled` until then, and what is counted of it is not known.
    """

    later = False

    def __init__(
        self,
        backend: Backend,
        model: VideoModel,
        fmt: FrameFormat,
        tile: int = 0,
        overlap: int = 0,
        unchanged: str = "off",
    ) -> None:
        """Raises:
        InvalidArgument: tile or overlap is negative, or `unchanged` is none of MODES.
        OutOfMemory, Quarantined: as record.recorded.
        """
        if tile < 0 or overlap < 0:
            raise InvalidArgument("Tile and overlap are sizes of 0 and up.")
        if unchanged not in MODES:
            raise InvalidArgument(f"Unchanged is {', '.join(MODES)}, not {unchanged!r}.")
        networks = model.networks
        self.format, self.out_format = fmt, fmt.scaled(model.scale)
        fused, spread = fuses(networks.luma, backend.info), networks.spread(backend.info)
        fine, coarse = (
            plan(
                fmt.width, fmt.height, networks.halo, networks.widest, backend.info, tile,
                fmt.sample_bytes, model.scale, fused, spread, fine=some,
            )
            for some in (True, False)
        )  # fmt: skip
        self.overlap = networks.halo
        self._own = CPU if backend.info.kind == "cpu" else GPU
        self._fit = Fit()
        # Larger cuts for frames of which no tile can keep its result.
        self._coarse = self._fine = self._bands = Bands(backend, model, fmt, coarse)
        self._unchanged: Unchanged | None = None
        if unchanged != "off":
            try:
                self._fine = self._coarse if fine == coarse else Bands(backend, model, fmt, fine)
            except BaseException:
                self._coarse.close()
                raise
            self._bands = self._fine
            windows = [self._windows(model, band) for band in range(fine.bands)]
            self._unchanged = Unchanged(fmt, windows, fine.columns, unchanged == "tolerant")
        self._spare = Spare(model, fmt, self.tiling) if self._own == GPU else None
        self._source: Source | None = None
        self._sink: Sink | None = None
        self._before: Sequence[Bytes] = ()  # where the last frame's results are
        self._band = 0
        self._todo: list[tuple[int, int]] | None = None
        self._placed: list[Bytes] = []  # rows of the sink that have the band's results already
        self.unsettled = False
        self._cut(self._bands)

    def _cut(self, bands: Bands) -> None:
        """Frames are cut as `bands` has it, and every tile is wanted."""
        self._bands = bands
        self._wanted = np.ones((bands.tiling.bands, bands.tiling.columns), bool)
        self.made_by = np.zeros_like(self._wanted, np.uint8)

    @property
    def tiling(self) -> Tiling:
        """The cuts of the last frame."""
        return self._bands.tiling

    def _windows(self, model: VideoModel, band: int) -> list[Window]:
        found = []
        for role in self.format.roles:
            begin, end, low, high = self._bands.span(band, role)
            half = role in ("half", "pairs")
            width = self.tiling.tw // 2 if half else self.tiling.tw
            found.append(Window(begin, end, low, high, width, model.networks.reach(role)))
        return found

    @property
    def executable(self) -> Executable:
        """What it computes with."""
        return self._bands.executable

    @property
    def slices(self) -> int:
        """Slices of a frame in which every tile is computed."""
        return self.tiling.bands * -(-self.tiling.columns // self.tiling.batch)

    @property
    def tiles(self) -> int:
        return int(np.count_nonzero(self.made_by))

    @property
    def tiles_reused(self) -> int:
        return int(np.count_nonzero(self.made_by == REUSED))

    @property
    def tiles_cpu(self) -> int:
        return int(np.count_nonzero(self.made_by == CPU)) if self._own == GPU else 0

    @property
    def tiles_fallback(self) -> int:
        return int(np.count_nonzero(self.made_by == INTERPOLATED))

    def begin(self, src: Sequence[Bytes] | Source, dst: Sequence[Bytes] | Sink) -> None:
        """A new frame; one that was under way is given up. Planes: uint8 [height, stride] as in
        frames.views.

        Raises:
            InvalidArgument: the planes are not those of the format.
        """
        if self._source is not None:
            self._before = ()
        self.unsettled = False
        nbytes = self.format.sample_bytes
        if isinstance(src, Sequence):
            src = as_planes(src, self.format.planes(), nbytes)
        if isinstance(dst, Sequence):
            dst = as_planes(dst, self.out_format.planes(), nbytes)
        self._source, self._sink = src, dst
        self._band, self._todo = 0, None
        self._cut(self._coarse)
        if self._unchanged and isinstance(src, Planes) and isinstance(dst, Planes):
            if not self._before:
                self._unchanged.forget()
            wanted = self._unchanged.changed(src.planes)
            if not self._unchanged.restless:
                self._cut(self._fine)
                self._wanted = wanted
        if self._spare:
            self._spare.begin()

    def step(self) -> bool:
        """One slice. True when the frame is done (again and again after that).

        Raises:
            DeviceLost, OutOfMemory: as Executable.run.
        """
        while not self.unsettled and self._source is not None and self._sink is not None:
            if self._todo is None:
                self._todo = self._runs(self._wanted[self._band])
                self._placed = []
                if self._todo:
                    self._bands.load(self._band, self._source)
            if self._todo:
                column, count = self._todo.pop(0)
                if count > (most := self._fit.most(self.tiling.batch)):
                    self._todo.insert(0, (column + most, count - most))
                    count = most
                self._compute(column, count, self._sink)
                if self._todo:
                    return False
            computed = bool(self._wanted[self._band].any())
            if self.later and self._placed and self._band + 1 == self.tiling.bands:
                self.unsettled = True
                return True
            self._leave(self._source, self._sink)
            if computed:
                return self._source is None
        return True

    def _compute(self, column: int, count: int, sink: Sink) -> None:
        """A slice of the band; the last one brings its results to the sink or near it."""
        lent = sink if isinstance(sink, Planes) and sink.claims else None
        whole, last = bool(self._wanted[self._band].all()), not self._todo
        joined = lent is not None and whole and lent.lasts
        alone = lent is not None and whole and not joined
        self._placed = self._places(sink) if last and (joined or lent is None) else []
        began = device_clock()
        still = lent.still if lent is not None and joined else None
        self._bands.run(column, count, self._placed, last and not alone, still)
        self._fit.took(count, device_clock() - began)
        if last and alone and (rows := self._places(sink)):
            self._bands.fetch(rows)
            self._placed = rows

    def settle(self) -> None:
        """What `step` left to do of a frame (`later`): a look at what lies in the sink by now.

        Raises:
            As the sink.
        """
        if self.unsettled and self._source is not None and self._sink is not None:
            self.unsettled = False
            self._leave(self._source, self._sink)

    def _runs(self, wanted: npt.NDArray[np.bool_]) -> list[tuple[int, int]]:
        """(first column, count) of slices that compute the wanted tiles of a band."""
        edges = np.flatnonzero(np.diff(np.concatenate([[False], wanted, [False]])))
        batch = self.tiling.batch
        return [
            (at, min(batch, int(end) - at))
            for first, end in edges.reshape(-1, 2)
            for at in range(int(first), int(end), batch)
        ]

    def _places(self, sink: Sink) -> list[Bytes]:
        """The sink's own rows for a band whose results can go there at once. Not where results of
        the frame before lie there that are still needed.
        """
        if not isinstance(sink, Planes):
            return []
        if sink.planes is self._before and not self._wanted[self._band].all():
            return []
        count = range(len(self.format.roles))
        rows = [sink.place(i, *self._bands.out_span(self._band, i)) for i in count]
        return [] if any(r is None for r in rows) else [r for r in rows if r is not None]

    def _leave(self, source: Source, sink: Sink) -> None:
        """The band is done: its rows go to the sink."""
        band, wanted = self._band, self._wanted[self._band]
        made_by = self.made_by[band]
        made_by[:] = np.where(wanted, self._own, REUSED)
        if wanted.any():
            count = len(self.format.roles)
            planes = list(self._placed) or [self._bands.rows(band, i) for i in range(count)]
            self._check(source, planes, np.flatnonzero(wanted))
            kept: list[int] = np.flatnonzero(~wanted).tolist()
            for i, rows in enumerate(planes):
                begin, end = self._bands.out_span(band, i)
                for tile in kept:
                    own = self._bands.own(i, tile)
                    rows[:, own] = self._before[i][begin:end, own]
                if not self._placed:
                    sink.put(i, begin, rows)
        elif not (isinstance(sink, Planes) and sink.planes is self._before):
            for i in range(len(self.format.roles)):
                begin, end = self._bands.out_span(band, i)
                sink.put(i, begin, self._before[i][begin:end])
        self._band, self._todo = band + 1, None
        if self._band == self.tiling.bands:
            self._finish(source, sink)

    def _finish(self, source: Source, sink: Sink) -> None:
        self._source = self._sink = None
        self._before = ()
        if self._unchanged and isinstance(source, Planes) and isinstance(sink, Planes):
            good, wanted = self.made_by != INTERPOLATED, self._wanted
            if self._bands is not self._fine:  # then nothing is kept either
                wanted = good = np.ones((self._fine.tiling.bands, self._fine.tiling.columns), bool)
            self._unchanged.keep(source.planes, wanted, good)
            self._before = sink.planes

    @property
    def rows_done(self) -> int:
        """Luma rows of the enlarged frame that are done."""
        return min(self._bands.scale * self.tiling.th * self._band, self.out_format.height)

    def abandon(self) -> None:
        """Ends a frame whose other rows somebody else interpolates."""
        self.unsettled = False
        if self._source is None or self._sink is None:
            self.made_by[:] = INTERPOLATED
            self._before = ()
            return
        self._wanted[self._band :] = True
        self.made_by[self._band :] = INTERPOLATED
        self._finish(self._source, self._sink)

    def _check(self, source: Source, planes: list[Bytes], tiles: npt.NDArray[np.int64]) -> None:
        """Tiles that cannot be right are done anew, in `planes` and in the tile map."""
        begin, end, _, _ = self._bands.span(self._band, "y")
        depth, scale, width = self.format.depth, self._bands.scale, self.format.width
        low = samples(source.rows(0, begin, end), width, depth)
        starts = np.arange(self.tiling.columns) * self.tiling.tw

        def doubts() -> set[int]:
            high = samples(planes[0], scale * width, depth)
            return set(plain.implausible(low, high, starts, depth, scale))

        bad = doubts()
        if not bad:
            return
        bad &= set(tiles.tolist())
        if bad and self._placed and isinstance(self._sink, Planes) and self._sink.claims:
            # Mending takes longer than a claim holds: it is done elsewhere and put there.
            planes[:] = [p.copy() for p in planes]
            self._placed = []
        if bad and self._spare:
            done = self._spare.redo(self._band, source, sorted(bad), planes)
            self.made_by[self._band, done] = CPU
            bad &= doubts() | (bad - set(done))
        for tile in bad:
            self._interpolate(source, planes, tile)
            self.made_by[self._band, tile] = INTERPOLATED

    def _interpolate(self, source: Source, planes: list[Bytes], tile: int) -> None:
        """A tile of every plane by plain interpolation."""
        fmt, scale = self.format, self._bands.scale
        for i, role in enumerate(fmt.roles):
            begin, end, _, _ = self._bands.span(self._band, role)
            width, height = fmt.pixels(role)
            top, bottom = max(0, begin - FILTER_REACH), min(height, end + FILTER_REACH)
            step, tw = (2 if role == "pairs" else 1), self.tiling.tw
            tw = tw // 2 if role in ("half", "pairs") else tw
            near = samples(source.rows(i, top, bottom), width * step, fmt.depth)
            high = planes[i].view(near.dtype)
            siting = fmt.siting if role in ("half", "pairs") else "centre"
            cols = min(tw, width - tile * tw)
            for part in range(step):
                done = plain.enlarge(
                    near[:, part::step], begin - top, tile * tw, end - begin, cols, fmt.depth,
                    scale, siting,
                )  # fmt: skip
                place = high[:, scale * tile * tw * step + part :: step]
                place[:, : done.shape[1]] = done[: len(place), : place.shape[1]]

    def close(self) -> None:
        """Gives the device's memory back."""
        self._fine.close()
        self._coarse.close()
        if self._spare:
            self._spare.close()
        self._source = self._sink = None
        self._before = ()
