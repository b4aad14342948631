# SPDX-License-Identifier: Apache-2.0
"""What an operation promises, the same for GLSL, C and the numpy reference.

Binding 0 of every operation is the parameter buffer (a uniform buffer of 16 u32 in GLSL); bindings
1 and up are storage buffers, four at most in a baseline variant. Push constants are 32-bit words in
the order of `push`.

An operation is the folder kernels/<name>/ with op.py (which sets OP to its Contract), op.comp and
op.c; the build finds it there. op.py may import numpy, which is a build requirement, and modules of
`kernels`, nothing else: the build imports it for the variants. op.comp is compiled once a variant
with the variant's defines and PVR_WG_X/Y/Z (see kernels/include/pvr.glsl), op.c once an instruction
set with PVR_ISA (see pvr.h). The build refuses a SPIR-V that asks for more than op.py says, or a
baseline variant outside of the limits in docs/architecture.md.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Access = Literal["r", "w", "rw"]
Word = Literal["u32", "f32"]  # of a push constant
Groups = tuple[int, int, int]

PARAM_WORDS = 16
N_TOKENS, POS0, LAST_ROW = 0, 1, 2

FORMATS = {"f16": 0, "q8": 1, "q4": 2, "f32": 3}


@dataclass(frozen=True)
class Bind:
    """A storage buffer of an operation."""

    name: str
    access: Access


@dataclass(frozen=True)
class Variant:
    """One compiled form of an operation's GLSL.

    `defines` go to the compiler, `needs` are device features (names as in DeviceInfo.features)
    that must be there, `workgroup` is the local size, `shared` the bytes of shared memory.

    Bindings that are `addressed` are not bound but reached by their addresses, 8 bytes each, which
    follow the contract's push constants from the next multiple of 8 on; they may be larger than
    any binding. The storage buffers that are left are numbered without them. `scratch(push)` is
    how many bytes of memory a call wants for itself, in the binding after the last: zeroed once,
    not touched by others while the call runs, and to be left as the next call has to find it.
    """

    name: str
    workgroup: Groups
    defines: Mapping[str, str] = field(default_factory=dict)
    needs: frozenset[str] = frozenset()
    shared: int = 0
    baseline: bool = True
    addressed: tuple[str, ...] = ()
    scratch: Callable[[Mapping[str, Any]], int] | None = None

    @property
    def rounds(self) -> bool:
        """Does it round what it multiplies to halves or int8?"""
        return bool(self.needs & {"fp16", "int_dot", "coopmat"})


@dataclass(frozen=True)
class Contract:
    """An operation.

    `groups(push, variant)` gives the dispatch size for a dict of push constants plus the key
    `tokens` (the most tokens that the recorded call has to serve) and, where a device's own are
    known, `most` (groups that each axis takes; 65535 without it). `reference(params, buffers,
    push)` is the numpy form: it gets the 16 parameter words (uint32), the bindings by name and the
    push constants by name, and writes its outputs in place. A binding comes as a flat, contiguous
    array of bytes or of any number type and may be longer than needed; the reference takes a view
    of the type that it means.
    """

    name: str
    bindings: tuple[Bind, ...]
    push: tuple[tuple[str, Word], ...]
    variants: tuple[Variant, ...]
    groups: Callable[[Mapping[str, Any], Variant], Groups]
    reference: Callable[..., None]

    def pack(self, **values: float | int) -> bytes:
        """Push constants as bytes.

        Raises:
            TypeError: a name is missing or unknown.
        """
        names = [n for n, _ in self.push]
        if set(values) != set(names):
            raise TypeError(f"{self.name} takes push constants {names}, got {sorted(values)}")
        layout = "<" + "".join("I" if t == "u32" else "f" for _, t in self.push)
        return struct.pack(layout, *(values[n] for n in names))

    def unpack(self, push: bytes) -> dict[str, float | int]:
        """The push constants by name; the inverse of pack."""
        layout = "<" + "".join("I" if t == "u32" else "f" for _, t in self.push)
        return dict(zip((n for n, _ in self.push), struct.unpack(layout, push), strict=True))

    def storage(self, variant: Variant) -> tuple[int, ...]:
        """Which of `bindings` a variant has bound, by their places in it."""
        return tuple(i for i, b in enumerate(self.bindings) if b.name not in variant.addressed)

    def storage_count(self, variant: Variant) -> int:
        """Storage buffers that a variant has bound, its scratch memory among them."""
        return len(self.storage(variant)) + (variant.scratch is not None)

    def push_bytes(self, variant: Variant) -> int:
        """Push constants of a variant, addresses among them."""
        words = 4 * len(self.push)
        return ceil_div(words, 8) * 8 + 8 * len(variant.addressed) if variant.addressed else words

    def variant(self, name: str) -> Variant:
        """The variant of that name.

        Raises:
            KeyError: there is none.
        """
        for v in self.variants:
            if v.name == name:
                return v
        raise KeyError(f"{self.name} has no variant {name!r}")


def ceil_div(a: int, b: int) -> int:
    """a / b rounded up."""
    return -(-a // b)
