# SPDX-License-Identifier: Apache-2.0
"""A bounded reader of GGUF (versions 2 and 3, little-endian), for files that nobody vouches for.

Every count, length and offset is compared with the size of the file before anything is allocated or
read. The file is read with pread: a descriptor that a client handed over is never mapped. Format:
https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import os
import struct
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from engine.errors import BadModel, UnsupportedModel
from engine.importers import ggml
from engine.importers.source import TensorInfo, pread

MAGIC = b"GGUF"
MAX_METADATA = 64 << 20  # bytes before the tensor data; the largest vocabularies need about 20 MiB
MAX_KEYS = 1 << 14
MAX_TENSORS = 1 << 16
MAX_STRINGS = 4 << 20  # strings in all arrays together
MAX_NAME = 256
_WINDOW = 4 << 20

# number -> numpy type of the fixed-size value types
_SCALARS = {
    0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "?",
    10: "<u8", 11: "<i8", 12: "<f8",
}  # fmt: skip
_STRING, _ARRAY = 8, 9


class _Reader:
    """Reads forward through the front of a file, at most MAX_METADATA bytes."""

    def __init__(self, fd: int, size: int) -> None:
        self._fd = fd
        self._end = min(size, MAX_METADATA)
        self._size = size
        self._data = b""
        self.pos = 0
        self._strings = 0

    def left(self) -> int:
        return self._end - self.pos

    def need(self, n: int) -> None:
        """Makes the next n bytes available in `_data`.

        Raises:
            BadModel: the file (or what a description may take of it) ends before.
        """
        if n > self.left():
            if self._size > self._end:
                raise BadModel(
                    f"The description of the model takes more than {MAX_METADATA} bytes."
                )
            raise BadModel("The GGUF file ends in the middle of its description.")
        end = self.pos + n
        if end > len(self._data):
            begin = len(self._data)
            more = os.pread(self._fd, max(min(_WINDOW, self._end - begin), end - begin), begin)
            self._data += more
            if end > len(self._data):
                raise BadModel("The GGUF file ends in the middle of its description.")

    def take(self, n: int) -> bytes:
        self.need(n)
        self.pos += n
        return self._data[self.pos - n : self.pos]

    def u32(self) -> int:
        return int.from_bytes(self.take(4), "little")

    def u64(self) -> int:
        return int.from_bytes(self.take(8), "little")

    def string(self) -> bytes:
        return self.take(self.u64())

    def value(self, kind: int) -> Any:
        """A metadata value: bool, int, float, bytes, a numpy array, or a list of bytes."""
        if kind in _SCALARS:
            dtype = np.dtype(_SCALARS[kind])
            return np.frombuffer(self.take(dtype.itemsize), dtype)[0].item()
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            raise BadModel(f"The GGUF file has a value of the unknown type {kind}.")
        kind, count = self.u32(), self.u64()
        if kind in _SCALARS:
            dtype = np.dtype(_SCALARS[kind])
            if count > self.left() // dtype.itemsize:
                raise BadModel("The GGUF file has an array that is longer than the file.")
            return np.frombuffer(self.take(count * dtype.itemsize), dtype)
        if kind != _STRING:
            raise BadModel(f"The GGUF file has an array of the unsupported type {kind}.")
        if count > self.left() // 8:
            raise BadModel("The GGUF file has an array that is longer than the file.")
        self._strings += count
        if self._strings > MAX_STRINGS:
            raise BadModel(f"The GGUF file has more than {MAX_STRINGS} strings.")
        return self._string_array(count)

    def _string_array(self, count: int) -> list[bytes]:
        found = []
        unpack = struct.Struct("<Q").unpack_from
        for _ in range(count):
            if self.pos + 8 > len(self._data):
                self.need(8)
            length: int = unpack(self._data, self.pos)[0]
            begin = self.pos + 8
            if begin + length > len(self._data):
                self.need(8 + length)
            self.pos = begin + length
            found.append(self._data[begin : self.pos])
        return found


class Gguf:
    """An open GGUF file. The descriptor stays the caller's and has to live as long as this."""

    def __init__(self, fd: int) -> None:
        """Reads the description.

        Raises:
            BadModel: no GGUF file, damaged or cut short.
            UnsupportedModel: another version, a part of a split model, a tensor of an unknown type.
        """
        self._fd = fd
        self.size = os.fstat(fd).st_size
        reader = _Reader(fd, self.size)
        if self.size < 24 or reader.take(4) != MAGIC:
            raise BadModel("The file is no GGUF model.")
        version = reader.u32()
        if version not in (2, 3):
            if int.from_bytes(version.to_bytes(4, "little"), "big") in (2, 3):
                raise UnsupportedModel("The GGUF file is big-endian.")
            raise UnsupportedModel(
                f"The GGUF file has version {version}; versions 2 and 3 are supported."
            )
        tensors, keys = reader.u64(), reader.u64()
        if tensors > MAX_TENSORS or keys > MAX_KEYS:
            raise BadModel(
                f"The GGUF file claims {tensors} tensors and {keys} keys: it is damaged."
            )
        self.metadata: dict[str, Any] = {}
        for _ in range(keys):
            key = self._name(reader, "key")
            if key in self.metadata:
                raise BadModel(f"The GGUF file has the key {key!r} twice.")
            self.metadata[key] = reader.value(reader.u32())
        if self.int("split.count", 1) > 1:
            raise UnsupportedModel("The GGUF file is one part of a split model.")
        self.tensors = self._read_tensors(reader, tensors)

    @staticmethod
    def _name(reader: _Reader, what: str) -> str:
        length = reader.u64()
        if not 0 < length <= MAX_NAME:
            raise BadModel(f"The GGUF file has a {what} name of {length} bytes: it is damaged.")
        try:
            return reader.take(length).decode()
        except UnicodeDecodeError:
            raise BadModel(f"The GGUF file has a {what} name that is no text.") from None

    def _read_tensors(self, reader: _Reader, count: int) -> Mapping[str, TensorInfo]:
        found: list[tuple[str, ggml.Type, tuple[int, int], int]] = []
        for _ in range(count):
            name = self._name(reader, "tensor")
            n_dims = reader.u32()
            if not 1 <= n_dims <= 4:
                raise BadModel(f"The tensor {name} has {n_dims} dimensions.")
            dims = [reader.u64() for _ in range(n_dims)]
            number, offset = reader.u32(), reader.u64()
            kind = ggml.BY_NUMBER.get(number)
            if kind is None:
                called = ggml.OTHER_NAMES.get(number, f"number {number}")
                raise UnsupportedModel(
                    f"The tensor {name} has the type {called}, which is not supported."
                )
            rows = 1
            for d in dims[1:]:
                rows *= d
            if dims[0] == 0 or rows == 0 or dims[0] % kind.block:
                raise BadModel(f"The tensor {name} has an impossible shape.")
            found.append((name, kind, (rows, dims[0]), offset))
        align = self.int("general.alignment", 32)
        if not 8 <= align <= 1 << 16 or align & (align - 1):
            raise BadModel(f"The GGUF file has the alignment {align}.")
        start = -(-reader.pos // align) * align
        tensors: dict[str, TensorInfo] = {}
        for name, kind, shape, offset in found:
            nbytes = shape[0] * ggml.row_bytes(kind, shape[1])
            if offset % align or start + offset + nbytes > self.size:
                raise BadModel(
                    f"The tensor {name} lies outside of the file: it is cut short or damaged."
                )
            if name in tensors:
                raise BadModel(f"The GGUF file has the tensor {name} twice.")
            tensors[name] = TensorInfo(name, kind, shape, start + offset, nbytes)
        # Data that is counted twice would let a small file stand for a huge model.
        end = 0
        for t in sorted(tensors.values(), key=lambda t: t.offset):
            if t.offset < end:
                raise BadModel(f"The tensor {t.name} overlaps another one.")
            end = t.offset + t.nbytes
        return tensors

    def read(self, tensor: TensorInfo, row: int, rows: int) -> npt.NDArray[np.uint8]:
        """The bytes of some rows.

        Raises:
            BadModel: the file has become shorter.
        """
        stride = tensor.nbytes // tensor.shape[0]
        return pread(self._fd, rows * stride, tensor.offset + row * stride)

    # Typed look-ups; a value of the wrong type is a damaged file, not a surprise later.

    def int(self, key: str, default: int | None = None) -> int:
        """A whole number.

        Raises:
            BadModel: missing without a default, or no whole number.
        """
        value = self.metadata.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise BadModel(f"The GGUF file {self._lacks(key)} a whole number {key}.")
        return value

    def float(self, key: str, default: float | None = None) -> float:
        """A finite number. Raises BadModel as `int`."""
        value = self.metadata.get(key, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) < 1e30:
            raise BadModel(f"The GGUF file {self._lacks(key)} a number {key}.")
        return float(value)

    def bool(self, key: str, default: bool) -> bool:
        """A truth value. Raises BadModel as `int`."""
        value = self.metadata.get(key, default)
        if not isinstance(value, bool):
            raise BadModel(f"The GGUF file {self._lacks(key)} a truth value {key}.")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        """A string of UTF-8. Raises BadModel as `int`."""
        value = self.metadata.get(key, default)
        if isinstance(value, bytes):
            try:
                value = value.decode()
            except UnicodeDecodeError:
                value = None
        if not isinstance(value, str):
            raise BadModel(f"The GGUF file {self._lacks(key)} a text {key}.")
        return value

    def strings(self, key: str) -> list[bytes]:
        """An array of strings. Raises BadModel as `int`."""
        value = self.metadata.get(key)
        if isinstance(value, np.ndarray) and value.size == 0:
            value = []
        if not isinstance(value, list):
            raise BadModel(f"The GGUF file {self._lacks(key)} a list of strings {key}.")
        return value

    def numbers(self, key: str) -> npt.NDArray[Any] | None:
        """An array of numbers, None when the file has no such key. Raises BadModel as `int`."""
        value = self.metadata.get(key)
        if value is None or isinstance(value, np.ndarray):
            return value
        raise BadModel(f"The GGUF file lacks a list of numbers {key}.")

    def _lacks(self, key: str) -> str:
        return "has something other than" if key in self.metadata else "lacks"
