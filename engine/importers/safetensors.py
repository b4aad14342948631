# SPDX-License-Identifier: Apache-2.0
"""A bounded reader of safetensors files, for files that nobody vouches for.

u64 bytes of the header, the header (JSON: name -> {dtype, shape, data_offsets}), the data. The
header is compared with the size of the file before it is read, its entries before they are used.
Format: https://huggingface.co/docs/safetensors
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

from engine.errors import BadModel, UnsupportedModel
from engine.importers import ggml
from engine.importers.source import Bytes, TensorInfo, pread

MAX_HEADER = 16 << 20  # bytes; the largest models need about 1 MiB a file
MAX_TENSORS = 1 << 16
MAX_NAME = 256


def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object's members, none of them twice (`object_pairs_hook`).

    Raises:
        ValueError
    """
    out = dict(pairs)
    if len(out) != len(pairs):
        raise ValueError("a name stands twice")
    return out


class SafeTensors:
    """An open file. The descriptor stays the caller's and has to live as long as this."""

    def __init__(self, fd: int) -> None:
        """Reads the header.

        Raises:
            BadModel: no safetensors file, damaged or cut short.
            UnsupportedModel: a tensor of a type that is not supported.
        """
        self._fd = fd
        size = os.fstat(fd).st_size
        length = int.from_bytes(os.pread(fd, 8, 0), "little")
        if size < 8 or not 2 <= length <= min(size - 8, MAX_HEADER):
            raise BadModel("The file is no safetensors file, or it is damaged.")
        try:
            header = json.loads(pread(fd, length, 8).tobytes(), object_pairs_hook=unique)
        except (ValueError, RecursionError):
            raise BadModel("The header of the safetensors file is damaged.") from None
        if not isinstance(header, dict) or len(header) > MAX_TENSORS:
            raise BadModel("The header of the safetensors file is damaged.")
        header.pop("__metadata__", None)
        start, end = 8 + length, 0
        tensors = [_tensor(name, entry, start, size) for name, entry in header.items()]
        # Data that is counted twice would let a small file stand for a huge model.
        for t in sorted(tensors, key=lambda t: t.offset):
            if t.offset < end:
                raise BadModel(f"The tensor {t.name} overlaps another one.")
            end = t.offset + t.nbytes
        self.tensors: Mapping[str, TensorInfo] = {t.name: t for t in tensors}

    def read(self, tensor: TensorInfo, row: int, rows: int) -> Bytes:
        """The bytes of some rows.

        Raises:
            BadModel: the file has become shorter.
        """
        stride = tensor.nbytes // tensor.shape[0]
        return pread(self._fd, rows * stride, tensor.offset + row * stride)


def _tensor(name: str, entry: Any, start: int, size: int) -> TensorInfo:
    """An entry of the header; a tensor of more than two dimensions becomes a matrix of its last.

    Raises:
        BadModel, UnsupportedModel
    """
    if not 0 < len(name) <= MAX_NAME or not name.isprintable():
        raise BadModel("The safetensors file has a tensor with an impossible name.")
    broken = BadModel(f"The tensor {name} is described wrongly: the file is damaged.")
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise broken
    shape, offsets = entry["shape"], entry["data_offsets"]
    lists = isinstance(shape, list) and isinstance(offsets, list)
    if not lists or not 1 <= len(shape) <= 4 or len(offsets) != 2:
        raise broken
    if any(type(n) is not int or not 0 <= n < 1 << 62 for n in (*shape, *offsets)):
        raise broken
    dtype = entry["dtype"]
    kind = ggml.TYPES.get(dtype) if isinstance(dtype, str) else None
    if kind is None or kind.block != 1:
        raise UnsupportedModel(
            f"The tensor {name} has the type {str(dtype)[:16]}, which is not supported."
        )
    rows = 1
    for n in shape[:-1]:
        rows *= n
    nbytes = rows * shape[-1] * kind.nbytes
    begin, end = offsets
    if nbytes == 0 or end - begin != nbytes or start + end > size:
        raise broken
    return TensorInfo(name, kind, (rows, shape[-1]), start + begin, nbytes)
