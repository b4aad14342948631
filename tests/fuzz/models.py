# SPDX-License-Identifier: Apache-2.0
"""Targets: files of models and pictures, as strangers write them."""

from __future__ import annotations

import functools
import io
import json
import struct
import tempfile
from pathlib import Path

import numpy as np

from tests.fuzz.judge import file_of, refused


def gguf(data: bytes) -> None:
    from engine.text import compiled

    with refused(), file_of(data) as fd, compiled.prepared(fd) as (_, blobs):
        for blob in blobs:
            if blob.nbytes < 1 << 20:
                for _ in blob.chunks():
                    pass


@functools.cache
def tiny(kind: str = "Q8_0") -> bytes:
    from tests.engine.conftest import Shape, write_model

    shape = Shape(layers=1, hidden=32, ffn=32, heads=2, kv_heads=1, vocab=264, context=32)
    with tempfile.TemporaryDirectory() as folder:
        return write_model(Path(folder) / "m.gguf", kind, shape).read_bytes()


def safetensors(data: bytes) -> None:
    from engine.importers.safetensors import SafeTensors

    with refused(), file_of(data) as fd:
        found = SafeTensors(fd)
        for tensor in list(found.tensors.values())[:16]:
            found.read(tensor, 0, 1)


def safetensors_seeds() -> list[bytes]:
    header = {
        "__metadata__": {"format": "pt"},
        "a": {"dtype": "F16", "shape": [2, 4], "data_offsets": [0, 16]},
        "b": {"dtype": "F32", "shape": [4], "data_offsets": [16, 32]},
    }
    text = json.dumps(header).encode()
    return [struct.pack("<Q", len(text)) + text + bytes(32)]


def onnx(data: bytes) -> None:
    from engine.importers import convnets
    from engine.video.convnet import prepared

    with refused(), file_of(data) as fd, np.errstate(all="ignore"):
        prepared(convnets.load_fd(fd))


def onnx_seeds() -> list[bytes]:
    from tests.engine import networks
    from tests.engine.networks import node, weights

    rng = np.random.default_rng(7)
    conv = node("Conv", "x w", "a", pads=[1, 1, 1, 1], kernel_shape=[3, 3])
    shuffle = node("DepthToSpace", "a", "y", blocksize=2)
    plain = networks.onnx([conv, shuffle], {"w": weights(rng, 12, 3, 3)})
    sizes = node("Reshape", "a s", "b"), node("Transpose", "b", "c", perm=[0, 1, 4, 2, 5, 3])
    s = {"s": np.array([1, 3, 2, 2, 240, 336]), "t": np.array([1, 3, 480, 672])}
    more = networks.onnx(
        [conv, *sizes, node("Reshape", "c t", "y")], {"w": weights(rng, 12, 3, 3), **s}
    )
    return [plain, more]


def onnx_text(data: bytes) -> None:
    """The same form, read as a decoder."""
    from engine.importers import onnx_wire
    from engine.importers.onnx_decoder import import_onnx

    with refused(), file_of(data) as fd, np.errstate(all="ignore"):
        import_onnx(onnx_wire.read(fd))


def onnx_text_seeds() -> list[bytes]:
    from tests.engine.test_engine_onnx_decoder import whole

    return [whole("llama-18")]


PARAM_END = b"\n%%%%\n"


def ncnn(data: bytes) -> None:
    from engine.importers import ncnn as importer

    param, _, weights = data.partition(PARAM_END)
    with refused(), file_of(param) as text, file_of(weights) as numbers, np.errstate(all="ignore"):
        importer.load(text, numbers)


def ncnn_seeds() -> list[bytes]:
    lines = (
        "7767517\n4 4\nInput in 0 1 data 0=8 1=8 2=3\n"
        "Convolution c 1 1 data a 0=12 1=3 4=1 5=1 6=324\nPReLU p 1 1 a b 0=12\n"
        "PixelShuffle s 1 1 b out 0=2\n"
    )
    numbers = struct.pack("<I", 0) + bytes(4 * 324) + bytes(4 * 12) + bytes(4 * 12)
    return [lines.encode() + PARAM_END + numbers]


def picture(data: bytes) -> None:
    from engine.video import picture_files

    with refused():
        if picture_files.header(data).width < 4096:
            picture_files.decode(data)


def picture_seeds() -> list[bytes]:
    from PIL import Image

    out = []
    image = Image.fromarray(np.arange(192, dtype=np.uint8).reshape(8, 8, 3))
    for form, mode in (("png", "RGB"), ("png", "LA"), ("png", "P"), ("jpeg", "RGB")):
        buffer = io.BytesIO()
        image.convert(mode).save(buffer, form)
        out.append(buffer.getvalue())
    deep = Image.fromarray(np.arange(64, dtype=np.uint16).reshape(8, 8) * 1000)
    buffer = io.BytesIO()
    deep.save(buffer, "png")
    return [*out, buffer.getvalue()]
