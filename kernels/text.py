# SPDX-License-Identifier: Apache-2.0
"""What the text operations' contracts share: views of buffers, formats as variants, dispatch
sizes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy.typing as npt

from kernels.contract import FORMATS, Groups, Variant

MAX_GROUPS = 65535  # an axis, on every Vulkan device
FORMAT_NAMES = {code: name for name, code in FORMATS.items()}

Buffers = Mapping[str, npt.NDArray[Any]]
Push = Mapping[str, Any]


def view(array: npt.NDArray[Any], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """A contiguous array's bytes as a flat array of another type; writes go through."""
    if not array.flags.c_contiguous:
        raise ValueError("buffers have to be contiguous")
    return array.reshape(-1).view(dtype)


def format_variants(workgroup: int, shared: int = 0) -> tuple[Variant, ...]:
    """A baseline variant for each weight format, named after it."""
    return tuple(
        Variant(name, (workgroup, 1, 1), {f"FMT_{name.upper()}": "1"}, shared=shared)
        for name in ("q4", "q8", "f16")
    )


SUBGROUPS = frozenset({"subgroup_basic", "subgroup_arithmetic"})


def wide_variants(
    baseline: Variant, workgroup: int, shared: int, needs: frozenset[str] = SUBGROUPS
) -> tuple[Variant, ...]:
    """A baseline variant and two with more invocations, for larger GPUs: one that reduces in
    `shared` bytes of shared memory alone, one (`_sub`) that `needs` subgroups.
    """
    stem = "" if baseline.name == "base" else f"{baseline.name}_"
    defines = {**baseline.defines, "WIDE": "1"}
    size = (workgroup, 1, 1)
    plain = Variant(f"{stem}wide", size, defines, shared=shared, baseline=False)
    defines = {**defines, "WIDE_SUBGROUP": "1"}
    sub = Variant(f"{stem}wide_sub", size, defines, needs, shared, baseline=False)
    return (baseline, plain, sub)


def packed_variants(
    baseline: Variant, workgroup: int, shared: int, rounded: int, needs: frozenset[str]
) -> tuple[Variant, ...]:
    """Variants that round activations (kernels/include/packed.glsl): to halves, and for q4 and q8
    to int8. `rounded` is how many of them are in shared memory beside `shared` bytes.
    """
    out = []
    for name, feature, each in (("fp16", "fp16", 2), ("int_dot", "int_dot", 1)):
        if name == "int_dot" and baseline.name == "f16":
            continue
        defines = {**baseline.defines, "PACKED_HALF" if each == 2 else "PACKED_INT8": "1"}
        out.append(
            Variant(
                f"{baseline.name}_{name}",
                (workgroup, 1, 1),
                defines,
                needs | {feature},
                shared + each * rounded,
                baseline=False,
            )
        )
    return tuple(out)


def most_groups(push: Push) -> Groups:
    """Groups that each axis takes on the device, as `Contract.groups` is told."""
    most: Groups = push.get("most", (MAX_GROUPS, MAX_GROUPS, MAX_GROUPS))
    return most


def spread(n: int, most: int) -> tuple[int, int]:
    """n groups over two axes, at most `most` on the first. A shader's group number is second *
    gl_NumWorkGroups.first + first, and may be n or more."""
    second = max(1, -(-n // most))
    return -(-n // second), second


def rows_and_tokens(n: int, workgroup: int, push: Push) -> Groups:
    """A workgroup for each `workgroup` of n elements, on the x axis, and each token, on the axes y
    and z (pvr_token_group() in pvr.glsl)."""
    return (-(-n // workgroup), *spread(push["tokens"], most_groups(push)[1]))
