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

# The fields of onnx.proto3's messages that are read, by their numbers.
_MODEL = {7: "graph", 8: "opset_import"}
_OPSET = {1: "domain", 2: "version"}
_GRAPH = {1: "node", 5: "initializer", 11: "input", 12: "output"}
_NODE = {1: "input", 2: "output", 3: "name", 4: "op_type", 5: "attribute"}
_ATTRIBUTE = {
    1: "name", 2: "f", 3: "i", 4: "s", 5: "t", 7: "floats", 8: "ints", 9: "strings",
}  # fmt: skip
_VALUE_INFO = {1: "name", 2: "type"}
_TYPE, _TENSOR_TYPE, _SHAPE, _DIMENSION = {1: "tensor"}, {2: "shape"}, {1: "dim"}, {1: "dim_value"}
_TENSOR = {
    1: "dims", 2: "data_type", 4: "float_data", 5: "int32_data", 7: "int64_data", 8: "name",
    9: "raw_data", 10: "double_data", 14: "data_location",
}  # fmt: skip
_EXTERNAL = 1  # of data_location
# TensorProto.DataType -> numpy; bfloat16 is read by itself.
_TYPES = {1: "<f4", 2: "u1", 3: "i1", 5: "<i2", 6: "<i4", 7: "<i8", 9: "?", 10: "<f2", 11: "<f8"}
_FLOAT16, _BFLOAT16 = 10, 16


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
    for key, value in _named(data, _MODEL):
        if key == "graph":
            if found:
                raise BadModel("The ONNX file has two graphs.")
            found = True
            _graph(_bytes(value), graph)
        else:
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


def _named(data: memoryview, fields: Mapping[int, str]) -> Iterator[tuple[str, Field]]:
    """Those of a message's fields that have a name here."""
    for number, value in _fields(data):
        if number in fields:
            yield fields[number], value


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
    for key, value in _named(data, _OPSET):
        if key == "domain":
            domain = _text(value)
        elif key == "version":
            version = _int(value)
    return version if domain in ("", "ai.onnx") else 0


def _graph(data: memoryview, graph: OnnxGraph) -> None:
    for key, value in _named(data, _GRAPH):
        if key == "node":
            if len(graph.nodes) >= MAX_NODES:
                raise UnsupportedModel(f"The network has more than {MAX_NODES} nodes.")
            graph.nodes.append(_node(_bytes(value), len(graph.nodes)))
        elif key == "initializer":
            if len(graph.constants) >= MAX_TENSORS:
                raise UnsupportedModel(f"The network has more than {MAX_TENSORS} tensors.")
            name, array = _tensor(_bytes(value))
            graph.constants[name] = array
        elif key == "input":
            name, dims = _value_info(_bytes(value))
            graph.inputs[name] = dims
        elif key == "output":
            graph.outputs.append(_value_info(_bytes(value))[0])
    # Old files list their weights as inputs too.
    graph.inputs = {k: v for k, v in graph.inputs.items() if k not in graph.constants}


def _node(data: memoryview, number: int) -> OnnxNode:
    name, op, inputs, outputs = "", "", [], []
    attrs: dict[str, Any] = {}
    for key, value in _named(data, _NODE):
        if key == "input":
            inputs.append(_text(value))
        elif key == "output":
            outputs.append(_text(value))
        elif key == "name":
            name = _text(value)
        elif key == "op_type":
            op = _text(value)
        elif key == "attribute":
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
    for key, value in _named(data, _ATTRIBUTE):
        if key == "name":
            name = _text(value)
        elif key == "f":
            content = _float(value)
        elif key == "i":
            content = _int(value)
        elif key == "s":
            content = bytes(_bytes(value))
        elif key == "t":
            content = _tensor(_bytes(value))[1]
        elif key == "floats":
            packed = _bytes(value)
            if len(packed) % 4:
                raise BadModel("The ONNX file is damaged: floats have the wrong size.")
            many += [float(v) for v in np.frombuffer(packed, "<f4")]
        elif key == "ints":
            many += _ints(value)
        elif key == "strings":
            many.append(bytes(_bytes(value)))
    return name, content if content is not None else many


def _value_info(data: memoryview) -> tuple[str, list[int]]:
    name, dims = "", []
    for key, value in _named(data, _VALUE_INFO):
        if key == "name":
            name = _text(value)
        else:
            for _, tensor in _named(_bytes(value), _TYPE):
                for _, shape in _named(_bytes(tensor), _TENSOR_TYPE):
                    dims = [_dimension(_bytes(d)) for _, d in _named(_bytes(shape), _SHAPE)]
    return name, dims


def _dimension(data: memoryview) -> int:
    return next((max(0, _int(v)) for _, v in _named(data, _DIMENSION)), 0)


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
    for key, value in _named(data, _TENSOR):
        if key == "dims":
            dims += _ints(value)
        elif key == "data_type":
            kind = _int(value)
        elif key == "float_data":
            floats.append(_floats(value, "<f4"))
        elif key in ("int32_data", "int64_data"):
            ints += _ints(value)
        elif key == "name":
            name = _text(value)
        elif key == "raw_data":
            raw = _bytes(value)
        elif key == "double_data":
            floats.append(_floats(value, "<f8"))
        elif key == "data_location" and value == _EXTERNAL:
            raise UnsupportedModel(f"The tensor {name or '?'} lies in another file.")
    if kind not in _TYPES and kind != _BFLOAT16:
        raise UnsupportedModel(f"The tensor {name} has the type {kind}, which is not read.")
    # With a zero among them nothing else would bound the others.
    most = math.prod(max(1, d) for d in dims[:MAX_RANK])
    if len(dims) > MAX_RANK or any(d < 0 for d in dims) or most > MAX_FILE:
        raise BadModel(f"The tensor {name} has an impossible shape.")
    count = math.prod(dims)
    dtype = np.dtype(_TYPES.get(kind, "<u2"))
    if raw is not None:
        if len(raw) != count * dtype.itemsize:
            raise BadModel(f"The tensor {name} has {len(raw)} bytes for {count} numbers.")
        flat = np.frombuffer(raw, dtype)
    elif floats:
        flat = np.concatenate(floats)
    elif kind in (_FLOAT16, _BFLOAT16):
        flat = np.array([v & 0xFFFF for v in ints], np.uint16).view(dtype)
    else:
        flat = np.array(ints, np.int64).astype(dtype)
    if flat.size != count:
        raise BadModel(f"The tensor {name} has {flat.size} numbers, not {count}.")
    if kind == _BFLOAT16:
        flat = (flat.astype(np.uint32) << 16).view(np.float32)
    return name, flat.reshape(dims)
