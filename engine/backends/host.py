# SPDX-License-Identifier: Apache-2.0
"""Weights and buffers of Programs in host memory, as the CPU and the null backend have them."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from engine.backends.base import LARGE, NOTHING, Array, Into, Lent, checked
from engine.errors import InvalidArgument, OutOfMemory
from engine.program import Program

ALIGN = 64  # a cache line and the widest vector


def aligned(nbytes: int) -> Array:
    """Zeroed bytes at a 64-byte address; pages come when they are touched.

    Raises:
        MemoryError: there are none.
    """
    raw = np.zeros(nbytes + ALIGN, np.uint8)
    skip = -raw.ctypes.data % ALIGN
    return raw[skip : skip + nbytes]


def as_bytes(data: Array | bytes) -> Array:
    """A flat uint8 array of the same memory, or of a copy where it is not contiguous."""
    if isinstance(data, bytes | bytearray | memoryview):
        return np.frombuffer(data, np.uint8)
    return np.ascontiguousarray(data).reshape(-1).view(np.uint8)


class HostWeights:
    """Views of the caller's arrays; one whose address is no multiple of 64 is copied, once."""

    def __init__(self, blobs: Mapping[str, Array]) -> None:
        self.blobs: dict[str, Array] = {}
        for name, blob in blobs.items():
            data = as_bytes(blob)
            if data.ctypes.data % ALIGN:
                copy = aligned(data.nbytes)
                copy[:] = data
                data = copy
            self.blobs[name] = data

    def nbytes(self) -> int:
        return sum(b.nbytes for b in self.blobs.values())

    def close(self) -> None:
        self.blobs = {}


class HostExecutable:
    """Buffers of a Program in host memory, with the host's side of them: shared by the CPU and the
    null backend.
    """

    def __init__(
        self, counters: dict[str, int], program: Program, weights: HostWeights, lent: Lent = NOTHING
    ) -> None:
        self.program = checked(program)
        self._counters = counters
        self._buffers: dict[str, Array] | None = {}
        own = [b for b in program.buffers.values() if b.kind != "weight"]
        for buf in program.buffers.values():
            if buf.kind == "weight":
                blob = weights.blobs.get(buf.name)
                if blob is None or blob.nbytes < buf.nbytes:
                    have = "no such weight" if blob is None else f"{blob.nbytes} bytes"
                    raise InvalidArgument(f"weight {buf.name!r} of {buf.nbytes} bytes: {have}")
                self._buffers[buf.name] = blob
                continue
            if buf.name in lent:
                lender, name = lent[buf.name]
                self._buffers[buf.name] = lender.lend(name, buf.nbytes)
                continue
            try:
                self._buffers[buf.name] = aligned(buf.nbytes)
            except MemoryError as e:
                need = sum(b.nbytes for b in own)
                raise OutOfMemory(
                    f"{need} bytes are needed beside the weights; "
                    f"{buf.nbytes} bytes for {buf.name!r} are not there"
                ) from e

    def view(self, name: str) -> Array:
        """The live memory of a buffer.

        Raises:
            InvalidArgument: no such buffer, or the executable is closed.
        """
        if self._buffers is None:
            raise InvalidArgument("the executable is closed")
        if name not in self._buffers:
            raise InvalidArgument(f"there is no buffer {name!r}")
        return self._buffers[name]

    def lend(self, name: str, nbytes: int) -> Array:
        """A buffer for another executable, which has to be closed before this one.

        Raises:
            InvalidArgument: it has fewer bytes.
        """
        if (found := self.view(name)).nbytes < nbytes:
            raise InvalidArgument(f"{name!r} has {found.nbytes} bytes, {nbytes} are wanted")
        return found

    def _range(self, name: str, nbytes: int, offset: int) -> Array:
        whole = self.view(name)
        if offset < 0 or nbytes < 0 or offset + nbytes > whole.nbytes:
            raise InvalidArgument(
                f"{nbytes} bytes at {offset} are outside of {name!r} ({whole.nbytes} bytes)"
            )
        return whole[offset : offset + nbytes]

    def write(self, buffer: str, data: Array | bytes, offset: int = 0) -> None:
        source = as_bytes(data)
        target = self._range(buffer, source.nbytes, offset)
        if self.program.buffers[buffer].kind == "weight":
            raise InvalidArgument(f"{buffer!r} is a weight")
        target[:] = source
        self._counters["bytes_uploaded"] += source.nbytes
        self._copied(buffer, source.nbytes)

    def read(self, buffer: str, nbytes: int, offset: int = 0) -> Array:
        self._counters["bytes_read_back"] += nbytes
        return self._range(buffer, nbytes, offset).copy()

    def look(self, buffer: str, nbytes: int, offset: int = 0) -> Array:
        return self._range(buffer, nbytes, offset)

    def fetch(self, into: Into) -> None:
        for name, target in into.items():
            if isinstance(target, int):
                continue
            target.reshape(-1)[:] = self._range(name, target.nbytes, 0)
            self._counters["bytes_read_back"] += target.nbytes
            self._copied(name, target.nbytes)

    def _copied(self, buffer: str, nbytes: int) -> None:
        if self.program.buffers[buffer].nbytes >= LARGE:
            self._counters["copies"] += 1
            self._counters["bytes_copied"] += nbytes

    def close(self) -> None:
        self._buffers = None
