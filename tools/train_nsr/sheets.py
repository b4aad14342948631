# SPDX-License-Identifier: Apache-2.0
"""Sheets of drawings and of text, to train on beside photographs: edges that no lens has softened.

    python sheets.py --clipart FOLDER --words FILE --out FOLDER [--sheets 22] [--pages 5]

The drawings are those of the Debian package openclipart-png (public domain) with enough detail,
each made at least half as large; lines of text are set in the system's TrueType fonts at twice
their size and halved.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

SIDE = 1152  # of a sheet of drawings
PAGE = 960  # of a page of text
LEAST, MOST = 400, 2400  # sides of drawings
DETAIL = 0.02  # bytes of file a pixel
Image.MAX_IMAGE_PIXELS = None  # some drawings are huge; they are only looked at


def drawings(folder: Path, rng: random.Random) -> Iterator[Image.Image]:
    """The drawings that are worth it, in a random order."""
    found = []
    for path in sorted(folder.rglob("*.png")):
        with Image.open(path) as picture:
            w, h = picture.size
        if min(w, h) >= LEAST and max(w, h) <= MOST and path.stat().st_size > DETAIL * w * h:
            found.append(path)
    rng.shuffle(found)
    for path in found:
        yield Image.open(path).convert("RGBA")


def sheet(source: Iterator[Image.Image], rng: random.Random) -> Image.Image:
    """Drawings side by side on coloured ground."""

    def colour() -> tuple[int, ...]:
        return tuple(rng.randrange(256) for _ in range(3))

    out = Image.new("RGB", (SIDE, SIDE), colour() if rng.random() < 0.6 else "white")
    cell = rng.choice([144, 192, 288, 384])
    for y in range(0, SIDE, cell):
        for x in range(0, SIDE, cell):
            picture = next(source)
            factor = min(cell * rng.uniform(0.9, 1.3) / max(picture.size), 0.5)
            how = Image.Resampling.BOX if factor > 0.34 else Image.Resampling.LANCZOS
            small = picture.resize([max(8, int(n * factor)) for n in picture.size], how)
            if rng.random() < 0.3:
                ImageDraw.Draw(out).rectangle([x, y, x + cell - 1, y + cell - 1], fill=colour())
            out.paste(small, (x, y), small)
    return out


def page(words: list[str], fonts: list[Path], rng: random.Random) -> Image.Image:
    """Blocks of text, each in its font, size and colours."""
    side = 2 * PAGE
    out = Image.new("RGB", (side, side), "white")
    draw = ImageDraw.Draw(out)
    y = 0
    while y < side:
        size = rng.choice([20, 24, 28, 36, 48, 64, 96])
        font = ImageFont.truetype(str(rng.choice(fonts)), size)
        ground = tuple(rng.randrange(256) for _ in range(3)) if rng.random() < 0.4 else (255,) * 3
        ink = "white" if sum(ground) < 380 else "black"
        line, lines = int(size * 1.35), rng.randrange(1, 4)
        draw.rectangle([0, y, side, y + lines * line], fill=ground)
        for _ in range(lines):
            draw.text((4, y), " ".join(rng.choices(words, k=60)), font=font, fill=ink)
            y += line
    return out.resize((PAGE, PAGE), Image.Resampling.BOX)


def main() -> None:
    p = argparse.ArgumentParser()
    p.add_argument("--clipart", type=Path, required=True)
    p.add_argument("--words", type=Path, required=True)
    p.add_argument("--out", type=Path, required=True)
    p.add_argument("--sheets", type=int, default=22)
    p.add_argument("--pages", type=int, default=5)
    p.add_argument("--seed", type=int, default=7)
    args = p.parse_args()
    rng = random.Random(args.seed)
    source = drawings(args.clipart, rng)
    for i in range(args.sheets):
        sheet(source, rng).save(args.out / f"clip{i:03d}.png")
    fonts = sorted(Path("/usr/share/fonts").rglob("*.ttf"))
    words = args.words.read_text(encoding="utf-8").split()
    for i in range(args.pages):
        page(words, fonts, rng).save(args.out / f"text{i:03d}.png")


if __name__ == "__main__":
    main()
