# SPDX-License-Identifier: Apache-2.0
"""A decoder of tools/random_gguf.py as an ONNX model, of the operators of which onnxruntime's own
generative models are made (onnxruntime-genai's model builder, for CPUs).

Products are MatMulNBits in blocks of 32, which hold the very weights of Q4_0 and Q8_0; scales are
floats. q, k and v are one product, the head is that of the last token alone. Attention is
GroupQueryAttention with the rotation in it, K and V are float32, and past and present may be one
buffer. Weights lie in a file beside the model: protobuf ends at 2 GB.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import gguf
import numpy as np
import numpy.typing as npt

from tools.random_gguf import WEIGHTS, Shape

Array = npt.NDArray[Any]


class Missing(Exception):
    """onnxruntime is not here, or does not run a model; in words."""


BITS = {"q4_0": 4, "q8_0": 8}
BLOCK = 32
# What MatMulNBits makes of activations: int8 (4), or nothing (0: it computes in float32). Of 8 bits
# the second unpacks the whole matrix for each token, 30 times slower.
ACCURACIES = {"q4_0": (4, 0), "q8_0": (4,)}
POSITIONS = 512  # rows of the tables of the rotation
_PAGE = 4096  # tensors begin at one, to be mapped
_ROWS = 4096  # of an embedding, at a time
_EPSILON = 1e-5


def blocks(raw: npt.NDArray[np.uint8], bits: int) -> tuple[Array, Array]:
    """MatMulNBits' form of a matrix: uint8 [rows, blocks, 4 * bits], float32 [rows, blocks].

    `raw`: uint8 [rows, bytes of a row] of Q4_0 or Q8_0. No zero points are needed: those that it
    takes without are 8 and 128.
    """
    rows = raw.reshape(len(raw), -1, 2 + BLOCK * bits // 8)
    scales = np.ascontiguousarray(rows[..., :2]).view("<f2")[..., 0].astype(np.float32)
    values = rows[..., 2:]
    if bits == 8:
        return values ^ np.uint8(0x80), scales
    # GGML has weights 0 to 15 in the low halves of bytes, and 16 to 31 in the high ones.
    values = np.concatenate((values & 15, values >> 4), axis=-1)
    return values[..., ::2] | values[..., 1::2] << 4, scales


def halves(raw: Array, heads: int) -> Array:
    """Rows of q or k in the order in which GroupQueryAttention rotates them: a head's first halves
    of pairs, then the second. GGUF's llama has pairs beside each other.
    """
    pairs = raw.reshape(heads, len(raw) // heads // 2, 2, -1)
    return pairs.swapaxes(1, 2).reshape(raw.shape)


class _Data:
    """Tensors in the file beside a model."""

    def __init__(self, file: IO[bytes], location: str) -> None:
        self._file, self._location = file, location
        self.tensors: list[Any] = []

    def add(self, name: str, dims: tuple[int, ...], parts: Iterator[Array]) -> str:
        """Appends a float32 or uint8 tensor, given in parts along its first axis."""
        from onnx import TensorProto

        begin = -(-self._file.tell() // _PAGE) * _PAGE
        self._file.seek(begin)
        for part in parts:
            floats = part.dtype == np.float32
            self._file.write(np.ascontiguousarray(part).data)
        tensor = TensorProto(name=name, dims=dims, data_location=TensorProto.EXTERNAL)
        tensor.data_type = TensorProto.FLOAT if floats else TensorProto.UINT8
        where = {"offset": begin, "length": self._file.tell() - begin}
        for key, value in {"location": self._location, **where}.items():
            tensor.external_data.add(key=key, value=str(value))
        self.tensors.append(tensor)
        return name


class _Writer:
    """Nodes of a model, and its weights."""

    def __init__(self, file: Path, shape: Shape, weights: str, data: _Data) -> None:
        self._raw = {t.name: t for t in gguf.GGUFReader(file).tensors}
        self.shape, self._weights, self._data = shape, weights, data
        self.nodes: list[Any] = []

    def _matrix(self, name: str) -> Array:
        return np.asarray(self._raw[f"{name}.weight"].data)

    def node(self, kind: str, inputs: list[str], *outputs: str, **attrs: Any) -> str:
        from onnx import helper

        self.nodes.append(helper.make_node(kind, inputs, outputs, **attrs))
        return outputs[0]

    def const(self, name: str, value: Array) -> str:
        return self._data.add(name, value.shape, iter([value]))

    def product(self, x: str, name: str, raw: Array) -> str:
        bits = BITS[self._weights]
        values, scales = blocks(raw, bits)
        inputs = [x, self.const(f"{name}.values", values), self.const(f"{name}.scales", scales)]
        sizes = {"N": len(raw), "K": scales.shape[1] * BLOCK, "block_size": BLOCK, "bits": bits}
        return self.node("MatMulNBits", inputs, name, domain="com.microsoft", **sizes)

    def gamma(self, name: str) -> str:
        values = self._matrix(name).view(np.float32)
        return self.const(f"{name}.gamma", values)

    def embedding(self) -> str:
        raw, kind = self._matrix("token_embd"), WEIGHTS[self._weights]
        pieces = (raw[at : at + _ROWS] for at in range(0, len(raw), _ROWS))
        parts = (gguf.quants.dequantize(piece, kind).astype(np.float32) for piece in pieces)
        size = (self.shape.vocab, self.shape.hidden)
        return self.node("Gather", [self._data.add("embedding", size, parts), "ids"], "embedded")

    def rotation(self) -> list[str]:
        """The tables of cosines and sines, each [POSITIONS, head / 2]."""
        half = self.shape.head // 2
        angles = np.outer(np.arange(POSITIONS), self.shape.rope_base ** -(np.arange(half) / half))
        tables = {"cosines": np.cos(angles), "sines": np.sin(angles)}
        return [self.const(name, table.astype(np.float32)) for name, table in tables.items()]

    def skip_norm(self, x: str, skip: str, name: str) -> tuple[str, str]:
        """The norm of a sum, and the sum."""
        inputs, total = [x, skip, self.gamma(name)], f"{name}.sum"
        outputs = (name, "", "", total)
        kind = "SkipSimplifiedLayerNormalization"
        return self.node(kind, inputs, *outputs, domain="com.microsoft", epsilon=_EPSILON), total

    def attention(self, x: str, i: int, tables: list[str]) -> str:
        shape = self.shape
        q, k = (
            halves(self._matrix(f"blk.{i}.attn_{name}"), heads)
            for name, heads in (("q", shape.heads), ("k", shape.kv_heads))
        )
        raw = np.concatenate((q, k, self._matrix(f"blk.{i}.attn_v")))
        qkv = self.product(x, f"qkv.{i}", raw)
        cache = [f"past_key.{i}", f"past_value.{i}"]
        x = self.node(
            "GroupQueryAttention",
            [qkv, "", "", *cache, "last", "total", *tables],
            f"attended.{i}",
            *(name.replace("past", "present") for name in cache),
            domain="com.microsoft",
            num_heads=shape.heads,
            kv_num_heads=shape.kv_heads,
            do_rotary=1,
            rotary_interleaved=0,
        )
        return self.product(x, f"attn_output.{i}", self._matrix(f"blk.{i}.attn_output"))

    def feed_forward(self, x: str, i: int) -> str:
        gate, up = (
            self.product(x, f"{name}.{i}", self._matrix(f"blk.{i}.ffn_{name}"))
            for name in ("gate", "up")
        )
        # onnxruntime makes one QuickGelu of these two.
        silu = self.node("Mul", [gate, self.node("Sigmoid", [gate], f"sigmoid.{i}")], f"silu.{i}")
        x = self.node("Mul", [silu, up], f"gated.{i}")
        return self.product(x, f"down.{i}", self._matrix(f"blk.{i}.ffn_down"))

    def decoder(self) -> None:
        """All nodes, from `ids` to `logits`."""
        total, tables = self.embedding(), self.rotation()
        inputs = [total, self.gamma("blk.0.attn_norm")]
        kind = "SimplifiedLayerNormalization"
        x = self.node(kind, inputs, "blk.0.attn_norm", axis=-1, epsilon=_EPSILON)
        for i in range(self.shape.layers):
            x, total = self.skip_norm(self.attention(x, i, tables), total, f"blk.{i}.ffn_norm")
            last = i == self.shape.layers - 1
            norm = "output_norm" if last else f"blk.{i + 1}.attn_norm"
            x, total = self.skip_norm(self.feed_forward(x, i), total, norm)
        index = self.node("Constant", [], "end", value_ints=[-1])
        x = self.node("Gather", [x, index], "newest", axis=1)
        head = "token_embd" if self.shape.tied else "output"
        self.product(x, "logits", self._matrix(head))


def _values(shape: Shape) -> tuple[list[Any], list[Any]]:
    """Inputs and outputs. `last` is the newest token's position, `total` one more."""
    from onnx import TensorProto, helper

    info = helper.make_tensor_value_info
    cache = [1, shape.kv_heads, "capacity", shape.head]
    names = [f"{kind}.{i}" for i in range(shape.layers) for kind in ("key", "value")]
    past, present = (
        [info(f"{time}_{name}", TensorProto.FLOAT, cache) for name in names]
        for time in ("past", "present")
    )
    ids = info("ids", TensorProto.INT64, [1, "tokens"])
    counts = [info(name, TensorProto.INT32, [1]) for name in ("last", "total")]
    logits = info("logits", TensorProto.FLOAT, [1, 1, shape.vocab])
    return [ids, *counts, *past], [logits, *present]


