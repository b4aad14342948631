# SPDX-License-Identifier: Apache-2.0
"""Shaders that measure a device and belong to no operation, put together as SPIR-V 1.3."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

CHAINS, UNROLL, LOOPS = 4, 4, 256  # vec4 each
COPY_GROUP, COPY_ROW = 128, 1 << 15  # invocations of a workgroup, workgroups of a row of them
FMA_OPERATIONS = LOOPS * CHAINS * UNROLL * 4 * 2  # of an invocation


class _Module:
    """Instructions in order, ids given out as they are wanted."""

    def __init__(self) -> None:
        self.words: list[int] = []
        self.bound = 1

    def id(self) -> int:
        self.bound += 1
        return self.bound - 1

    def put(self, opcode: int, *operands: int) -> None:
        self.words += [len(operands) + 1 << 16 | opcode, *operands]

    def make(self, opcode: int, kind: int, *operands: int) -> int:
        """An instruction with a type and a result."""
        out = self.id()
        self.put(opcode, kind, out, *operands)
        return out

    def type(self, opcode: int, *operands: int) -> int:
        out = self.id()
        self.put(opcode, out, *operands)
        return out

    def code(self) -> bytes:
        words = [0x07230203, 0x00010300, 0, self.bound, 0, *self.words]
        return struct.pack(f"<{len(words)}I", *words)


def _string(text: str) -> Sequence[int]:
    raw = text.encode() + b"\0"
    return struct.unpack(f"<{-(-len(raw) // 4)}I", raw.ljust(-(-len(raw) // 4) * 4, b"\0"))


def _bits(value: float) -> int:
    return int.from_bytes(struct.pack("<f", value), "little")


@dataclass(frozen=True)
class _Compute:
    """Ids of what a compute shader over a buffer of floats has before its code."""

    main: int
    gid: int
    buffer: int
    void: int
    function: int
    uint: int
    real: int
    uvec3: int
    real_p: int


def _compute(m: _Module) -> _Compute:
    """Workgroups of 32; the buffer is binding 1."""
    main, gid, array, block, buf = (m.id() for _ in range(5))
    m.put(14, 0, 1)  # MemoryModel Logical GLSL450
    m.put(15, 5, main, *_string("main"), gid)  # EntryPoint GLCompute
    m.put(16, main, 17, 32, 1, 1)  # LocalSize
    m.put(71, gid, 11, 28)  # BuiltIn GlobalInvocationId
    m.put(71, array, 6, 4)  # ArrayStride
    m.put(71, block, 2)  # Block
    m.put(72, block, 0, 35, 0)  # Offset
    m.put(71, buf, 34, 0)  # DescriptorSet
    m.put(71, buf, 33, 1)  # Binding
    void = m.type(19)
    function = m.type(33, void)
    uint, real = m.type(21, 32, 0), m.type(22, 32)
    uvec3 = m.type(23, uint, 3)
    m.put(29, array, real)
    m.put(30, block, array)
    block_p, real_p, in_p = m.type(32, 12, block), m.type(32, 12, real), m.type(32, 1, uvec3)
    m.put(59, in_p, gid, 1)
    m.put(59, block_p, buf, 12)
    return _Compute(main, gid, buf, void, function, uint, real, uvec3, real_p)


def index_shader() -> bytes:
    """`a[i] = i`: as little as an invocation can do that shows that it ran."""
    m = _Module()
    m.put(17, 1)  # Capability Shader
    c = _compute(m)
    zero = m.make(43, c.uint, 0)
    m.put(54, c.void, c.main, 0, c.function)
    m.put(248, m.id())
    index = m.make(81, c.uint, m.make(61, c.uvec3, c.gid), 0)
    place = m.make(65, c.real_p, c.buffer, zero, index)
    m.put(62, place, m.make(112, c.real, index))  # ConvertUToF
    m.put(253)
    m.put(56)
    return m.code()


def copy_shader() -> bytes:
    """`to[i] = from[i]`, 16 bytes an invocation: bindings 1 and 2, workgroups of COPY_GROUP, i =
    y * COPY_ROW * COPY_GROUP + x.
    """
    m = _Module()
    main, gid, array, block, source, target = (m.id() for _ in range(6))
    m.put(17, 1)  # Capability Shader
    m.put(14, 0, 1)  # MemoryModel Logical GLSL450
    m.put(15, 5, main, *_string("main"), gid)  # EntryPoint GLCompute
    m.put(16, main, 17, COPY_GROUP, 1, 1)  # LocalSize
    m.put(71, gid, 11, 28)  # BuiltIn GlobalInvocationId
    m.put(71, array, 6, 16)  # ArrayStride
    m.put(71, block, 2)  # Block
    m.put(72, block, 0, 35, 0)  # Offset
    for buffer, binding in ((source, 1), (target, 2)):
        m.put(71, buffer, 34, 0)  # DescriptorSet
        m.put(71, buffer, 33, binding)
    void = m.type(19)
    function, uint = m.type(33, void), m.type(21, 32, 0)
    uvec3, uvec4 = m.type(23, uint, 3), m.type(23, uint, 4)
    m.put(29, array, uvec4)
    m.put(30, block, array)
    block_p, uvec4_p, in_p = m.type(32, 12, block), m.type(32, 12, uvec4), m.type(32, 1, uvec3)
    m.put(59, in_p, gid, 1)
    for buffer in (source, target):
        m.put(59, block_p, buffer, 12)
    zero, row = (m.make(43, uint, n) for n in (0, COPY_ROW * COPY_GROUP))
    m.put(54, void, main, 0, function)
    m.put(248, m.id())
    where = m.make(61, uvec3, gid)
    x, y = (m.make(81, uint, where, i) for i in (0, 1))
    index = m.make(128, uint, m.make(132, uint, y, row), x)  # IAdd, IMul
    read, write = (m.make(65, uvec4_p, buffer, zero, index) for buffer in (source, target))
    m.put(62, write, m.make(61, uvec4, read))
    m.put(253)
    m.put(56)
    return m.code()


def triangle_shader() -> bytes:
    """A vertex shader: vertices 0, 1 and 2 make a triangle around all of the target."""
    m = _Module()
    main, number, position = (m.id() for _ in range(3))
    m.put(17, 1)
    m.put(14, 0, 1)
    m.put(15, 0, main, *_string("main"), number, position)  # EntryPoint Vertex
    m.put(71, number, 11, 42)  # BuiltIn VertexIndex
    m.put(71, position, 11, 0)  # BuiltIn Position
    void = m.type(19)
    function = m.type(33, void)
    boolean, whole, real = m.type(20), m.type(21, 32, 1), m.type(22, 32)
    vec4 = m.type(23, real, 4)
    in_p, out_p = m.type(32, 1, whole), m.type(32, 3, vec4)
    m.put(59, in_p, number, 1)
    m.put(59, out_p, position, 3)
    one, two = (m.make(43, whole, n) for n in (1, 2))
    low, high, nil, unit = (m.make(43, real, _bits(x)) for x in (-1.0, 3.0, 0.0, 1.0))
    m.put(54, void, main, 0, function)
    m.put(248, m.id())
    vertex = m.make(61, whole, number)
    x, y = (m.make(169, real, m.make(170, boolean, vertex, n), high, low) for n in (one, two))
    m.put(62, position, m.make(80, vec4, x, y, nil, unit))
    m.put(253)
    m.put(56)
    return m.code()


@dataclass(frozen=True)
class _Fragment:
    """Ids of what a fragment shader has before its code."""

    main: int
    place: int
    colour: int
    ext: int
    void: int
    function: int
    real: int
    vec4: int


def _fragment(m: _Module, components: int) -> _Fragment:
    """It knows where its pixel lies and writes so many numbers to location 0."""
    main, place, colour, ext = (m.id() for _ in range(4))
    m.put(17, 1)  # Capability Shader
    m.put(11, ext, *_string("GLSL.std.450"))
    m.put(14, 0, 1)  # MemoryModel Logical GLSL450
    m.put(15, 4, main, *_string("main"), place, colour)  # EntryPoint Fragment
    m.put(16, main, 7)  # OriginUpperLeft
    m.put(71, place, 11, 15)  # BuiltIn FragCoord
    m.put(71, colour, 30, 0)  # Location
    void = m.type(19)
    function = m.type(33, void)
    real = m.type(22, 32)
    vec4 = m.type(23, real, 4)
    written = real if components == 1 else vec4
    in_p, out_p = m.type(32, 1, vec4), m.type(32, 3, written)
    m.put(59, in_p, place, 1)
    m.put(59, out_p, colour, 3)
    return _Fragment(main, place, colour, ext, void, function, real, vec4)


def column_shader() -> bytes:
    """A fragment shader: a pixel is the number of its column."""
    m = _Module()
    f = _fragment(m, 1)
    half = m.make(43, f.real, _bits(0.5))
    m.put(54, f.void, f.main, 0, f.function)
    m.put(248, m.id())
    x = m.make(81, f.real, m.make(61, f.vec4, f.place), 0)
    m.put(62, f.colour, m.make(131, f.real, x, half))  # FSub
    m.put(253)
    m.put(56)
    return m.code()


def layer_shader(steps: int) -> bytes:
    """A fragment shader: `steps` dependent multiply-adds on where the pixel lies; a faint grey."""
    m = _Module()
    f = _fragment(m, 4)

    def splat(value: float) -> int:
        return m.make(44, f.vec4, *[m.make(43, f.real, _bits(value))] * 4)

    near, little, scale = splat(0.999), splat(1e-3), splat(1e-4)
    m.put(54, f.void, f.main, 0, f.function)
    m.put(248, m.id())
    value = m.make(133, f.vec4, m.make(61, f.vec4, f.place), scale)  # FMul
    for _ in range(steps):
        value = m.make(12, f.vec4, f.ext, 50, value, near, little)  # Fma
    m.put(62, f.colour, value)
    m.put(253)
    m.put(56)
    return m.code()


def fma_shader() -> bytes:
    """SPIR-V 1.3: `a[i]` = the sum of CHAINS vec4 that began near it and were `x / 2 + 1` LOOPS *
    UNROLL times, which makes 2 of every number; workgroups of 32, binding 1.
    """
    m = _Module()
    ext = m.id()
    m.put(17, 1)  # Capability Shader
    m.put(11, ext, *_string("GLSL.std.450"))
    c = _compute(m)
    boolean, vec4 = m.type(20), m.type(23, c.real, 4)
    zero, one, loops = (m.make(43, c.uint, n) for n in (0, 1, LOOPS))

    def splat(value: float) -> int:
        scalar = m.make(43, c.real, _bits(value))
        return m.make(44, vec4, *[scalar] * 4)

    half, unit = splat(0.5), splat(1.0)
    starts = [splat(float(i)) for i in range(CHAINS)]
    m.put(54, c.void, c.main, 0, c.function)
    entry, head, body, again, done = (m.id() for _ in range(5))
    m.put(248, entry)
    index = m.make(81, c.uint, m.make(61, c.uvec3, c.gid), 0)
    place = m.make(65, c.real_p, c.buffer, zero, index)
    value = m.make(61, c.real, place)
    seed = m.make(80, vec4, *[value] * 4)
    begun = [m.make(129, vec4, seed, start) for start in starts]
    m.put(249, head)
    m.put(248, head)
    count, counted = m.id(), m.id()
    chains, ends = [m.id() for _ in range(CHAINS)], [m.id() for _ in range(CHAINS)]
    m.put(245, c.uint, count, zero, entry, counted, again)
    for chain, start, end in zip(chains, begun, ends, strict=True):
        m.put(245, vec4, chain, start, entry, end, again)
    more = m.make(176, boolean, count, loops)  # ULessThan
    m.put(246, done, again, 0)
    m.put(250, more, body, done)
    m.put(248, body)
    now = list(chains)
    for step in range(UNROLL):
        for i, x in enumerate(now):
            out = ends[i] if step == UNROLL - 1 else m.id()
            m.put(12, vec4, out, ext, 50, x, half, unit)  # Fma
            now[i] = out
    m.put(249, again)
    m.put(248, again)
    m.put(128, c.uint, counted, count, one)
    m.put(249, head)
    m.put(248, done)
    total = chains[0]
    for chain in chains[1:]:
        total = m.make(129, vec4, total, chain)
    result = m.make(81, c.real, total, 0)
    for lane in (1, 2, 3):
        result = m.make(129, c.real, result, m.make(81, c.real, total, lane))
    m.put(62, place, result)
    m.put(253)
    m.put(56)
    return m.code()
