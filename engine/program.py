# SPDX-License-Identifier: Apache-2.0
"""A Program: kernel calls over planned buffers, lowered for a target, recorded once, replayed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from kernels.contract import PARAM_WORDS, Groups

# weight: lives in the compiled model, shared by all executables of a WeightSet params: the
# parameter words, written by the host before a slice input/output: written/read by the host; state:
# kept from slice to slice (KV cache); scratch: within a slice
Kind = Literal["weight", "params", "input", "output", "state", "scratch"]


@dataclass(frozen=True)
class Buffer:
    """One buffer, one purpose. An executable may be lent buffers of another one."""

    name: str
    nbytes: int
    kind: Kind


@dataclass(frozen=True)
class Binding:
    """A range of a buffer as an operation sees it; offset is a multiple of 256 bytes."""

    buffer: str
    offset: int = 0
    nbytes: int | None = None  # None: to the end


@dataclass(frozen=True)
class Call:
    """One dispatch. `bindings` are bindings 1.. of the contract; binding 0 is always the params
    buffer, from its byte `params` on.
    """

    op: str
    variant: str
    bindings: tuple[Binding, ...]
    push: bytes
    groups: Groups
    params: int = 0


@dataclass(frozen=True)
class Program:
    """Buffers and named sequences of calls. A slice runs one or more sequences in one submission or
    C call.

    The params buffer is called "params". Every call sees all writes of the calls before it.
    """

    buffers: dict[str, Buffer]
    sequences: dict[str, tuple[Call, ...]]
    meta: dict[str, int | str] = field(default_factory=dict)

    def check(self) -> None:
        """Raises ValueError when a call names an unknown buffer or a range outside it."""
        if self.buffers.get("params", Buffer("", 0, "scratch")).kind != "params":
            raise ValueError("a program needs a buffer 'params' of kind params")
        for seq, calls in self.sequences.items():
            for i, call in enumerate(calls):
                if (
                    call.params % 256
                    or call.params + 4 * PARAM_WORDS > self.buffers["params"].nbytes
                ):
                    raise ValueError(f"{seq}[{i}] {call.op} has its parameters at {call.params}")
                for b in call.bindings:
                    buf = self.buffers.get(b.buffer)
                    if buf is None:
                        raise ValueError(f"{seq}[{i}] {call.op} binds unknown buffer {b.buffer!r}")
                    end = b.offset + (b.nbytes if b.nbytes is not None else buf.nbytes - b.offset)
                    if b.offset % 256 or b.offset >= buf.nbytes or end > buf.nbytes:
                        raise ValueError(f"{seq}[{i}] {call.op} binds {b} outside of {buf}")
