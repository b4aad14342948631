# SPDX-License-Identifier: Apache-2.0
"""ncnn's pair of files: NAME.param (text) and NAME.bin (weights).

A line of the first names a layer's type, its name, how many values it reads and writes, these, and
its parameters as number=value (arrays as -23300-number=count,…). The weights follow each other in
the order of the layers: float32, float16, int8, or numbers of a table of 256, as a word says first.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from engine.errors import BadModel, UnsupportedModel
from engine.video.convnet_graph import MAX_NODES

F32 = npt.NDArray[np.float32]

MAGIC = b"7767517"
MAX_PARAM = 16 << 20  # bytes of the text
_HALF, _INT8, _RAW = 0x01306B47, 0x000D4B38, 0x0002C056


@dataclass(frozen=True)
class Layer:
    """A line of the .param file."""

    op: str
    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    params: Mapping[int, float | list[float]]

    def whole(self, key: int, default: int = 0) -> int:
        """A whole number."""
        value = self.params.get(key, default)
        if isinstance(value, list) or value != int(value):
            raise BadModel(f"The layer {self.name} has no whole number {key}.")
        return int(value)

    def number(self, key: int, default: float = 0.0) -> float:
        """A number."""
        value = self.params.get(key, default)
        if isinstance(value, list):
            raise BadModel(f"The layer {self.name} has no number {key}.")
        return value

    def numbers(self, key: int) -> list[float]:
        """An array, also where the file says it in the old way."""
        value = self.params.get(key, [])
        return value if isinstance(value, list) else [value]


def parse(text: bytes) -> list[Layer]:
    """The layers of a .param file.

    Raises:
        BadModel: it is none, or damaged.
    """
    lines = text.decode("utf-8", "replace").split("\n")
    if lines[0].strip() != MAGIC.decode() or len(lines) < 3:
        raise BadModel("The file is no ncnn .param file.")
    layers: list[Layer] = []
    for number, line in enumerate(lines[2:], 3):
        words = line.split()
        if not words:
            continue
        try:
            reads, writes = int(words[2]), int(words[3])
            if not (0 <= reads <= len(words) - 4 and 0 <= writes <= len(words) - 4 - reads):
                raise ValueError
            values, rest = words[4 : 4 + reads + writes], words[4 + reads + writes :]
            params = dict(_param(word) for word in rest)
        except (ValueError, IndexError):
            raise BadModel(f"The .param file's line {number} is damaged.") from None
        inputs, outputs = tuple(values[:reads]), tuple(values[reads:])
        layers.append(Layer(words[0], words[1], inputs, outputs, params))
        if len(layers) > MAX_NODES:
            raise UnsupportedModel(f"The network has more than {MAX_NODES} layers.")
    if lines[1].split()[:1] != [str(len(layers))]:
        raise BadModel(f"The .param file has {len(layers)} layers, not as many as it says.")
    return layers


def read(fd: int) -> list[Layer]:
    """The layers of a .param file. The descriptor stays the caller's. Raises as `parse`."""
    size = os.fstat(fd).st_size
    if size > MAX_PARAM:
        raise BadModel(f"The .param file has {size} bytes: it is none.")
    return parse(os.pread(fd, size, 0))


def _param(word: str) -> tuple[int, float | list[float]]:
    key, _, value = word.partition("=")
    number = int(key)
    if number > -23300:
        return number, _finite(value)
    count, *items = value.split(",")
    if int(count) != len(items):
        raise ValueError
    return -23300 - number, [_finite(v) for v in items]


def _finite(word: str) -> float:
    value = float(word)
    if not math.isfinite(value):
        raise ValueError
    return value


class Weights:
    """Reads the .bin file forward."""

    def __init__(self, fd: int) -> None:
        self._fd, self._at = fd, 0
        self._size = os.fstat(fd).st_size

    def take(self, nbytes: int, layer: Layer) -> bytes:
        """The next bytes.

        Raises:
            BadModel: the file ends before.
        """
        if not 0 <= nbytes <= self._size - self._at:
            raise BadModel(f"The .bin file ends in the weights of the layer {layer.name}.")
        data = b""
        while len(data) < nbytes:
            part = os.pread(self._fd, nbytes - len(data), self._at + len(data))
            if not part:
                raise BadModel("The .bin file became shorter while it was read.")
            data += part
        self._at += nbytes
        return data

    def floats(self, count: int, layer: Layer) -> F32:
        """Numbers without a word before."""
        return np.frombuffer(self.take(4 * count, layer), "<f4")

    def tagged(self, count: int, layer: Layer) -> tuple[F32, bool]:
        """Numbers behind the word that says their type; True: int8 without its scales."""
        tag = int.from_bytes(self.take(4, layer), "little")
        if tag == _HALF:
            data = self.take(-(-2 * count // 4) * 4, layer)
            return np.frombuffer(data, "<f2")[:count].astype(np.float32), False
        if tag == _INT8:
            data = self.take(-(-count // 4) * 4, layer)
            return np.frombuffer(data, np.int8)[:count].astype(np.float32), True
        if tag == _RAW or tag == 0:
            return self.floats(count, layer), False
        table = self.floats(256, layer)
        data = self.take(-(-count // 4) * 4, layer)
        return table[np.frombuffer(data, np.uint8)[:count]], False

    def end(self) -> None:
        """After the last layer.

        Raises:
            BadModel: the file goes on.
        """
        if self._at != self._size:
            raise BadModel(
                f"The .bin file has {self._size} bytes, the layers take {self._at}: it belongs to"
                " another .param file."
            )