def write(file: Path, shape: Shape, weights: str, folder: Path) -> dict[int, Path]:
    """The model of each of the weights' ACCURACIES, written when it is not in the folder yet. They
    share their weights, which are those of `file`, a GGUF of one of BITS. Needs the package onnx.

    Raises:
        Missing: onnxruntime has no such products.
    """
    if weights not in BITS or shape.experts:
        what = "experts" if shape.experts else weights
        raise Missing(f"MatMulNBits has no form of {what}")
    from onnx import helper

    out = {level: folder / f"{file.stem}-{level}.onnx" for level in ACCURACIES[weights]}
    if all(path.exists() for path in out.values()):
        return out
    location = folder / f"{file.stem}.onnx.data"
    part = location.with_name(f"{location.name}.part")
    with part.open("wb") as stream:
        data = _Data(stream, location.name)
        writer = _Writer(file, shape, weights, data)
        writer.decoder()
    part.rename(location)
    inputs, outputs = _values(shape)
    for level, path in out.items():
        for node in writer.nodes:
            if node.op_type == "MatMulNBits":
                kept = [a for a in node.attribute if a.name != "accuracy_level"]
                del node.attribute[:]
                node.attribute.extend([*kept, helper.make_attribute("accuracy_level", level)])
        graph = helper.make_graph(writer.nodes, file.stem, inputs, outputs, data.tensors)
        opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
        model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
        part = path.with_name(f"{path.name}.part")
        part.write_bytes(model.SerializeToString())
        part.rename(path)
    return out
