# SPDX-License-Identifier: Apache-2.0
"""A model on one device, ready to enlarge the bands of one format.

A band's rows go to the device as they lie in the frame, once; then any of its tiles are computed,
some a slice; its rows come back once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol

import numpy as np

from engine.backends.base import Array, Backend, Into
from engine.record import recorded
from engine.variants import allowed
from engine.video.frames import Bytes, FrameFormat
from engine.video.lowering import band_rows, lower
from engine.video.network import VideoModel
from engine.video.tiles import Tiling
from kernels import video
from kernels.contract import PARAM_WORDS


class Source(Protocol):
    """Where rows come from."""

    def rows(self, plane: int, begin: int, end: int) -> Bytes:
        """Rows begin..end-1 of a plane as uint8 [rows, stride of the format]; contiguous."""


class Looked(Mapping[str, Array | int]):
    """Outputs that may be brought while somebody says so: `still` raises when they may not be any
    more. Whoever brings them asks for them right before, and so asks it.
    """

    def __init__(self, into: Into, still: Callable[[], None]) -> None:
        self._into, self._still = into, still

    def __getitem__(self, name: str) -> Array | int:
        self._still()
        return self._into[name]

    def __iter__(self) -> Iterator[str]:
        self._still()
        return iter(self._into)

    def __len__(self) -> int:
        return len(self._into)


class Bands:
    """One band at a time: `load`, `run` for its tiles, `rows`."""

    def __init__(
        self, backend: Backend, model: VideoModel, fmt: FrameFormat, tiling: Tiling
    ) -> None:
        """Raises:
        InvalidArgument: the tiles do not fit the device.
        OutOfMemory, Quarantined: as record.recorded.
        """
        networks = self._networks = model.networks
        self.format, self.tiling, self.scale = fmt, tiling, networks.scale
        program, self.executable = recorded(
            backend, lambda: lower(networks, backend.info, fmt, tiling, allowed(backend)),
            model.weights,
        )  # fmt: skip
        self._apart = "planes" in program.sequences
        self._planes_done = False
        self._band = 0
        self._spans: dict[tuple[int, str], tuple[int, int, int, int]] = {}
        self._out = fmt.scaled(self.scale).planes()
        self._words = np.zeros(PARAM_WORDS, np.uint32)
        self._words[video.TILE] = tiling.tw * tiling.th

    def span(self, band: int, role: str) -> tuple[int, int, int, int]:
        """Of a band in a plane: its first row and the row after its last, the same of the rows that
        it is computed from.
        """
        found = self._spans.get((band, role))
        if found is None:
            rows, reach = band_rows(role, self.tiling), self._networks.reach(role)
            height = self.format.pixels(role)[1]
            begin = band * rows
            end = min(begin + rows, height)
            found = begin, end, max(0, begin - reach), min(height, end + reach)
            self._spans[band, role] = found
        return found

    def out_span(self, band: int, plane: int) -> tuple[int, int]:
        """The band's first row in an enlarged plane, and the row after its last."""
        begin, end, _, _ = self.span(band, self.format.roles[plane])
        return self.scale * begin, min(self.scale * end, self._out[plane].height)

    def own(self, plane: int, tile: int) -> slice:
        """The bytes of a row of an enlarged plane that are a tile's."""
        across = self.tiling.tw * self.format.sample_bytes * self.scale
        across //= 2 if self.format.roles[plane] == "half" else 1
        return slice(tile * across, (tile + 1) * across)

    def load(self, band: int, source: Source) -> None:
        """The band's rows to the device."""
        self._band = band
        w = self._words
        for i, role in enumerate(self.format.roles):
            begin, end, low, high = self.span(band, role)
            width, height = self.format.pixels(role)
            if role == "y":
                w[video.WIDTH], w[video.HEIGHT] = width, height
                w[video.BAND_Y], w[video.SRC_Y] = begin, low
            else:
                # The planes of a format that are not luma are all of one size: one set of words
                # serves them.
                w[video.C_WIDTH], w[video.C_HEIGHT] = width, height
                w[video.C_BAND_Y], w[video.C_SRC_Y], w[video.C_ROWS] = begin, low, end - begin
            self.executable.write(f"in{i}", source.rows(i, low, high))
        self._planes_done = not self._apart

    def run(
        self,
        column: int,
        count: int,
        into: Sequence[Bytes] = (),
        last: bool = False,
        still: Callable[[], None] | None = None,
    ) -> None:
        """A slice: `count` tiles (at most tiling.batch) from a column on; with a band's first slice
        also the planes that no tile has a part of. `into`: where the band's rows of each enlarged
        plane go then, as `rows` would give them, if `still` does not raise. `last`: it is the
        band's last slice.

        Raises:
            DeviceLost, OutOfMemory: as Executable.run. As `still`.
        """
        self._words[video.N_TILES], self._words[video.COL0] = count, column
        self.executable.write("params", self._words)
        outputs: Into = {f"out{i}": rows for i, rows in enumerate(into)}
        if outputs and still is not None:
            outputs = Looked(outputs, still)
        if last and not outputs:
            planes = range(len(self._out))
            outputs = {f"out{i}": self._nbytes(self._band, i) for i in planes}
        if self._planes_done:
            self.executable.run("tiles", into=outputs)
        else:
            self.executable.run("tiles", "planes", into=outputs)
            self._planes_done = True

    def fetch(self, into: Sequence[Bytes]) -> None:
        """The band's rows of each enlarged plane, as `run` has them, in a slice of their own.

        Raises:
            DeviceLost: as Executable.run.
        """
        self.executable.fetch({f"out{i}": rows for i, rows in enumerate(into)})

    def rows(self, band: int, plane: int) -> Bytes:
        """The band's rows of an enlarged plane [rows, stride], until the next slice. Where no tile
        was computed they mean nothing.
        """
        found = self.executable.look(f"out{plane}", self._nbytes(band, plane))
        return found.reshape(-1, self._out[plane].stride)

    def _nbytes(self, band: int, plane: int) -> int:
        first, last = self.out_span(band, plane)
        return (last - first) * self._out[plane].stride

    def close(self) -> None:
        """Gives the device's memory back."""
        self.executable.close()
