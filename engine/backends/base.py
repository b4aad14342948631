# SPDX-License-Identifier: Apache-2.0
"""The interface that every backend has: a device, a set of weights on it, executables made from
Programs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal, Protocol

import numpy.typing as npt

from engine.errors import InvalidArgument
from engine.program import Program

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Limits:
    """What a device allows; queried, never guessed from a name. Bytes and counts."""

    max_workgroup_invocations: int = 128
    max_workgroup_size: tuple[int, int, int] = (128, 128, 64)
    max_workgroup_count: tuple[int, int, int] = (65535, 65535, 65535)
    max_shared_bytes: int = 16384
    max_storage_buffers: int = 4
    max_push_bytes: int = 128
    max_storage_range: int = 128 << 20
    max_uniform_range: int = 16384
    storage_align: int = 256
    subgroup_size: int = 1


@dataclass(frozen=True)
class DeviceInfo:
    """A device as users see it (`pvrctl devices`) and as lowering sees it."""

    kind: Literal["gpu", "cpu", "null"]
    name: str
    driver: str
    software: bool  # a CPU in disguise (lavapipe and the like), or the CPU itself
    limits: Limits = field(default_factory=Limits)
    features: frozenset[str] = (
        frozenset()
    )  # e.g. "fp16", "int8", "subgroup_arithmetic", "isa:avx512"
    properties: Mapping[str, str | int] = field(
        default_factory=dict
    )  # uuid, driver_version, vendor, node, threads


@dataclass
class RunStats:
    """What one slice cost. device_s is None where the device does not tell; done: how many tokens
    of several it computed when it ended early, None for all.
    """

    wall_s: float
    device_s: float | None = None
    done: int | None = None


class WeightSet(Protocol):
    """Weights placed on the device once, shared by many executables."""

    def nbytes(self) -> int: ...
    def close(self) -> None: ...


LARGE = 64 << 10  # bytes of an input or output from which on it is worth a way of its own
COUNTERS = (
    "submissions",
    "dispatches",
    "bytes_uploaded",
    "bytes_read_back",
    "copies",
    "bytes_copied",
    "bytes_direct",
)

# Outputs to the host: of each buffer the first bytes, as many as its array has (uint8, contiguous).
# A number in its place says that so many bytes will be looked at next.
Into = Mapping[str, Array | int]
NOWHERE: Into = MappingProxyType({})


class Executable(Protocol):
    """A Program recorded on a device, with buffers of its own for everything but weights."""

    def write(self, buffer: str, data: Array | bytes, offset: int = 0) -> None:
        """Host to a params or input buffer. What lies in adopted memory (Backend.adopt) may be read
        with the next slice alone, and has to stay as it is until then.
        """

    def read(self, buffer: str, nbytes: int, offset: int = 0) -> Array:
        """An output (or, for tests, any) buffer to the host: uint8 array, a copy."""

    def look(self, buffer: str, nbytes: int, offset: int = 0) -> Array:
        """As read, but no copy where the host can read the buffer fast as it lies: then the next
        slice changes it, and it may be written to.
        """

    def run(self, *sequences: str, into: Into = NOWHERE) -> RunStats:
        """One slice: the sequences in order, one submission or one C call; then outputs as by
        `fetch`, in the same submission.

        Raises:
            DeviceLost: the device reported loss or did not finish within the backend's deadline.
        """

    def fetch(self, into: Into) -> None:
        """Outputs to the host, straight where the device can write to it (Backend.adopt)."""

    def close(self) -> None: ...


# Buffers of a program that are another executable's: name -> (executable of the same backend, its
# buffer). The lender has to outlive the borrower.
Lent = Mapping[str, tuple[Any, str]]
NOTHING: Lent = MappingProxyType({})


class Adopted(Protocol):
    """Host memory that the device copies from and to as it lies, until it is closed."""

    def close(self) -> None: ...


class Backend(Protocol):
    """A device, opened."""

    info: DeviceInfo

    def weights(self, blobs: Mapping[str, Array]) -> WeightSet:
        """Places named uint8 arrays (often slices of a mapped .pvrm) on the device. The CPU keeps
        views of them.
        """

    def executable(self, program: Program, weights: WeightSet, lent: Lent = NOTHING) -> Executable:
        """Allocates buffers (zeroed), but for those that are lent, and records every sequence.

        Raises:
            OutOfMemory: with figures. PvrError subclasses only.
        """

    def adopt(self, memory: Array, fd: int = -1) -> Adopted | None:
        """Makes host memory known to the device (a frame ring, mapped): what executables write
        from there and fetch to it is then not copied by the host. `fd`: the memfd that it maps
        from its beginning, if it does. None where the driver cannot, or where nothing would be
        gained.
        """

    def counters(self) -> dict[str, int]:
        """submissions, dispatches, bytes_uploaded, bytes_read_back since opening; of large inputs
        and outputs `copies` that the host made and their `bytes_copied`, and `bytes_direct` that
        the device took from adopted memory, or put there (the CPU's kernels: into any memory).
        """

    def close(self) -> None: ...


def checked(program: Program) -> Program:
    """The program, after a look at it.

    Raises:
        InvalidArgument: a call names an unknown buffer or a range outside it.
    """
    try:
        program.check()
    except ValueError as e:
        raise InvalidArgument(str(e)) from e
    return program
