# SPDX-License-Identifier: Apache-2.0
"""Frames to any size: networks one after the other, then, where they give more than is wanted or
another shape, a filter. Between two steps a frame lies in host memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations_with_replacement
from math import prod

import numpy as np
import numpy.typing as npt

from engine import memory
from engine.backends.base import Backend, Executable
from engine.backends.cpu import CpuBackend
from engine.errors import InvalidArgument
from engine.pace import clock
from engine.video.bands import Source
from engine.video.frames import Bytes, FrameFormat, empty
from engine.video.kinds import Model, Pipeline, pipeline
from engine.video.resample import Resampler
from engine.video.upscale import INTERPOLATED, NOBODY, Sink, VideoPipeline

TRIAL_S = 0.1  # after which a trial is reckoned from what was done
MOST = 8  # times as wide or high a result may be as what it is made of


def check_size(fmt: FrameFormat, out: FrameFormat) -> None:
    """Raises InvalidArgument for a size that frames of a format are not taken to."""
    sides = ((fmt.width, out.width), (fmt.height, out.height))
    if not all(small <= large <= MOST * small for small, large in sides):
        raise InvalidArgument(
            f"{fmt.width}x{fmt.height} cannot become {out.width}x{out.height}: each side has to be"
            f" 1 to {MOST} times as long."
        )


def size_of(fmt: FrameFormat, scale: float, width: int = 0, height: int = 0) -> tuple[int, int]:
    """The size that is asked for: a width and a height, or (0) so many times that of the frame.

    Raises:
        InvalidArgument: only one side is given, or check_size.
    """
    if bool(width) != bool(height):
        raise InvalidArgument("Width and height are given together.")
    if not width:
        width, height = (max(1, int(scale * side + 0.5)) for side in (fmt.width, fmt.height))
    check_size(fmt, fmt.sized(width, height))
    return width, height


def choose(models: Sequence[Model], fmt: FrameFormat, out: FrameFormat) -> list[Model]:
    """The models, from a family of several scales, that take frames to a size one after the other:
    as few as can be, then as little too large as can be, the smaller scale first, since it costs
    less there. Where none reach it, those that come nearest.
    """
    ratio = max(out.width / fmt.width, out.height / fmt.height)
    by_scale = sorted({m.scale: m for m in reversed(models)}.items())
    chains = [c for n in (1, 2, 3) for c in combinations_with_replacement(by_scale, n)]

    def rank(chain: tuple[tuple[int, Model], ...]) -> tuple[bool, float, int]:
        product = prod(scale for scale, _ in chain)
        if product < ratio:
            return True, -product, 0
        return False, len(chain), product

    return [model for _, model in min(chains, key=rank)]


def sizes(models: Sequence[Model], fmt: FrameFormat, out: FrameFormat) -> list[FrameFormat]:
    """The formats of a frame on its way, the first and the last one included."""
    found = [fmt]
    for model in models:
        found.append(found[-1].scaled(model.scale))
    if (found[-1].width, found[-1].height) != (out.width, out.height):
        found.append(out)
    return found


def between_nbytes(formats: Sequence[FrameFormat]) -> int:
    """Bytes of the frames that lie between two steps."""
    return sum(p.nbytes for fmt in formats[1:-1] for p in fmt.planes())


def _trial_s(step: Pipeline | Resampler) -> float:
    """Seconds that a frame takes: a whole one, or what comes of it within TRIAL_S."""
    source, target = empty(step.format), empty(step.out_format)
    step.begin(source, target)
    step.step()  # warms up
    if not isinstance(step, Resampler):
        step.abandon()
        step.abandon()
    step.begin(source, target)
    began, count = clock(), 0
    while True:
        done, count = step.step(), count + 1
        took = clock() - began
        if done:
            return took
        if took > TRIAL_S:
            rows = 0 if isinstance(step, Resampler) else step.rows_done
            return took / max(rows / step.out_format.height, count / step.slices)


class Enlarger:
    """Enlarges frames by `models` in turn, to the size of `out`. As VideoPipeline: `begin`, then
    `step` until it says True. Counts are those of all networks, `made_by` the last one's.
    """

    def __init__(
        self,
        backend: Backend,
        models: Sequence[Model],
        fmt: FrameFormat,
        out: FrameFormat,
        tile: int = 0,
        overlap: int = 0,
        unchanged: str = "off",
    ) -> None:
        """Raises:
        InvalidArgument: no model, or a size, tile or overlap that makes no sense.
        OutOfMemory, Quarantined: as record.recorded.
        """
        if not models:
            raise InvalidArgument("A frame is enlarged by one model at least.")
        check_size(fmt, out)
        formats = sizes(models, fmt, out)
        memory.admit({"frames between": between_nbytes(formats)})
        self.format, self.out_format = fmt, out
        self._backend = backend
        self._networks: list[Pipeline] = []
        self._resampler: Resampler | None = None
        self._quick: Resampler | None = None
        try:
            for model, given in zip(models, formats, strict=False):
                options = (tile, overlap, unchanged)
                self._networks.append(pipeline(backend, model, given, *options))
            if len(formats) > len(models) + 1:
                self._resampler = Resampler(backend, formats[-2], out)
        except BaseException:
            self.close()
            raise
        self._steps: list[Pipeline | Resampler] = [*self._networks]
        if self._resampler is not None:
            self._steps.append(self._resampler)
        self._between = [empty(given) for given in formats[1:-1]]
        self._at = len(self._steps)
        self._source: Sequence[Bytes] | Source = ()
        self._sink: Sequence[Bytes] | Sink = ()

    @property
    def executable(self) -> Executable:
        """What it computes with now."""
        return self._steps[min(self._at, len(self._steps) - 1)].executable

    @property
    def slices(self) -> int:
        """Slices of a frame in which every tile is computed."""
        return sum(step.slices for step in self._steps)

    @property
    def frame_tiles(self) -> int:
        """Tiles of a frame."""
        return sum(network.tiling.tiles for network in self._networks)

    @property
    def tiles(self) -> int:
        return sum(network.tiles for network in self._networks)

    @property
    def tiles_reused(self) -> int:
        return sum(network.tiles_reused for network in self._networks)

    @property
    def tiles_cpu(self) -> int:
        return sum(network.tiles_cpu for network in self._networks)

    @property
    def tiles_fallback(self) -> int:
        return sum(network.tiles_fallback for network in self._networks)

    @property
    def made_by(self) -> npt.NDArray[np.uint8]:
        """[bands, columns] of the last network: who made each tile (letters of upscale)."""
        return self._networks[-1].made_by

    @property
    def tile_size(self) -> tuple[float, float]:
        """Width and height of such a tile in pixels of the result."""
        last = self._networks[-1]
        wide = last.tiling.tw * self.out_format.width / last.format.width
        return wide, last.tiling.th * self.out_format.height / last.format.height

    @property
    def part(self) -> float:
        """How much of the frame is done, about: 0..1."""
        if self._at >= len(self._steps):
            return 1.0
        inside = 0.0
        if self._at < len(self._networks):
            network = self._networks[self._at]
            inside = network.rows_done / network.out_format.height
        return (self._at + inside) / len(self._steps)

    def forget(self) -> None:
        """Gives up a frame that is under way, and what the last one left to reuse."""
        for network in self._networks:
            network.abandon()  # this may end a frame, the next one forgets its results
            network.abandon()
        self._at = len(self._steps)

    def trial(self) -> float:
        """Seconds that a frame takes, by a trial of each step. No frame may be under way.

        Raises:
            DeviceLost, OutOfMemory, Suspect: as Executable.run.
        """
        took = sum(_trial_s(step) for step in self._steps)
        self.forget()
        return took

    def begin(self, src: Sequence[Bytes] | Source, dst: Sequence[Bytes] | Sink) -> None:
        """A new frame; one that was under way is given up.

        Raises:
            InvalidArgument: the planes are not those of the formats.
        """
        self._source, self._sink = src, dst
        self._enter(0)

    def _enter(self, at: int) -> None:
        self._at = at
        if at < len(self._steps):
            src = self._between[at - 1] if at else self._source
            dst = self._between[at] if at + 1 < len(self._steps) else self._sink
            self._steps[at].begin(src, dst)

    def step(self) -> bool:
        """One slice. True when the frame is done (again and again after that).

        Raises:
            DeviceLost, OutOfMemory: as Executable.run.
        """
        if self._at < len(self._steps) and self._steps[self._at].step():
            self._enter(self._at + 1)
        return self._at >= len(self._steps)

    @property
    def later(self) -> bool:
        """As VideoPipeline; only where a network of its kind is the last step."""
        last = self._steps[-1]
        return isinstance(last, VideoPipeline) and last.later

    @later.setter
    def later(self, on: bool) -> None:
        if isinstance(last := self._steps[-1], VideoPipeline):
            last.later = on

    @property
    def unsettled(self) -> bool:
        """As VideoPipeline."""
        last = self._steps[-1]
        return isinstance(last, VideoPipeline) and last.unsettled

    def settle(self) -> None:
        """As VideoPipeline."""
        if isinstance(last := self._steps[-1], VideoPipeline):
            last.settle()

    def finish_plainly(self) -> None:
        """The rest of a frame that came as planes by plain interpolation on the CPU, at once."""
        if self._quick is None:
            own = self._backend if self._backend.info.kind == "cpu" else CpuBackend()
            self._quick = Resampler(own, self.format, self.out_format, "cubic")
        row = self._networks[0].rows_done if len(self._steps) == 1 else 0
        for network in self._networks[self._at :]:
            network.abandon()
        self._at = len(self._steps)
        self._quick.begin(self._source, self._sink, row)
        while not self._quick.step():
            pass

    def close(self) -> None:
        """Gives the device's memory back."""
        for step in (*self._networks, self._resampler, self._quick):
            if step is not None:
                step.close()


