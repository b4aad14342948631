# SPDX-License-Identifier: Apache-2.0
"""Where a model's tensors come from: a file or a folder, under the names that GGUF gives them."""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from engine.errors import BadModel
from engine.graph import Part
from engine.importers import ggml

Bytes = npt.NDArray[np.uint8]

_STEP = 1 << 20  # bytes that are looked at at a time


@dataclass(frozen=True)
class TensorInfo:
    """A tensor of a file: `shape` is [rows, columns], columns contiguous; `offset` from the file's
    start.
    """

    name: str
    kind: ggml.Type
    shape: tuple[int, int]
    offset: int
    nbytes: int


class Source(Protocol):
    """Tensors by name, and their bytes."""

    @property
    def tensors(self) -> Mapping[str, TensorInfo]: ...

    def read(self, tensor: TensorInfo, row: int, rows: int) -> Bytes:
        """The bytes of some rows.

        Raises:
            BadModel: the file has become shorter.
        """


def pread(fd: int, nbytes: int, offset: int) -> Bytes:
    """Bytes of a file that may be damaged, or become shorter, at any time.

    Raises:
        BadModel: there are not so many.
    """
    out = np.empty(nbytes, np.uint8)
    view = memoryview(out.data)
    while view:
        n = os.preadv(fd, [view], offset)
        if n == 0:
            raise BadModel("The model's file became shorter while it was read.")
        view, offset = view[n:], offset + n
    return out


def checksum(fd: int) -> str:
    """A file's size and the checksum of all of it, in hexadecimal."""
    size, crc = 0, 0
    while data := os.pread(fd, _STEP, size):
        crc, size = zlib.crc32(data, crc), size + len(data)
    return f"{size:x}-{crc:08x}"


def pieces(source: Source, part: Part, step: int) -> Iterator[tuple[TensorInfo, int, Bytes]]:
    """A part of a weight, `step` rows at a time: (tensor, number of rows, bytes)."""
    tensor = source.tensors[part.tensor]
    for row in range(0, part.rows, step):
        n = min(step, part.rows - row)
        yield tensor, n, source.read(tensor, part.row + row, n)


def float_vector(source: Source, name: str, length: int) -> npt.NDArray[np.float64]:
    """A small float tensor that takes part in the import itself.

    Raises:
        BadModel: it has another length or type, or holds values that are no numbers.
    """
    tensor = source.tensors[name]
    if tensor.kind.block != 1 or tensor.shape != (1, length):
        raise BadModel(f"The tensor {name} has the wrong type or shape.")
    values = ggml.vector(tensor.kind, source.read(tensor, 0, 1)).astype(np.float64)
    if not np.isfinite(values).all():
        raise BadModel(f"The tensor {name} holds values that are no numbers.")
    return values
