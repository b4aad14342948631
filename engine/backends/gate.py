# SPDX-License-Identifier: Apache-2.0
"""The capability gate: what a SPIR-V and its calls ask for, held against what a device allows.

Some drivers never return from compiling what they cannot do, and none says no to a dispatch or a
binding that is too large. So nothing is left to them: what does not fit is not handed over, and is
named with its reason. No driver call in here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from engine.backends.base import Limits
from kernels.contract import Contract, Groups, Variant

# SPIR-V capability -> feature of DeviceInfo that has to be there ("" none).
CAPABILITY_FEATURE = {
    "Matrix": "",
    "Shader": "",
    "Float16": "fp16",
    "Float64": "fp64",
    "Int8": "int8",
    "Int16": "int16",
    "Int64": "int64",
    "StorageBuffer8BitAccess": "storage8",
    "StorageBuffer16BitAccess": "storage16",
    "VulkanMemoryModel": "memory_model",
    "DotProduct": "int_dot",
    "DotProductInput4x8Bit": "int_dot",
    "DotProductInput4x8BitPacked": "int_dot",
    "DotProductInputAll": "int_dot",
    "CooperativeMatrixKHR": "coopmat",
    "PhysicalStorageBufferAddresses": "buffer_address",
    "GroupNonUniform": "subgroup_basic",
    "GroupNonUniformVote": "subgroup_vote",
    "GroupNonUniformArithmetic": "subgroup_arithmetic",
    "GroupNonUniformBallot": "subgroup_ballot",
    "GroupNonUniformShuffle": "subgroup_shuffle",
    "GroupNonUniformShuffleRelative": "subgroup_shuffle_relative",
    "GroupNonUniformClustered": "subgroup_clustered",
    "GroupNonUniformQuad": "subgroup_quad",
}
# Each adds nothing beyond the capabilities that come with it.
_KNOWN_EXTENSIONS = {
    "SPV_KHR_storage_buffer_storage_class",
    "SPV_KHR_8bit_storage",
    "SPV_KHR_16bit_storage",
    "SPV_KHR_integer_dot_product",
    "SPV_KHR_physical_storage_buffer",
    "SPV_KHR_vulkan_memory_model",
    "SPV_KHR_cooperative_matrix",
}

Range = tuple[str, int, int]  # buffer, first byte, end


def misfits(
    entry: Mapping[str, Any], limits: Limits, features: frozenset[str]
) -> Iterator[tuple[str, str]]:
    """Every reason why a compiled variant (an entry of kernels.manifest()) must not be handed to a
    driver: (what it is about, the reason in words).
    """
    for capability in entry["capabilities"]:
        feature = CAPABILITY_FEATURE.get(capability)
        if feature is None:
            what = f"it needs the SPIR-V capability {capability}, which is not known here"
            yield "capability", what
        elif feature and feature not in features:
            yield "capability", f"it needs {feature}"
    for unknown in sorted(set(entry["extensions"]) - _KNOWN_EXTENSIONS):
        yield "extension", f"it needs the SPIR-V extension {unknown}"
    if lacking := sorted(set(entry["needs"]) - features):
        yield "capability", f"it needs {', '.join(lacking)}"
    x, y, z = entry["workgroup"]
    most = limits.max_workgroup_invocations
    if x * y * z > most:
        yield "workgroup", f"{x * y * z} invocations a workgroup, {most} allowed"
    if any(a > b for a, b in zip((x, y, z), limits.max_workgroup_size, strict=True)):
        allowed = "x".join(map(str, limits.max_workgroup_size))
        yield "workgroup", f"a workgroup of {x}x{y}x{z}, {allowed} allowed"
    for what, key, unit, allowed_ in (
        ("shared", "shared_bytes", "bytes shared", limits.max_shared_bytes),
        ("bindings", "bindings", "storage buffers", limits.max_storage_buffers),
        ("push", "push_bytes", "bytes of push constants", limits.max_push_bytes),
    ):
        if entry[key] > allowed_:
            yield what, f"{entry[key]} {unit}, {allowed_} allowed"


def misfit(entry: Mapping[str, Any], limits: Limits, features: frozenset[str]) -> str:
    """The first of `misfits` in words; "" when the variant may be handed to the driver."""
    return next((why for _, why in misfits(entry, limits, features)), "")


def variant_misfit(
    contract: Contract, variant: Variant, limits: Limits, features: frozenset[str]
) -> str:
    """The same from what op.py says alone: for devices that run no SPIR-V, and before it is
    looked at.
    """
    entry = {
        "capabilities": (),
        "extensions": (),
        "needs": variant.needs,
        "workgroup": variant.workgroup,
        "shared_bytes": variant.shared,
        "bindings": contract.storage_count(variant),
        "push_bytes": contract.push_bytes(variant),
    }
    return misfit(entry, limits, features)


def call_misfit(
    contract: Contract,
    variant: Variant,
    push: bytes,
    groups: Groups,
    ranges: Sequence[Range],
    limits: Limits,
) -> str:
    """Why one call must not be recorded, "" when it may: it breaks its contract, has more groups
    than an axis takes, or binds more than one binding holds.
    """
    if len(ranges) != len(contract.bindings):
        return f"it takes {len(contract.bindings)} bindings, got {len(ranges)}"
    if len(push) != 4 * len(contract.push):
        return f"it takes {4 * len(contract.push)} bytes of push constants, got {len(push)}"
    most = limits.max_workgroup_count
    if any(not 0 < g <= m for g, m in zip(groups, most, strict=True)):
        return f"{groups} groups, at most {most}"
    for bind, (name, begin, end) in zip(contract.bindings, ranges, strict=True):
        if end - begin > limits.max_storage_range and bind.name not in variant.addressed:
            return (
                f"it binds {end - begin} bytes of {name!r}, "
                f"at most {limits.max_storage_range} go into one binding"
            )
        if begin % max(limits.storage_align, 1):
            return (
                f"it binds {name!r} from byte {begin} on, "
                f"which is no multiple of {limits.storage_align}"
            )
    return ""
