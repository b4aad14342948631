# SPDX-License-Identifier: Apache-2.0
"""A sheet that shows what enlarging did: the input, bicubic, ours and, where there is one, the
truth, each as a whole and as a crop, with PSNR and SSIM against the truth.

    python -m engine.video.compare [--truth FILE] [--crop X,Y] INPUT OURS SHEET

writes the sheet (PNG) and prints what it measured as JSON. PSNR and SSIM are those of BT.601 luma
in limited range, borders of as many pixels as the enlargement is left out; SSIM with the window of
its authors (Wang et al. 2004: Gaussian of 11x11, sigma 1.5), of places where it fits.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw, ImageFont

from engine.errors import InvalidArgument, PvrError
from engine.video import picture_files

Floats = npt.NDArray[np.float64]
Pixels = npt.NDArray[np.uint8]

BAD_INPUT = 5
CROP, ZOOM = 96, 4  # pixels of the result that are shown larger, and how much
COLUMN, GAP, LINE = CROP * ZOOM, 12, 16
PAPER, INK, FRAME = (250, 250, 250), (20, 20, 20), (220, 30, 30)


def read(path: str) -> Pixels:
    """A PNG or JPEG as [height, width, 3] of 8 bits; transparent parts are seen on white.

    Raises:
        InvalidArgument: it is neither, or damaged.
    """
    try:
        data = Path(path).read_bytes()
    except OSError as e:
        raise InvalidArgument(f"{path} cannot be read: {e.strerror}.") from None
    pixels = picture_files.decode(data).pixels
    if pixels.dtype == np.uint16:
        pixels = ((pixels.astype(np.uint32) + 128) // 257).astype(np.uint8)
    colours = 3 if pixels.shape[2] >= 3 else 1
    seen = pixels[:, :, :colours]
    if pixels.shape[2] != colours:
        clear = pixels[:, :, colours:].astype(np.uint32)
        seen = ((seen * clear + 255 * (255 - clear) + 127) // 255).astype(np.uint8)
    return np.ascontiguousarray(np.broadcast_to(seen, (*seen.shape[:2], 3)))


def luma(pixels: Pixels) -> Floats:
    """BT.601 luma, 16..235, not rounded: [height, width]."""
    weights = np.array([65.481, 128.553, 24.966]) / 255
    out: Floats = 16 + pixels.astype(np.float64) @ weights
    return out


def psnr(a: Floats, b: Floats) -> float | None:
    """dB; None where nothing differs."""
    error = float(np.mean((a - b) ** 2))
    return 10 * float(np.log10(255**2 / error)) if error else None


def ssim(a: Floats, b: Floats) -> float | None:
    """The mean of the structural similarity; None for planes of less than 11 rows or columns."""
    if min(a.shape) < 11:
        return None
    window = np.exp(-((np.arange(11) - 5.0) ** 2) / (2 * 1.5**2))
    window /= window.sum()

    def smooth(plane: Floats) -> Floats:
        rows = sum(w * plane[i : plane.shape[0] - 10 + i] for i, w in enumerate(window))
        out: Floats = np.asarray(
            sum(w * np.asarray(rows)[:, i : plane.shape[1] - 10 + i] for i, w in enumerate(window))
        )
        return out

    c1, c2 = (0.01 * 255) ** 2, (0.03 * 255) ** 2
    ma, mb = smooth(a), smooth(b)
    va, vb, both = smooth(a * a) - ma * ma, smooth(b * b) - mb * mb, smooth(a * b) - ma * mb
    value = (2 * ma * mb + c1) * (2 * both + c2) / ((ma**2 + mb**2 + c1) * (va + vb + c2))
    return float(value.mean())


@dataclass
class Shown:
    """A column of the sheet."""

    title: str
    pixels: Pixels
    psnr: float | None = None
    ssim: float | None = None

    @property
    def figures(self) -> str:
        parts = []
        if self.psnr is not None:
            parts.append(f"PSNR-Y {self.psnr:.2f} dB")
        if self.ssim is not None:
            parts.append(f"SSIM {self.ssim:.4f}")
        return "  ".join(parts)


def busiest(a: Pixels, b: Pixels) -> tuple[int, int]:
    """Left and top of the crop in which two pictures differ most."""
    difference = np.abs(luma(a) - luma(b))
    height, width = difference.shape
    sums = np.pad(difference.cumsum(0).cumsum(1), ((1, 0), (1, 0)))
    h, w = min(CROP, height), min(CROP, width)
    boxes = sums[h:, w:] - sums[:-h, w:] - sums[h:, :-w] + sums[:-h, :-w]
    y, x = np.unravel_index(int(boxes.argmax()), boxes.shape)
    return int(x), int(y)


def columns(small: Pixels, ours: Pixels, truth: Pixels | None) -> list[Shown]:
    """The pictures, all of the size of ours, and how near to the truth they come."""
    size = (ours.shape[1], ours.shape[0])
    picture = Image.fromarray(small)
    repeated, bicubic = (
        np.asarray(picture.resize(size, how))
        for how in (Image.Resampling.NEAREST, Image.Resampling.BICUBIC)
    )
    shown = [
        Shown(f"input {small.shape[1]}x{small.shape[0]}", repeated),
        Shown("bicubic", bicubic),
        Shown(f"ours {size[0]}x{size[1]}", ours),
    ]
    if truth is not None:
        border = max(1, round(max(size[0] / small.shape[1], size[1] / small.shape[0])))
        room = min(size) > 2 * border
        inner = (slice(border, -border),) * 2 if room else (slice(None),) * 2
        for column in shown[1:]:
            a, b = luma(column.pixels)[inner], luma(truth)[inner]
            column.psnr, column.ssim = psnr(a, b), ssim(a, b)
        shown.append(Shown("truth", truth))
    return shown


def sheet(shown: Sequence[Shown], corner: tuple[int, int]) -> Image.Image:
    """The columns side by side: a line of words, the whole, figures, the crop."""
    height, width = shown[0].pixels.shape[:2]
    part = COLUMN / width
    whole = (COLUMN, max(1, round(height * part)))
    x, y = corner
    w, h = min(CROP, width), min(CROP, height)
    top, below = GAP + LINE, GAP + LINE + whole[1] + GAP + LINE
    total = (GAP + len(shown) * (COLUMN + GAP), below + h * ZOOM + GAP)
    out = Image.new("RGB", total, PAPER)
    draw, font = ImageDraw.Draw(out), ImageFont.load_default()
    for i, column in enumerate(shown):
        left = GAP + i * (COLUMN + GAP)
        picture = Image.fromarray(column.pixels)
        draw.text((left, GAP), column.title, INK, font)
        out.paste(picture.resize(whole, Image.Resampling.BOX), (left, top))
        box = [left + x * part, top + y * part, left + (x + w) * part, top + (y + h) * part]
        draw.rectangle(box, outline=FRAME)
        draw.text((left, below - LINE), column.figures, INK, font)
        crop = picture.crop((x, y, x + w, y + h))
        out.paste(crop.resize((w * ZOOM, h * ZOOM), Image.Resampling.NEAREST), (left, below))
    return out


def measured(shown: Sequence[Shown], corner: tuple[int, int]) -> dict[str, Any]:
    """What the program prints."""
    height, width = shown[0].pixels.shape[:2]
    return {
        "width": width,
        "height": height,
        "crop": [*corner, min(CROP, width), min(CROP, height)],
        "psnr": {"bicubic": shown[1].psnr, "ours": shown[2].psnr},
        "ssim": {"bicubic": shown[1].ssim, "ours": shown[2].ssim},
    }


def main() -> int:
    """Runs the program; 5 for a picture that cannot be used."""
    parser = argparse.ArgumentParser("engine.video.compare", description=__doc__)
    parser.add_argument("--truth")
    parser.add_argument("--crop")
    for name in ("input", "ours", "sheet"):
        parser.add_argument(name)
    args = parser.parse_args()
    try:
        small, ours = read(args.input), read(args.ours)
        truth = read(args.truth) if args.truth else None
        if truth is not None and truth.shape != ours.shape:
            size, wanted = (f"{p.shape[1]}x{p.shape[0]}" for p in (truth, ours))
            raise InvalidArgument(f"The truth is {size}, the enlarged picture {wanted}.")
        shown = columns(small, ours, truth)
        corner = busiest(shown[1].pixels, ours)
        if args.crop:
            corner = _corner(args.crop, ours)
        with open(args.sheet, "wb") as file:
            sheet(shown, corner).save(file, "PNG")
    except PvrError as e:
        sys.stderr.write(f"{e}\n")
        return BAD_INPUT
    print(json.dumps(measured(shown, corner)))
    return 0


def _corner(text: str, ours: Pixels) -> tuple[int, int]:
    height, width = ours.shape[:2]
    try:
        x, y = (int(n) for n in text.split(","))
    except ValueError:
        raise InvalidArgument("The crop is given as X,Y.") from None
    return (
        min(max(x, 0), width - min(CROP, width)),
        min(max(y, 0), height - min(CROP, height)),
    )


if __name__ == "__main__":
    sys.exit(main())
