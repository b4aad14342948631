# SPDX-License-Identifier: Apache-2.0
"""One picture, from file to file, in slices: luma by the network, chroma at full size by the
learned filter, alpha plainly. Networks of three channels see red, green and blue as they are.

Inside, planes have 16 bits, so that the way through YCbCr costs an 8-bit picture nothing. Decoding
and JPEG encoding run on a thread of their own, without the GIL, so that the caller's loop stays
alive; everything else is done band by band.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt

from engine import memory
from engine.backends.base import Backend, Executable
from engine.errors import InvalidArgument
from engine.video import picture_files
from engine.video.chain import Enlarger, between_nbytes, choose, size_of, sizes
from engine.video.frames import Bytes, FrameFormat, samples
from engine.video.kinds import Model, matrix_for
from engine.video.picture_files import Picture, PngWriter

F32 = npt.NDArray[np.float32]
T = TypeVar("T")

FORMATS = ("png", "jpeg")
WAIT_S = 0.02  # a slice that waits for the thread ends after so long
PIECE = 1 << 18  # pixels of the result that a slice makes and packs

# BT.601, limited range, on a scale of 0..255 (what the network was trained on): rows Y, Cb, Cr of
# R, G, B.
_TO_YCC = (
    np.array(
        [[65.481, 128.553, 24.966], [-37.797, -74.203, 112.0], [112.0, -93.786, -18.214]],
        np.float64,
    )
    / 255
)
_OFFSET = np.array([16.0, 128.0, 128.0])
_TO_RGB = np.linalg.inv(_TO_YCC)
_DEEP = 257.0  # 16-bit samples: 255 is 65535


class _Threaded(Generic[T]):
    """A function on a thread, its result awaited in slices."""

    def __init__(self, work: Callable[[], T]) -> None:
        self._work = work
        self._value: list[T] = []
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._value.append(self._work())
        except BaseException as e:
            self._error = e

    def wait(self) -> Iterator[None]:
        """Yields until the thread is done; `value` follows."""
        while self._thread.is_alive():
            self._thread.join(WAIT_S)
            yield

    @property
    def value(self) -> T:
        if self._error is not None:
            raise self._error
        return self._value.pop()


class _Rows:
    """Source of a picture's planes: rows are taken to YCbCr (or gray, or left red, green and blue)
    and alpha of 16 bits as they are asked for.
    """

    def __init__(self, pixels: npt.NDArray[Any], fmt: FrameFormat) -> None:
        self._pixels = pixels
        self._strides = [p.stride for p in fmt.planes()]
        self._scale = 1.0 if pixels.dtype == np.uint8 else 1 / _DEEP
        self._colours = 3 if pixels.shape[2] >= 3 and fmt.matrix != "rgb" else 1

    def rows(self, plane: int, begin: int, end: int) -> Bytes:
        part = self._pixels[begin:end]
        if plane < self._colours == 3:
            weights = (_TO_YCC[plane] * self._scale).astype(np.float32)
            value = part[:, :, :3].astype(np.float32) @ weights + np.float32(_OFFSET[plane])
        else:
            value = part[:, :, plane].astype(np.float32) * np.float32(self._scale)
        out = np.zeros((end - begin, self._strides[plane]), np.uint8)
        samples(out, part.shape[1], 16)[:] = value * np.float32(_DEEP) + np.float32(0.5)
        return out


class _Band:
    """Sink: keeps the planes of the band that was done last; `pieces` makes pixels of them."""

    def __init__(self, fmt: FrameFormat, deep: bool) -> None:
        self._width = fmt.width
        self._colour = fmt.pixel.startswith("i444") and fmt.matrix != "rgb"
        self._deep = deep
        self._begin = 0
        self._planes: list[npt.NDArray[np.uint16]] = []

    def put(self, plane: int, begin: int, rows: Bytes) -> None:
        self._begin = begin
        self._planes.append(samples(rows, self._width, 16))

    def pieces(self) -> Iterator[tuple[int, npt.NDArray[Any]]]:
        """First row and pixels [n, width, channels], some rows at a time; the band is used up."""
        planes, self._planes = self._planes, []
        rows = len(planes[0]) if planes else 0
        step = max(1, PIECE // self._width)
        for at in range(0, rows, step):
            yield self._begin + at, self._pixels([p[at : at + step] for p in planes])

    def _pixels(self, planes: list[npt.NDArray[np.uint16]]) -> npt.NDArray[Any]:
        channels = [p.astype(np.float32) / np.float32(_DEEP) for p in planes]
        if self._colour:
            ycc = [channels[i] - np.float32(_OFFSET[i]) for i in range(3)]
            k = _TO_RGB.astype(np.float32)
            rgb = [k[c, 0] * ycc[0] + k[c, 1] * ycc[1] + k[c, 2] * ycc[2] for c in range(3)]
            channels = [*rgb, *channels[3:]]
        top, dtype = (_DEEP, np.uint16) if self._deep else (1.0, np.uint8)
        out = np.stack(channels, axis=2)
        np.clip(out, 0, 255, out=out)
        return (out * np.float32(top) + np.float32(0.5)).astype(dtype)


class PictureJob:
    """Enlarges one PNG or JPEG. `step` until it says True; then `parts` (bytes of the result, in
    order) and `info`.
    """

    def __init__(
        self,
        backend: Backend,
        models: Sequence[Model],
        data: bytes,
        settings: Mapping[str, Any],
    ) -> None:
        """models: of one family. settings: scale (2), or width and height of the result; format png
        or jpeg ("": as the source), tile.

        Raises:
            InvalidArgument: no picture, too large, or settings that make no sense.
            OutOfMemory: with figures.
        """
        wanted = str(settings.get("format", "") or "").lower().replace("jpg", "jpeg")
        if wanted and wanted not in FORMATS:
            raise InvalidArgument(f"Pictures are written as png or jpeg, not {wanted}.")
        self._head = picture_files.header(data)
        self.format = wanted or self._head.format
        fmt = FrameFormat(self._head.width, self._head.height, "i444a", 16, "centre", True)
        asked = (int(settings.get(side) or 0) for side in ("width", "height"))
        self.width, self.height = size_of(fmt, float(settings.get("scale") or 2), *asked)
        out = fmt.sized(self.width, self.height)
        self._models = choose(models, fmt, out)
        self._tile = int(settings.get("tile", 0) or 0)
        # Up to 4 channels in; a JPEG's pixels are held as a whole before they are encoded.
        pixels = self._head.width * self._head.height
        need = {"picture": pixels * (8 if self._head.deep else 4) + len(data)}
        need["frames between"] = between_nbytes(sizes(self._models, fmt, out))
        if self.format == "jpeg":
            need["result"] = 2 * 3 * self.width * self.height
        memory.admit(need)
        self._backend, self._data = backend, data
        self._pipeline: Enlarger | None = None
        self._done, self._slices = 0, 0
        self.parts: list[bytes] = []
        self.made_by = np.zeros((0, 0), np.uint8)
        self.tile_size = (0.0, 0.0)
        self.tiles = self.tiles_cpu = self.tiles_fallback = 0
        self._work = self._run()

    @property
    def executable(self) -> Executable | None:
        """What it computes with, as soon as there is one."""
        return self._pipeline.executable if self._pipeline is not None else None

    def step(self) -> bool:
        """One slice. True when the result is there.

        Raises:
            InvalidArgument: damaged or cut short, or transparent and to become a JPEG.
            DeviceLost, OutOfMemory: as VideoPipeline.step.
        """
        try:
            next(self._work)
        except StopIteration:
            return True
        except BaseException:
            self.close()
            raise
        return False

    @property
    def progress(self) -> tuple[int, int]:
        """Slices done and in all (0 in all: the picture is still being decoded)."""
        return self._done, self._slices

    @property
    def nbytes(self) -> int:
        """Of the result so far."""
        return sum(len(p) for p in self.parts)

    @property
    def info(self) -> dict[str, Any]:
        """width, height and format of the result, its bytes, tiles, tiles_cpu, tiles_fallback."""
        return {
            "width": self.width,
            "height": self.height,
            "format": self.format,
            "bytes": self.nbytes,
            "tiles": self.tiles,
            "tiles_cpu": self.tiles_cpu,
            "tiles_fallback": self.tiles_fallback,
        }

    def encoded(self) -> bytes:
        """The result."""
        return b"".join(self.parts)

    def close(self) -> None:
        """Gives the device's memory back; the result stays."""
        if self._pipeline is not None:
            self._pipeline.close()
            self._pipeline = None
        self._data = b""

    def _run(self) -> Iterator[None]:
        data = self._data
        decoding = _Threaded(lambda: picture_files.decode(data))
        yield from decoding.wait()
        picture = decoding.value
        channels = picture.pixels.shape[2]
        if self.format == "jpeg" and channels in (2, 4):
            raise InvalidArgument("A JPEG cannot be transparent: ask for png.")
        if self.format == "png":
            deep = picture.pixels.dtype == np.uint16
            writer = PngWriter(self.width, self.height, channels, 16 if deep else 8, picture)
            self.parts = writer.parts
            yield from self._enlarge(picture, deep, lambda _, rows: writer.rows(rows))
            writer.finish()
        else:
            result = np.empty((self.height, self.width, channels), np.uint8)

            def take(begin: int, rows: npt.NDArray[Any]) -> None:
                result[begin : begin + len(rows)] = rows

            yield from self._enlarge(picture, False, take)
            encoding = _Threaded(lambda: picture_files.jpeg(result, picture))
            yield from encoding.wait()
            self.parts = [encoding.value]
        self.close()

    def _enlarge(
        self, picture: Picture, deep: bool, take: Callable[[int, npt.NDArray[Any]], None]
    ) -> Iterator[None]:
        height, width, channels = picture.pixels.shape
        pixel = {1: "gray", 2: "graya", 3: "i444", 4: "i444a"}[channels]
        fmt = FrameFormat(width, height, pixel, 16, "centre", True, matrix_for(self._models))
        out = fmt.sized(self.width, self.height)
        pipeline = Enlarger(self._backend, self._models, fmt, out, self._tile)
        self._pipeline, self.tile_size = pipeline, pipeline.tile_size
        self._slices = pipeline.slices
        band = _Band(pipeline.out_format, deep)
        pipeline.begin(_Rows(picture.pixels, fmt), band)
        finished = False
        while not finished:
            finished = pipeline.step()
            self._done += 1
            self.tiles, self.made_by = pipeline.tiles, pipeline.made_by
            self.tiles_cpu, self.tiles_fallback = pipeline.tiles_cpu, pipeline.tiles_fallback
            yield
            for begin, rows in band.pieces():
                take(begin, rows)
                yield
