# SPDX-License-Identifier: Apache-2.0
"""PNG and JPEG files: pixels and what has to stay with them (ICC profile, EXIF, resolution), read
and written.

Pillow reads and writes JPEG and reads 8-bit PNG; pypng reads 16-bit PNG, which Pillow cannot hold
in colour. PNG is written here, rows as they come, so that a large result is never in memory as a
whole.
"""

from __future__ import annotations

import io
import struct
import warnings
import zlib
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import png
from PIL import Image, UnidentifiedImageError

from engine.errors import InvalidArgument

Pixels = npt.NDArray[Any]

MAX_PIXELS = 1 << 26  # of an input: 8192 x 8192
JPEG_QUALITY = 95
PNG_MAGIC = b"\x89PNG\r\n\x1a\n"
ZLIB_LEVEL = 4
# Chunks of a PNG that go along as they are: colour, EXIF, resolution.
_KEPT = (b"iCCP", b"sRGB", b"gAMA", b"cHRM", b"cICP", b"pHYs", b"eXIf")
_EXIF_PREFIX = b"Exif\0\0"
_BAD = (OSError, SyntaxError, ValueError, EOFError, struct.error, zlib.error, png.Error, KeyError)


@dataclass(frozen=True)
class Header:
    """What the beginning of a file says. format: png or jpeg."""

    format: str
    width: int
    height: int
    deep: bool  # 16 bits a sample


@dataclass
class Picture:
    """pixels [height, width, 1 gray | 2 gray, alpha | 3 RGB | 4 RGB, alpha], uint8 or uint16."""

    pixels: Pixels
    icc: bytes | None = None
    exif: bytes | None = None  # without the prefix that JPEG puts before it
    dpi: tuple[float, float] | None = None
    chunks: list[tuple[bytes, bytes]] = field(default_factory=list)  # of a PNG, to be kept


def _open(data: bytes) -> Image.Image:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            return Image.open(io.BytesIO(data), formats=("PNG", "JPEG", "MPO"))
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        raise InvalidArgument(
            f"The picture is larger than {MAX_PIXELS >> 20} megapixels."
        ) from None
    except (UnidentifiedImageError, *_BAD, Warning):
        raise InvalidArgument("The file is no PNG or JPEG picture, or a damaged one.") from None


def header(data: bytes) -> Header:
    """Reads the beginning of a file; no pixels are decoded.

    Raises:
        InvalidArgument: neither PNG nor JPEG, damaged, or larger than MAX_PIXELS.
    """
    with _open(data) as image:
        width, height = image.size
        kind = "png" if image.format == "PNG" else "jpeg"
    if width * height > MAX_PIXELS:
        raise InvalidArgument(
            f"The picture of {width}x{height} is larger than {MAX_PIXELS >> 20} megapixels."
        )
    return Header(kind, width, height, kind == "png" and data[24:25] == b"\x10")


def decode(data: bytes) -> Picture:
    """The whole picture. Palettes and transparent colours become RGB or gray with alpha, CMYK
    becomes RGB.

    Raises:
        InvalidArgument: damaged or cut short.
    """
    head = header(data)
    try:
        chunks = _chunks(data) if head.format == "png" else []
        if head.deep:
            return Picture(_deep_pixels(data), chunks=chunks)
        with _open(data) as image:
            image.load()
            picture = Picture(_pixels(image), chunks=chunks)
            if head.format == "jpeg":
                exif = image.info.get("exif")
                picture.exif = exif.removeprefix(_EXIF_PREFIX) if exif else None
                picture.dpi = image.info.get("dpi")
            # A CMYK profile says nothing of the RGB that comes out.
            picture.icc = None if image.mode in ("CMYK", "YCCK") else image.info.get("icc_profile")
            if head.format == "png":
                picture.exif = next((d for t, d in chunks if t == b"eXIf"), None)
                picture.dpi = image.info.get("dpi")
            return picture
    except _BAD:
        raise InvalidArgument("The picture is damaged or cut short.") from None


def _pixels(image: Image.Image) -> Pixels:
    clear = "transparency" in image.info
    if image.mode in ("1", "L"):
        image = image.convert("LA" if clear else "L")
    elif image.mode in ("LA", "La"):
        image = image.convert("LA")
    elif image.mode in ("RGBA", "RGBa", "PA") or clear:
        image = image.convert("RGBA")
    else:
        image = image.convert("RGB")
    a = np.asarray(image)
    return a[:, :, None] if a.ndim == 2 else a


def _deep_pixels(data: bytes) -> Pixels:
    width, height, rows, info = png.Reader(bytes=data).read()
    planes = int(info["planes"])
    out = np.empty((height, width, planes), np.uint16)
    count = 0
    for row in rows:
        out[count] = np.asarray(row, np.uint16).reshape(width, planes)
        count += 1
    if count != height:
        raise ValueError("rows are missing")
    clear = info.get("transparent")
    if clear is not None and planes in (1, 3):
        # pypng gives the transparent colour as one number or three.
        seen = ~(out == np.asarray(clear, np.uint16).reshape(1, 1, planes)).all(2)
        out = np.concatenate([out, (seen * np.uint16(65535))[:, :, None].astype(np.uint16)], 2)
    return out