class Plain:
    """Frames by plain interpolation alone, on the CPU whatever the device. As Enlarger."""

    later = unsettled = False

    def __init__(self, backend: Backend, fmt: FrameFormat, out: FrameFormat) -> None:
        """Raises:
        InvalidArgument: a size that makes no sense.
        OutOfMemory
        """
        check_size(fmt, out)
        self.format, self.out_format = fmt, out
        own = backend if backend.info.kind == "cpu" else CpuBackend()
        self._step = Resampler(own, fmt, out, "cubic")
        self.made_by = np.full((1, 1), NOBODY, np.uint8)
        self.tile_size = float(out.width), float(out.height)
        self.frame_tiles = self.slices = 1
        self.tiles_reused = self.tiles_cpu = 0
        self.part = 0.0

    @property
    def executable(self) -> Executable:
        """What it computes with."""
        return self._step.executable

    @property
    def tiles(self) -> int:
        return int(np.count_nonzero(self.made_by))

    @property
    def tiles_fallback(self) -> int:
        return self.tiles

    def begin(self, src: Sequence[Bytes] | Source, dst: Sequence[Bytes] | Sink) -> None:
        """A new frame; one that was under way is given up."""
        self._step.begin(src, dst)
        self.made_by[:] = NOBODY

    def step(self) -> bool:
        """One slice. True when the frame is done."""
        if done := self._step.step():
            self.made_by[:] = INTERPOLATED
        return done

    def finish_plainly(self) -> None:
        """The rest of the frame at once."""
        while not self.step():
            pass

    def settle(self) -> None:
        """Nothing is left for later."""

    def forget(self) -> None:
        """Nothing is kept from frame to frame."""

    def trial(self) -> float:
        """Seconds that a frame takes, by a trial."""
        return _trial_s(self._step)

    def close(self) -> None:
        """Gives the memory back."""
        self._step.close()
