# SPDX-License-Identifier: Apache-2.0
"""Small networks as files, and their results in numpy.

ONNX is written field by field as protobuf has it, ncnn's pair as text and raw floats.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from engine.graph import Node
from engine.video.convnet_graph import INPUT, Net
from kernels.resize.op import along

Array = npt.NDArray[Any]


def varint(n: int) -> bytes:
    n &= (1 << 64) - 1
    out = b""
    while n >= 0x80:
        out += bytes([n & 0x7F | 0x80])
        n >>= 7
    return out + bytes([n])


def number(field: int, n: int) -> bytes:
    return varint(field << 3) + varint(n)


def part(field: int, data: bytes | str) -> bytes:
    data = data.encode() if isinstance(data, str) else data
    return varint(field << 3 | 2) + varint(len(data)) + data


_TYPES = {"float32": 1, "int8": 3, "int64": 7, "float16": 10}


def tensor(name: str, array: Array) -> bytes:
    """A TensorProto with raw data."""
    out = b"".join(number(1, d) for d in array.shape)
    return out + number(2, _TYPES[array.dtype.name]) + part(8, name) + part(9, array.tobytes())


def _attribute(name: str, value: Any) -> bytes:
    out = part(1, name)
    if isinstance(value, bool | int):
        return out + number(3, int(value)) + number(20, 2)
    if isinstance(value, float):
        return out + varint(2 << 3 | 5) + struct.pack("<f", value) + number(20, 1)
    if isinstance(value, str):
        return out + part(4, value) + number(20, 3)
    if isinstance(value, np.ndarray):
        return out + part(5, tensor("", value)) + number(20, 4)
    return out + b"".join(number(8, v) for v in value) + number(20, 7)


def node(op: str, inputs: str, outputs: str, **attrs: Any) -> bytes:
    """A NodeProto; names are separated by blanks, `-` is no input. It is called like its output."""
    out = b"".join(part(1, n.replace("-", "")) for n in inputs.split())
    out += b"".join(part(2, n) for n in outputs.split())
    out += part(3, f"/{outputs.split()[0]}") + part(4, op)
    return out + b"".join(part(5, _attribute(k, v)) for k, v in attrs.items())


def _value(name: str, dims: Sequence[int]) -> bytes:
    shape = b"".join(part(1, number(1, d) if d else part(2, "n")) for d in dims)
    return part(1, name) + part(2, part(1, number(1, 1) + part(2, shape)))


def onnx(
    nodes: Sequence[bytes],
    tensors: Mapping[str, Array],
    channels: int = 3,
    size: tuple[int, int] = (0, 0),
    opset: int = 17,
) -> bytes:
    """A model from `x` [1, channels, any, any] to `y`."""
    graph = b"".join(part(1, n) for n in nodes) + part(2, "g")
    graph += b"".join(part(5, tensor(n, a)) for n, a in tensors.items())
    graph += part(11, _value("x", (1, channels, *size))) + part(
        12, _value("y", (1, channels, 0, 0))
    )
    return number(1, 8) + part(2, "test") + part(7, graph) + part(8, number(2, opset))


def random(rng: np.random.Generator, *shape: int, scale: float = 1.0) -> Array:
    return (scale * rng.standard_normal(shape)).astype(np.float32)


def weights(rng: np.random.Generator, cout: int, cin: int, k: int) -> Array:
    return random(rng, cout, cin, k, k, scale=1 / (k * cin**0.5))


# Operators in numpy, on [channels, rows, columns].


def conv(x: Array, w: Array, bias: Array | float = 0.0) -> Array:
    k = w.shape[2]
    r = k // 2
    padded = np.pad(x.astype(np.float64), ((0, 0), (r, r), (r, r)))
    out = np.zeros((w.shape[0], *x.shape[1:]))
    for a in range(k):
        for b in range(k):
            window = padded[:, a : a + x.shape[1], b : b + x.shape[2]]
            out += np.einsum("oc,chw->ohw", w[:, :, a, b], window)
    return out + np.reshape(bias, (-1, 1, 1))


def prelu(x: Array, slope: Array | float) -> Array:
    return np.where(x > 0, x, np.reshape(slope, (-1, 1, 1)) * x)


def sigmoid(x: Array) -> Array:
    out: Array = 1 / (1 + np.exp(-x))
    return out


def shuffle(x: Array, s: int, deep: bool = False) -> Array:
    c, h, w = x.shape[0] // (s * s), x.shape[1], x.shape[2]
    if deep:
        cut = x.reshape(s, s, c, h, w).transpose(2, 3, 0, 4, 1)
    else:
        cut = x.reshape(c, s, s, h, w).transpose(0, 3, 1, 4, 2)
    return cut.reshape(c, h * s, w * s)


def unshuffle(x: Array, s: int, deep: bool = False) -> Array:
    c, h, w = x.shape[0], x.shape[1] // s, x.shape[2] // s
    cut = x.reshape(c, h, s, w, s)
    order = (2, 4, 0, 1, 3) if deep else (0, 2, 4, 1, 3)
    return cut.transpose(order).reshape(c * s * s, h, w)


def nearest(x: Array, s: int) -> Array:
    return x.repeat(s, 1).repeat(s, 2)


def evaluate(net: Net, x: Array) -> Array:
    """A Net's result for [channels, rows, columns], node by node."""
    values: dict[str, Array] = {INPUT: x.astype(np.float64)}
    for n in net.nodes:
        values[n.output] = _node(net, n, [values[v] for v in n.inputs])
        assert len(values[n.output]) == net.values[n.output].channels
    return values[net.output]


def _node(net: Net, n: Node, given: list[Array]) -> Array:
    x, attrs = given[0], n.attrs
    if n.op == "conv":
        return _conv(net, n, given)
    if n.op == "act":
        slope = net.array(n, 0) if n.weights else 1.0
        return _act(str(attrs["act"]), x, slope)
    if n.op == "affine":
        return x * net.array(n, 0).reshape(-1, 1, 1) + net.array(n, 1).reshape(-1, 1, 1)
    if n.op == "sum":
        return float(attrs["alpha"]) * x + float(attrs["beta"]) * given[1]
    if n.op == "product":
        return x * given[1]
    if n.op == "concat":
        return np.concatenate(given)
    if n.op == "slice":
        return x[n.int("begin") : n.int("end")]
    if n.op == "shuffle":
        return (unshuffle if attrs["down"] else shuffle)(x, n.int("s"), bool(attrs["deep"]))
    assert n.op == "resize"
    sizes = [size * n.int("num") // n.int("den") for size in x.shape[1:]]
    (rows, down), (columns, across) = (
        along(net.array(n, 0), attrs, size, source)
        for size, source in zip(sizes, x.shape[1:], strict=True)
    )
    tall = np.einsum("cytx,yt->cyx", x[:, rows], down)
    out = np.einsum("cyxt,xt->cyx", tall[:, :, columns], across)
    return out + given[1] if attrs["residual"] else out


def _conv(net: Net, n: Node, given: list[Array]) -> Array:
    out = conv(given[0], net.array(n, 0), net.array(n, 1))
    if n.attrs["act"] == "gate":
        return (out + given[1]) * (sigmoid(out) - 0.5)
    out = _act(str(n.attrs["act"]), out, net.array(n, 2))
    return out + given[1] if n.attrs["residual"] else out


def _act(act: str, x: Array, slope: Array | float) -> Array:
    if act == "slope":
        return prelu(x, slope)
    return x * sigmoid(x) if act == "silu" else sigmoid(x)
