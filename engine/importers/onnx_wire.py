# SPDX-License-Identifier: Apache-2.0
"""ONNX files, read without a library: protobuf's wire format and the messages that a network needs.

Every length is held against what is left of the file; what a message says that nobody needs is
stepped over. The file is copied into memory first, since one that is mapped and becomes shorter
would end the process; tensors are views of the copy where they lie there as raw data.
"""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from engine import memory
from engine.errors import BadModel, UnsupportedModel
from engine.importers.source import pread

Array = npt.NDArray[Any]
Field = int | memoryview

MAX_FILE = 1 << 31  # bytes, protobuf's own bound
MAX_NODES, MAX_TENSORS, MAX_RANK = 20000, 100000, 8
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
# TensorProto.DataType -> numpy; bfloat16 (16) is read by itself.
_TYPES = {1: "<f4", 2: "u1", 3: "i1", 5: "<i2", 6: "<i4", 7: "<i8", 9: "?", 10: "<f2", 11: "<f8"}
_BFLOAT16 = 16


@dataclass(frozen=True)
class OnnxNode:
    """An operator's use. Attributes are int, float, bytes, lists of these, or arrays."""

    name: str
    op: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attrs: Mapping[str, Any]


@dataclass
class OnnxGraph:
    """A model's graph: nodes in order, constants by name, inputs with their dimensions (0: any)."""

    nodes: list[OnnxNode] = field(default_factory=list)
    constants: dict[str, Array] = field(default_factory=dict)
    inputs: dict[str, list[int]] = field(default_factory=dict)
    outputs: list[str] = field(default_factory=list)
    opset: int = 0


def read(fd: int) -> OnnxGraph:
    """The graph of a file. The descriptor stays the caller's.

    Raises:
        BadModel: no ONNX file, damaged or cut short.
        OutOfMemory: there is no room for it.
        UnsupportedModel: weights in another file, or of a type that is not read.
    """
    size = os.fstat(fd).st_size
    if size == 0:
        raise BadModel("The file is empty.")
    if size > MAX_FILE:
        raise BadModel(f"The ONNX file has {size} bytes; the format has room for {MAX_FILE}.")
    memory.admit({"ONNX file": size})
    data = memoryview(pread(fd, size, 0).data).toreadonly()
    graph = OnnxGraph()
    found = False
    for number, value in _fields(data):
        if number == 7:
            if found:
                raise BadModel("The ONNX file has two graphs.")
            found = True
            _graph(_bytes(value), graph)
        elif number == 8:
            graph.opset = max(graph.opset, _opset(_bytes(value)))
    if not found or not graph.nodes:
        raise BadModel("The file is no ONNX model.")
    return graph


