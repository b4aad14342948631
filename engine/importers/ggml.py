# SPDX-License-Identifier: Apache-2.0
"""The block types of GGML files: which internal format holds each, and the re-packing.

Block layouts follow ggml's `ggml-common.h` (Q4_0, Q4_1, Q5_0, Q5_1, Q8_0: 32 elements a block, held
exactly; k-quants: see `engine/importers/kquants.py`).

Q4_K becomes q4, whose halves hold its scales and minima to 11 bits: less than 0.8 % of a step of
its quants. Q2_K, Q3_K, Q5_K and Q6_K become q8, rounded anew with a scale for each 32: by less than
1/250 of the greatest magnitude among those, an eighth of the step of Q6_K.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from engine.errors import UnsupportedModel
from engine.importers import kquants
from kernels import weights

Raw = npt.NDArray[np.uint8]
Packer = Callable[[str, npt.NDArray[np.float32]], weights.Words]  # a format, a matrix


@dataclass(frozen=True)
class Type:
    """A type: its number in the file, elements and bytes of a block, and the internal format of its
    matrices.
    """

    name: str
    number: int
    block: int
    nbytes: int
    format: str


# Q5_0 has no offset and fits int8 exactly; Q5_1 has one and becomes halves.
TYPES = {
    t.name: t
    for t in (
        Type("F32", 0, 1, 4, "f16"),
        Type("F16", 1, 1, 2, "f16"),
        Type("Q4_0", 2, 32, 18, "q4"),
        Type("Q4_1", 3, 32, 20, "q4"),
        Type("Q5_0", 6, 32, 22, "q8"),
        Type("Q5_1", 7, 32, 24, "f16"),
        Type("Q8_0", 8, 32, 34, "q8"),
        Type("Q2_K", 10, 256, 84, "q8"),
        Type("Q3_K", 11, 256, 110, "q8"),
        Type("Q4_K", 12, 256, 144, "q4"),
        Type("Q5_K", 13, 256, 176, "q8"),
        Type("Q6_K", 14, 256, 210, "q8"),
        Type("BF16", 30, 1, 2, "f16"),
    )
}
BY_NUMBER = {t.number: t for t in TYPES.values()}

# Names of the types that are refused, so that the message can say what the file has.
OTHER_NAMES = {
    9: "Q8_1", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 20: "IQ4_NL",
    21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64",
    29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4",
}  # fmt: skip


def row_bytes(kind: Type, k: int) -> int:
    """Bytes of a row of k elements; k has to be a multiple of the block."""
    return k // kind.block * kind.nbytes


def _half(raw: Raw, at: int) -> npt.NDArray[np.float16]:
    """The half at byte `at` of each block: raw is [n, blocks, bytes]."""
    return np.ascontiguousarray(raw[:, :, at : at + 2]).view("<f2")[:, :, 0].astype(np.float16)


def _nibbles(raw: Raw) -> Raw:
    """16 bytes a block -> 32 quants: low nibbles are elements 0..15, high ones 16..31."""
    eights = np.ascontiguousarray(raw).view(np.uint64)
    halves = np.stack([eights, eights >> np.uint64(4)], axis=2) & np.uint64(0x0F0F0F0F0F0F0F0F)
    return halves.reshape(*raw.shape[:2], 4).view(np.uint8)


def _fifth_bits(raw: Raw) -> Raw:
    """4 bytes a block -> 32 bits, each worth 16."""
    return np.unpackbits(raw, axis=2, bitorder="little") * np.uint8(16)


def vector(kind: Type, raw: Raw) -> npt.NDArray[np.float32]:
    """A float tensor (F32, F16, BF16) as float32.

    Raises:
        KeyError: the type is a block type.
    """
    if kind.name == "BF16":
        return (raw.view("<u2").astype(np.uint32) << 16).view(np.float32)
    return raw.view({"F32": "<f4", "F16": "<f2"}[kind.name]).astype(np.float32)


def pack_rows(
    kind: Type,
    raw: Raw,
    n: int,
    k: int,
    name: str,
    fmt: str = "",
    pack: Packer = weights.pack,
) -> weights.Words:
    """n rows of k elements as they lie in the file -> packed in `fmt`, by default `kind.format`;
    what is rounded anew is by `pack`.

    Raises:
        UnsupportedModel: values that are no finite numbers or do not fit a half.
    """
    if kind.name == "F16" and (fmt or kind.format) == "f16":  # nothing is rounded
        magnitudes = raw.view("<u2") & np.uint16(0x7FFF)  # as whole numbers in the same order
        _check(magnitudes.max().view(np.float16), name)
        return weights.pack_f16(raw.view("<f2").reshape(n, k))
    if kind.block == 1:
        values = vector(kind, raw).reshape(n, k)
        # One pass over the data: the greatest magnitude is NaN or infinite when any value is.
        _check(np.abs(values).max(), name)
        return pack(fmt or kind.format, values)
    if fmt and fmt != kind.format:
        words = pack_rows(kind, raw, n, k, name)
        return pack(fmt, weights.unpack(kind.format, words, n, k))
    blocks = raw.reshape(n, k // kind.block, kind.nbytes)
    if kind.name in kquants.PARTS:
        return _pack_k(kquants.PARTS[kind.name](blocks), kind.format, n, k, name)
    scale = _half(blocks, 0)
    _check(np.abs(scale.astype(np.float32)).max(), name)
    if kind.name == "Q8_0":
        quants = np.ascontiguousarray(blocks[:, :, 2:]).view(np.int8)
        return weights.pack_q8_parts(scale, quants.reshape(n, k))
    if kind.name == "Q4_0":
        low = scale.astype(np.float32) * -8
        _check(np.abs(low).max(), name)
        return weights.pack_q4_parts(scale, low, _nibbles(blocks[:, :, 2:]).reshape(n, k))
    if kind.name == "Q5_0":
        five = _nibbles(blocks[:, :, 6:]) | _fifth_bits(blocks[:, :, 2:6])
        return weights.pack_q8_parts(scale, (five.astype(np.int8) - 16).reshape(n, k))
    low = _half(blocks, 2).astype(np.float32)
    _check(np.abs(low).max(), name)
    if kind.name == "Q4_1":
        return weights.pack_q4_parts(scale, low, _nibbles(blocks[:, :, 4:]).reshape(n, k))
    five = _nibbles(blocks[:, :, 8:]) | _fifth_bits(blocks[:, :, 4:8])
    values = five * scale.astype(np.float32)[:, :, None] + low[:, :, None]
    _check(np.abs(values).max(), name)
    return weights.pack_f16(values.reshape(n, k))


def _pack_k(parts: kquants.Parts, fmt: str, n: int, k: int, name: str) -> weights.Words:
    if fmt == "q4" and parts.minimum is not None:
        _check(np.abs(parts.scale).max(), name)
        _check(np.abs(parts.minimum).max(), name)
        return weights.pack_q4_parts(parts.scale, parts.minimum, parts.quants.reshape(n, k))
    values = parts.values()
    _check(np.abs(values).max(), name)
    return weights.pack_q8(values)


def _check(greatest: Any, name: str) -> None:
    if not greatest <= 65504:  # false for NaN
        raise UnsupportedModel(
            f"The tensor {name} holds values that are no numbers or too large for half precision."
        )