def _chunks(data: bytes) -> list[tuple[bytes, bytes]]:
    """The chunks of a PNG that are kept. Those after the pixels count too."""
    found = []
    at = len(PNG_MAGIC)
    while at + 12 <= len(data):
        length, kind = struct.unpack_from(">I4s", data, at)
        body = data[at + 8 : at + 8 + length]
        if kind in _KEPT and len(body) == length:
            found.append((kind, body))
        at += 12 + length
    return found


def jpeg(pixels: Pixels, picture: Picture) -> bytes:
    """A JPEG of high quality, chroma at full size, with the picture's profile, EXIF and resolution.

    pixels: uint8 [height, width, 1 or 3].
    """
    image = Image.fromarray(pixels[:, :, 0] if pixels.shape[2] == 1 else pixels)
    keep: dict[str, Any] = {}
    if picture.icc:
        keep["icc_profile"] = picture.icc
    if picture.exif:
        keep["exif"] = _EXIF_PREFIX + picture.exif
    if picture.dpi:
        keep["dpi"] = tuple(round(v) for v in picture.dpi)
    out = io.BytesIO()
    image.save(out, "JPEG", quality=JPEG_QUALITY, subsampling=0, **keep)
    return out.getvalue()


def _chunk(kind: bytes, body: bytes) -> bytes:
    crc = zlib.crc32(body, zlib.crc32(kind))
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", crc)


class PngWriter:
    """A PNG of known size, fed with rows from the top; `parts` grows as they come."""

    def __init__(self, width: int, height: int, channels: int, bits: int, kept: Picture) -> None:
        colour = {1: 0, 2: 4, 3: 2, 4: 6}[channels]
        size = struct.pack(">IIBBBBB", width, height, bits, colour, 0, 0, 0)
        self.parts = [PNG_MAGIC, _chunk(b"IHDR", size)]
        self.parts += [_chunk(kind, body) for kind, body in _kept_chunks(kept)]
        self._zip = zlib.compressobj(ZLIB_LEVEL, zlib.DEFLATED, 15, 9, zlib.Z_FILTERED)
        self._pixel_bytes = channels * bits // 8
        self._above = np.zeros(width * self._pixel_bytes, np.uint8)

    def rows(self, pixels: Pixels) -> None:
        """Rows [n, width, channels] of uint8 or uint16."""
        big = pixels.astype(">u2") if pixels.dtype.itemsize == 2 else pixels
        raw = np.ascontiguousarray(big).view(np.uint8).reshape(len(pixels), -1)
        self._add(self._zip.compress(self._filtered(raw)))

    def finish(self) -> None:
        """After the last row."""
        self._add(self._zip.flush())
        self.parts.append(_chunk(b"IEND", b""))

    def _add(self, packed: bytes) -> None:
        if packed:
            self.parts.append(_chunk(b"IDAT", packed))

    def _filtered(self, raw: npt.NDArray[np.uint8]) -> bytes:
        """Each row by the filter (sub, up, Paeth) whose differences are smallest in sum, as the PNG
        standard advises.
        """
        n = self._pixel_bytes
        above = np.vstack([self._above, raw[:-1]])
        self._above = raw[-1].copy()
        left = np.zeros_like(raw)
        left[:, n:] = raw[:, :-n]
        corner = np.zeros_like(raw)
        corner[:, n:] = above[:, :-n]
        a, b, c = (v.astype(np.int16) for v in (left, above, corner))
        pa, pb, pc = np.abs(b - c), np.abs(a - c), np.abs(a + b - 2 * c)
        guess = np.where((pa <= pb) & (pa <= pc), left, np.where(pb <= pc, above, corner))
        options = [raw - left, raw - above, raw - guess]
        costs = np.stack(
            [np.abs(o.view(np.int8).astype(np.int16)).sum(1, np.int64) for o in options]
        )
        best = costs.argmin(0)
        out = np.empty((raw.shape[0], raw.shape[1] + 1), np.uint8)
        out[:, 0] = np.array([1, 2, 4], np.uint8)[best]
        for i, option in enumerate(options):
            out[best == i, 1:] = option[best == i]
        return out.tobytes()


def _kept_chunks(picture: Picture) -> list[tuple[bytes, bytes]]:
    if picture.chunks:
        return picture.chunks
    kept = []
    if picture.icc:
        kept.append((b"iCCP", b"ICC profile\0\0" + zlib.compress(picture.icc)))
    if picture.dpi and all(v > 0 for v in picture.dpi):
        x, y = (round(v / 0.0254) for v in picture.dpi)
        kept.append((b"pHYs", struct.pack(">IIB", x, y, 1)))
    if picture.exif:
        kept.append((b"eXIf", picture.exif))
    return kept
