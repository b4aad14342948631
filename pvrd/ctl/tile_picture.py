# SPDX-License-Identifier: Apache-2.0
"""A picture of who made each tile of an enlarged frame."""

from __future__ import annotations

import re
import struct
import zlib
from itertools import chain, repeat

# Palette by the letters of a tile map; the first is the line between tiles.
_COLOURS = {
    "-": (0, 0, 0),
    "g": (64, 160, 80),  # the GPU
    "c": (64, 96, 200),  # the CPU
    "r": (150, 150, 150),  # the frame before
    "i": (208, 64, 48),  # plain interpolation
    "?": (255, 255, 255),  # not told
}
_PLACES = {letter: place for place, letter in enumerate(_COLOURS)}


def draw(tile_map: str, width: int, height: int) -> bytes:
    """The picture, as large as the frame, as a PNG."""
    columns, rows, across, down, runs = (tile_map or "1 1 0 0 ").split(" ", 4)
    told = chain.from_iterable(
        repeat(letter, int(count)) for count, letter in re.findall(r"(\d+)([a-z])", runs)
    )
    tiles = list(told)
    packer = zlib.compressobj()
    pieces = []
    for y in range(height):
        row = _cell(y, down, rows)
        line = bytearray(1)  # the row's filter: none
        edge = y and row != _cell(y - 1, down, rows)
        for column in range(int(columns)):
            first, last = (min(width, round(float(across) * (column + n))) for n in (0, 1))
            last = width if column + 1 >= int(columns) else last
            place = row * int(columns) + column
            letter = tiles[place] if place < len(tiles) and tiles[place] in _PLACES else "?"
            line += bytes([_PLACES["-" if edge else letter]]) * (last - first)
            if column and first < last:
                line[1 + first] = _PLACES["-"]
        pieces.append(packer.compress(line))
    pieces.append(packer.flush())
    palette = bytes(value for colour in _COLOURS.values() for value in colour)
    chunks = [
        _chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 3, 0, 0, 0)),
        _chunk(b"PLTE", palette),
        _chunk(b"IDAT", b"".join(pieces)),
        _chunk(b"IEND", b""),
    ]
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


def _cell(at: int, size: str, count: str) -> int:
    """The row of tiles that a row of pixels is in."""
    return min(int(at / float(size)), int(count) - 1) if float(size) else 0


def _chunk(kind: bytes, data: bytes) -> bytes:
    body = kind + data
    return struct.pack(">I", len(data)) + body + struct.pack(">I", zlib.crc32(body))
