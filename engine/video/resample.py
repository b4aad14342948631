# SPDX-License-Identifier: Apache-2.0
"""Frames to any other size by filters alone: the last step to a size that no network gives, and
what a frame gets for which there is no time.

Both axes are filtered on their own. Of `lanczos` the kernel is Lanczos' of three lobes, of `cubic`
Keys' with a = -1/2; where the result is smaller the kernel is as much wider, so that nothing
aliases. Sample centres keep their place in the picture; so does 4:2:0 chroma of either siting.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from engine.backends.base import Backend, Executable
from engine.errors import InvalidArgument
from engine.program import Binding, Buffer, Call, Program
from engine.record import recorded
from engine.variants import allowed, choose
from engine.video.bands import Source
from engine.video.frames import Bytes, FrameFormat
from engine.video.upscale import Sink, as_planes
from kernels import op as contract_of
from kernels import video
from kernels.contract import PARAM_WORDS
from kernels.resample.op import table

Floats = npt.NDArray[np.float64]

BAND_ROWS = 256  # of the result, an even count; a slice each


def _lanczos(x: Floats) -> Floats:
    out: Floats = np.where(np.abs(x) < 3, np.sinc(x) * np.sinc(x / 3), 0.0)
    return out


def _cubic(x: Floats) -> Floats:
    x = np.abs(x)
    near, far = 1.5 * x**3 - 2.5 * x**2 + 1, -0.5 * x**3 + 2.5 * x**2 - 4 * x + 2
    out: Floats = np.where(x <= 1, near, np.where(x < 2, far, 0.0))
    return out


KERNELS: Mapping[str, tuple[Callable[[Floats], Floats], int]] = {
    "lanczos": (_lanczos, 3),
    "cubic": (_cubic, 2),
}


@dataclass(frozen=True)
class Axis:
    """For each place of the result the first sample [n] and the weights [n, taps] of those from
    there on; all lie inside of the input.
    """

    at: npt.NDArray[np.int64]
    weights: npt.NDArray[np.float32]

    @property
    def taps(self) -> int:
        return int(self.weights.shape[1])

    @property
    def words(self) -> npt.NDArray[np.uint32]:
        """As kernels/resample reads them."""
        found: npt.NDArray[np.uint32] = table(self.at, self.weights)
        return found


def axis(size: int, out: int, centres: Floats, ratio: float, kernel: str) -> Axis:
    """The filters that take `size` samples to `out`, whose centres lie at these places of the
    input's samples. ratio: samples of the input for one of the result.
    """
    shape, lobes = KERNELS[kernel]
    wide = max(1.0, ratio)
    taps = 2 * math.ceil(lobes * wide)
    first = np.floor(centres).astype(np.int64) - taps // 2 + 1
    places = first[:, None] + np.arange(taps)
    weights = shape((places - centres[:, None]) / wide)
    weights /= weights.sum(axis=1, keepdims=True)
    # Beyond the border its sample repeats: it gets the weights of all that lie there.
    kept = min(taps, size)
    at = np.clip(first, 0, size - kept)
    column = np.clip(places, 0, size - 1) - at[:, None]
    folded = np.zeros((out, kept))
    np.add.at(folded, (np.arange(out)[:, None], column), weights)
    return Axis(at, folded.astype(np.float32))


def axes(fmt: FrameFormat, out: FrameFormat, role: str, kernel: str) -> tuple[Axis, Axis]:
    """The filters down and across for a plane."""
    found = []
    for across in (False, True):
        luma_in, luma_out = (f.width if across else f.height for f in (fmt, out))
        size, count = (f.pixels(role)[0 if across else 1] for f in (fmt, out))
        ratio, place = luma_in / luma_out, np.arange(count, dtype=np.float64)
        if role not in ("half", "pairs"):
            centres = (place + 0.5) * ratio - 0.5
        elif across and fmt.siting == "left":
            centres = ((2 * place + 0.5) * ratio - 0.5) / 2
        else:
            centres = ((2 * place + 1) * ratio - 1) / 2
        found.append(axis(size, count, centres, ratio, kernel))
    return found[0], found[1]


class Resampler:
    """Takes frames of one format to another of the same kind. As VideoPipeline: `begin`, then
    `step` until it says True.
    """

    def __init__(
        self, backend: Backend, fmt: FrameFormat, out: FrameFormat, kernel: str = "lanczos"
    ) -> None:
        """Raises:
        InvalidArgument: a band does not fit the device's largest binding.
        OutOfMemory, Quarantined: as record.recorded.
        """
        self.format, self.out_format = fmt, out
        self._in, self._out = fmt.planes(), out.planes()
        self._axes = {role: axes(fmt, out, role, kernel) for role in dict.fromkeys(fmt.roles)}
        self._rows = min(BAND_ROWS, out.height + out.height % 2)
        self._weights = backend.weights(
            {
                f"{name}.{role}": axis.words.reshape(-1).view(np.uint8)
                for role, pair in self._axes.items()
                for name, axis in zip(("down", "across"), pair, strict=True)
            }
        )
        _, self._exe = recorded(backend, lambda: self._program(backend), self._weights)
        self._words = np.zeros(PARAM_WORDS, np.uint32)
        self._source: Source | None = None
        self._sink: Sink | None = None
        self._row = 0

    def _band(self, plane: int, row: int) -> tuple[int, int, int, int]:
        """Of the band from luma row `row` on of the result: its rows in a plane (first, after the
        last), and the rows that they are made of.
        """
        role = self.out_format.roles[plane]
        part = 2 if role in ("half", "pairs") else 1
        down = self._axes[role][0]
        begin = row // part
        end = min(begin + self._rows // part, self._out[plane].height)
        return begin, end, int(down.at[begin:end].min()), int(down.at[begin:end].max()) + down.taps

    def _program(self, backend: Backend) -> Program:
        contract, limits = contract_of("resample"), backend.info.limits
        variant = choose(contract, backend.info, None, allowed(backend))
        buffers = {"params": Buffer("params", 4 * PARAM_WORDS, "params")}
        calls = []
        for i, role in enumerate(self.format.roles):
            spans = [self._band(i, row) for row in range(0, self.out_format.height, 2)]
            down, across = self._axes[role]
            sizes = {
                f"in{i}": max(high - low for _, _, low, high in spans) * self._in[i].stride,
                f"out{i}": max(end - begin for begin, end, _, _ in spans) * self._out[i].stride,
                f"down.{role}": down.words.nbytes,
                f"across.{role}": across.words.nbytes,
            }
            kinds = ("input", "output", "weight", "weight")
            for (name, nbytes), kind in zip(sizes.items(), kinds, strict=True):
                if nbytes > limits.max_storage_range:
                    raise InvalidArgument(f"{nbytes >> 20} MiB do not fit the device's bindings.")
                buffers[name] = Buffer(name, nbytes, kind)  # type: ignore[arg-type]
            step = 2 if role == "pairs" else 1
            push = {
                "bits": self.format.depth,
                "step": step,
                "plane": video.WIDTH if role == "y" else video.C_WIDTH,
                "stride": self._in[i].stride // 4,
                "out_stride": self._out[i].stride // 4,
                "width": self._out[i].width // step,
                "taps_down": down.taps,
                "taps_across": across.taps,
                "rows": self._rows,
            }
            most = limits.max_workgroup_count
            groups = contract.groups({**push, "tokens": 1, "most": most}, variant)
            names = (f"in{i}", f"down.{role}", f"across.{role}", f"out{i}")
            bindings = tuple(Binding(name) for name in names)
            calls.append(Call("resample", variant.name, bindings, contract.pack(**push), groups))
        program = Program(buffers, {"band": tuple(calls)})
        program.check()
        return program

    @property
    def executable(self) -> Executable:
        """What it computes with."""
        return self._exe

    @property
    def slices(self) -> int:
        """Slices of a frame."""
        return -(-self.out_format.height // self._rows)

    def begin(
        self, src: Sequence[Bytes] | Source, dst: Sequence[Bytes] | Sink, row: int = 0
    ) -> None:
        """A new frame; one that was under way is given up. row: the first luma row of the result
        that is wanted, even.

        Raises:
            InvalidArgument: the planes are not those of the formats.
        """
        nbytes = self.format.sample_bytes
        self._source = as_planes(src, self._in, nbytes) if isinstance(src, Sequence) else src
        self._sink = as_planes(dst, self._out, nbytes) if isinstance(dst, Sequence) else dst
        self._row = row

    def step(self) -> bool:
        """One slice. True when the frame is done (again and again after that).

        Raises:
            DeviceLost, OutOfMemory: as Executable.run.
        """
        if self._source is None or self._sink is None:
            return True
        w = self._words
        for i, role in enumerate(self.format.roles):
            begin, end, low, high = self._band(i, self._row)
            at = video.WIDTH if role == "y" else video.C_WIDTH
            w[at : at + 5] = (*self.format.pixels(role), begin, low, end - begin)
            self._exe.write(f"in{i}", self._source.rows(i, low, high))
        self._exe.write("params", w)
        self._exe.run("band")
        for i, plane in enumerate(self._out):
            begin, end, _, _ = self._band(i, self._row)
            rows = self._exe.look(f"out{i}", (end - begin) * plane.stride)
            self._sink.put(i, begin, rows.reshape(-1, plane.stride))
        self._row += self._rows
        if self._row < self.out_format.height:
            return False
        self._source = self._sink = None
        return True

    def close(self) -> None:
        """Gives the device's memory back."""
        self._exe.close()
        self._weights.close()
        self._source = self._sink = None
