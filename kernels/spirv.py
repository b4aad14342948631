# SPDX-License-Identifier: Apache-2.0
"""Reads off a SPIR-V module what a driver would have to support: no tool, no dependency.

The numbers are those of the SPIR-V specification, version 1.6, section 3.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass, field

MAGIC = 0x07230203
_HEADER = 5  # words

_EXTENSION, _MEMORY_MODEL, _EXECUTION_MODE, _CAPABILITY = 10, 14, 16, 17
_TYPE_BOOL, _TYPE_INT, _TYPE_FLOAT, _TYPE_VECTOR, _TYPE_MATRIX = 20, 21, 22, 23, 24
_TYPE_ARRAY, _TYPE_STRUCT, _TYPE_POINTER = 28, 30, 32
_CONSTANT, _SPEC_CONSTANT, _VARIABLE, _DECORATE, _MEMBER_DECORATE = 43, 50, 59, 71, 72
_CONTROL_BARRIER = 224
_MODE_LOCAL_SIZE = 17
_DECORATION_BINDING, _DECORATION_OFFSET = 33, 35
_STORAGE_CONSTANT, _STORAGE_UNIFORM, _STORAGE_WORKGROUP = 0, 2, 4
_STORAGE_PUSH, _STORAGE_BUFFER = 9, 12

# Names as VkPhysicalDevice…Features spell what each stands for are the backend's matter.
CAPABILITIES = {
    0: "Matrix", 1: "Shader", 9: "Float16", 10: "Float64", 11: "Int64", 22: "Int16", 39: "Int8",
    61: "GroupNonUniform", 62: "GroupNonUniformVote", 63: "GroupNonUniformArithmetic",
    64: "GroupNonUniformBallot", 65: "GroupNonUniformShuffle", 66: "GroupNonUniformShuffleRelative",
    67: "GroupNonUniformClustered", 68: "GroupNonUniformQuad",
    4433: "StorageBuffer16BitAccess", 4434: "UniformAndStorageBuffer16BitAccess",
    4435: "StoragePushConstant16", 4448: "StorageBuffer8BitAccess",
    4449: "UniformAndStorageBuffer8BitAccess", 5345: "VulkanMemoryModel",
    5347: "PhysicalStorageBufferAddresses", 6016: "DotProductInputAll",
    6017: "DotProductInput4x8Bit", 6018: "DotProductInput4x8BitPacked", 6019: "DotProduct",
    6022: "CooperativeMatrixKHR",
    # What others' shaders ask for; no kernel here does.
    12: "Int64Atomics", 28: "UniformBufferArrayDynamicIndexing",
    29: "SampledImageArrayDynamicIndexing", 30: "StorageBufferArrayDynamicIndexing",
    31: "StorageImageArrayDynamicIndexing", 49: "StorageImageExtendedFormats", 50: "ImageQuery",
    55: "StorageImageReadWithoutFormat", 56: "StorageImageWriteWithoutFormat",
    4423: "SubgroupBallotKHR", 4431: "SubgroupVoteKHR", 4437: "DeviceGroup",
    4441: "VariablePointersStorageBuffer", 4442: "VariablePointers", 4472: "RayQueryKHR",
    5055: "ShaderClockKHR", 5297: "GroupNonUniformPartitionedNV", 5301: "ShaderNonUniform",
    5302: "RuntimeDescriptorArray", 5346: "VulkanMemoryModelDeviceScope",
    5357: "CooperativeMatrixNV", 5394: "CooperativeVectorNV", 6026: "GroupNonUniformRotateKHR",
    6033: "AtomicFloat32AddEXT", 6034: "AtomicFloat64AddEXT",
}  # fmt: skip


@dataclass
class Module:
    """What a compute module asks of a device."""

    capabilities: list[str] = field(default_factory=list)
    extensions: list[str] = field(default_factory=list)
    workgroup: tuple[int, int, int] = (1, 1, 1)
    storage: list[int] = field(default_factory=list)  # bindings that are storage buffers
    uniform: list[int] = field(default_factory=list)
    push_bytes: int = 0
    shared_bytes: int = 0
    barrier: bool = False
    storage_count: int = 0  # storage buffers, each of an array; an array without a size is one
    images: int = 0  # images and samplers


def _string(words: tuple[int, ...]) -> str:
    return struct.pack(f"<{len(words)}I", *words).split(b"\0", 1)[0].decode("utf-8")


class _Types:
    """Sizes of the types that shared memory and push constants are made of."""

    def __init__(self) -> None:
        self.made: dict[int, tuple[int, tuple[int, ...]]] = {}
        self.constants: dict[int, int] = {}
        self.offsets: dict[tuple[int, int], int] = {}

    def size(self, type_id: int) -> int:
        opcode, args = self.made[type_id]
        if opcode == _TYPE_BOOL:
            return 4
        if opcode in (_TYPE_INT, _TYPE_FLOAT):
            return args[0] // 8
        if opcode in (_TYPE_VECTOR, _TYPE_MATRIX):
            return args[1] * self.size(args[0])
        if opcode == _TYPE_ARRAY:
            return self.constants[args[1]] * self.size(args[0])
        if opcode == _TYPE_STRUCT:
            end = 0
            for i, member in enumerate(args):
                end = self.offsets.get((type_id, i), end) + self.size(member)
            return end
        raise ValueError(f"a type of opcode {opcode} has no size here")


def instructions(data: bytes) -> Iterator[tuple[int, tuple[int, ...]]]:
    """The opcode of each instruction of a module, and all words behind its first.

    Raises:
        ValueError: it is no SPIR-V.
    """
    if len(data) < 4 * _HEADER or len(data) % 4:
        raise ValueError("not SPIR-V: the length is no multiple of four words")
    words = struct.unpack(f"<{len(data) // 4}I", data)
    if words[0] != MAGIC:
        raise ValueError("not SPIR-V: wrong magic")
    at = _HEADER
    while at < len(words):
        count, opcode = words[at] >> 16, words[at] & 0xFFFF
        if not count or at + count > len(words):
            raise ValueError("not SPIR-V: an instruction runs past the end")
        yield opcode, words[at + 1 : at + count]
        at += count


def read(data: bytes) -> Module:
    """What a module asks for. Raises as instructions()."""
    module, types = Module(), _Types()
    bindings: dict[int, int] = {}
    variables: list[tuple[int, int, int]] = []  # id, pointed type, storage class
    pointers: dict[int, int] = {}
    for opcode, args in instructions(data):
        if opcode == _CAPABILITY:
            module.capabilities.append(CAPABILITIES.get(args[0], str(args[0])))
        elif opcode == _EXTENSION:
            module.extensions.append(_string(args))
        elif opcode == _EXECUTION_MODE and args[1] == _MODE_LOCAL_SIZE:
            module.workgroup = (args[2], args[3], args[4])
        elif opcode == _DECORATE and args[1] == _DECORATION_BINDING:
            bindings[args[0]] = args[2]
        elif opcode == _MEMBER_DECORATE and args[2] == _DECORATION_OFFSET:
            types.offsets[args[0], args[1]] = args[3]
        elif _TYPE_BOOL <= opcode <= _TYPE_STRUCT:
            types.made[args[0]] = (opcode, args[1:])
        elif opcode == _TYPE_POINTER:
            pointers[args[0]] = args[2]
        elif opcode in (_CONSTANT, _SPEC_CONSTANT):
            types.constants[args[1]] = args[2]
        elif opcode == _VARIABLE:
            variables.append((args[1], pointers[args[0]], args[2]))
        elif opcode == _CONTROL_BARRIER:
            module.barrier = True
    for var, pointed, storage in variables:
        if storage == _STORAGE_WORKGROUP:
            module.shared_bytes += types.size(pointed)
        elif storage == _STORAGE_PUSH:
            module.push_bytes = types.size(pointed)
        elif storage == _STORAGE_BUFFER:
            module.storage.append(bindings.get(var, -1))
            made, parts = types.made.get(pointed, (0, ()))
            module.storage_count += types.constants[parts[1]] if made == _TYPE_ARRAY else 1
        elif storage == _STORAGE_CONSTANT:
            module.images += 1
        elif storage == _STORAGE_UNIFORM:
            module.uniform.append(bindings.get(var, -1))
    module.storage.sort()
    return module