def _varint(data: memoryview, at: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        if at >= len(data):
            raise BadModel("The ONNX file is cut short.")
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value & 0xFFFFFFFFFFFFFFFF, at
    raise BadModel("The ONNX file is damaged: a number has no end.")


def _fields(data: memoryview) -> Iterator[tuple[int, Field]]:
    """Numbers and values of a message's fields: whole numbers, or bytes (of 4 and 8 for floats)."""
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        kind, number = key & 7, key >> 3
        if kind == _VARINT:
            value, at = _varint(data, at)
            yield number, value
            continue
        if kind == _BYTES:
            length, at = _varint(data, at)
        elif kind in (_FIXED32, _FIXED64):
            length = 4 if kind == _FIXED32 else 8
        else:
            raise BadModel("The file is no ONNX model, or it is damaged.")
        if length > len(data) - at:
            raise BadModel("The ONNX file is cut short.")
        yield number, data[at : at + length]
        at += length


def _bytes(value: Field) -> memoryview:
    if isinstance(value, int):
        raise BadModel("The ONNX file is damaged: a part has the wrong kind.")
    return value


def _int(value: Field) -> int:
    if not isinstance(value, int):
        raise BadModel("The ONNX file is damaged: a number has the wrong kind.")
    return value - (1 << 64) if value >= 1 << 63 else value


def _text(value: Field) -> str:
    return bytes(_bytes(value)).decode("utf-8", "replace")


def _ints(value: Field) -> list[int]:
    """A repeated number: one, or packed ones."""
    if isinstance(value, int):
        return [_int(value)]
    found, at = [], 0
    while at < len(value):
        number, at = _varint(value, at)
        found.append(_int(number))
    return found


def _opset(data: memoryview) -> int:
    domain, version = "", 0
    for number, value in _fields(data):
        if number == 1:
            domain = _text(value)
        elif number == 2:
            version = _int(value)
    return version if domain in ("", "ai.onnx") else 0


def _graph(data: memoryview, graph: OnnxGraph) -> None:
    for number, value in _fields(data):
        if number == 1:
            if len(graph.nodes) >= MAX_NODES:
                raise UnsupportedModel(f"The network has more than {MAX_NODES} nodes.")
            graph.nodes.append(_node(_bytes(value), len(graph.nodes)))
        elif number == 5:
            if len(graph.constants) >= MAX_TENSORS:
                raise UnsupportedModel(f"The network has more than {MAX_TENSORS} tensors.")
            name, array = _tensor(_bytes(value))
            graph.constants[name] = array
        elif number == 11:
            name, dims = _value_info(_bytes(value))
            graph.inputs[name] = dims
        elif number == 12:
            graph.outputs.append(_value_info(_bytes(value))[0])
    # Old files list their weights as inputs too.
    graph.inputs = {k: v for k, v in graph.inputs.items() if k not in graph.constants}


def _node(data: memoryview, number: int) -> OnnxNode:
    name, op, inputs, outputs = "", "", [], []
    attrs: dict[str, Any] = {}
    for key, value in _fields(data):
        if key == 1:
            inputs.append(_text(value))
        elif key == 2:
            outputs.append(_text(value))
        elif key == 3:
            name = _text(value)
        elif key == 4:
            op = _text(value)
        elif key == 5:
            attr, content = _attribute(_bytes(value))
            attrs[attr] = content
    called = name or (outputs[0] if outputs else f"number {number}")
    return OnnxNode(called, op, tuple(inputs), tuple(outputs), attrs)


def _float(value: Field) -> float:
    data = _bytes(value)
    if len(data) != 4:
        raise BadModel("The ONNX file is damaged: a float has the wrong size.")
    number: float = struct.unpack("<f", data)[0]
    return number


def _attribute(data: memoryview) -> tuple[str, Any]:
    name = ""
    content: Any = None
    many: list[Any] = []
    for number, value in _fields(data):
        if number == 1:
            name = _text(value)
        elif number == 2:
            content = _float(value)
        elif number == 3:
            content = _int(value)
        elif number == 4:
            content = bytes(_bytes(value))
        elif number == 5:
            content = _tensor(_bytes(value))[1]
        elif number == 7:
            packed = _bytes(value)
            if len(packed) % 4:
                raise BadModel("The ONNX file is damaged: floats have the wrong size.")
            many += [float(v) for v in np.frombuffer(packed, "<f4")]
        elif number == 8:
            many += _ints(value)
        elif number == 9:
            many.append(bytes(_bytes(value)))
    return name, content if content is not None else many


def _value_info(data: memoryview) -> tuple[str, list[int]]:
    name, dims = "", []
    for number, value in _fields(data):
        if number == 1:
            name = _text(value)
        elif number == 2:
            for kind, tensor in _fields(_bytes(value)):
                for part, shape in _fields(_bytes(tensor)) if kind == 1 else ():
                    if part == 2:
                        dims = [_dimension(_bytes(d)) for n, d in _fields(_bytes(shape)) if n == 1]
    return name, dims


def _dimension(data: memoryview) -> int:
    return next((max(0, _int(v)) for n, v in _fields(data) if n == 1), 0)


def _floats(value: Field, dtype: str) -> Array:
    data = _bytes(value)
    if len(data) % np.dtype(dtype).itemsize:
        raise BadModel("The ONNX file is damaged: numbers are cut off.")
    return np.frombuffer(data, dtype)


def _tensor(data: memoryview) -> tuple[str, Array]:
    name, kind, dims = "", 0, []
    raw: memoryview | None = None
    floats: list[Array] = []
    ints: list[int] = []
    for number, value in _fields(data):
        if number == 1:
            dims += _ints(value)
        elif number == 2:
            kind = _int(value)
        elif number == 4:
            floats.append(_floats(value, "<f4"))
        elif number in (5, 7):
            ints += _ints(value)
        elif number == 8:
            name = _text(value)
        elif number == 9:
            raw = _bytes(value)
        elif number == 10:
            floats.append(_floats(value, "<f8"))
        elif number == 14 and value == 1:
            raise UnsupportedModel(f"The tensor {name or '?'} lies in another file.")
    if kind not in _TYPES and kind != _BFLOAT16:
        raise UnsupportedModel(f"The tensor {name} has the type {kind}, which is not read.")
    # With a zero among them nothing else would bound the others.
    most = math.prod(max(1, d) for d in dims[:MAX_RANK])
    if len(dims) > MAX_RANK or any(d < 0 for d in dims) or most > MAX_FILE:
        raise BadModel(f"The tensor {name} has an impossible shape.")
    count = 1
    for d in dims:
        count *= d
    dtype = np.dtype(_TYPES.get(kind, "<u2"))
    if raw is not None:
        if len(raw) != count * dtype.itemsize:
            raise BadModel(f"The tensor {name} has {len(raw)} bytes for {count} numbers.")
        flat = np.frombuffer(raw, dtype)
    elif floats:
        flat = np.concatenate(floats)
    elif kind in (10, _BFLOAT16):
        flat = np.array([v & 0xFFFF for v in ints], np.uint16).view(dtype)
    else:
        flat = np.array(ints, np.int64).astype(dtype)
    if flat.size != count:
        raise BadModel(f"The tensor {name} has {flat.size} numbers, not {count}.")
    if kind == _BFLOAT16:
        flat = (flat.astype(np.uint32) << 16).view(np.float32)
    return name, flat.reshape(dims)
