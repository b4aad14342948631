# SPDX-License-Identifier: Apache-2.0
"""Our luma networks as ONNX and ncnn files, so that peers run the very same arithmetic.

A plane's border is repeated, so padding is explicit and convolutions are valid.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from engine.pvrm import Pvrm

Floats = npt.NDArray[np.float32]


def shipped(tier: str) -> Path:
    """The file of a shipped tier (fast, balanced)."""
    import engine.video

    return Path(engine.video.__file__).parent / "models" / f"nsr-{tier}.pvrm"


def convolutions(file: Path) -> tuple[list[tuple[Floats, Floats, Floats]], Floats]:
    """([(weights [cout, cin, 3, 3], bias [cout], slope [cout]), ...], base [4, 1, 5, 5])."""
    model = Pvrm.open(str(file))
    channels, blocks = int(model.metadata["channels"]), int(model.metadata["blocks"])
    sizes = [1, *[channels] * (blocks + 1), 4]
    layers = []
    for i, (cin, cout) in enumerate(pairwise(sizes)):
        flat = model.blob(f"conv{i}").view("<f4").astype(np.float32)
        taps = flat[: cin * 9 * cout].reshape(cin, 3, 3, cout).transpose(3, 0, 1, 2)
        bias, slope = flat[cin * 9 * cout :].reshape(2, cout)
        layers.append((np.ascontiguousarray(taps), bias, slope))
    base = model.blob("base").view("<f4").astype(np.float32).reshape(4, 1, 5, 5)
    return layers, base


def macs(file: Path) -> float:
    """Multiply-accumulates an output pixel, the interpolation's 25 included."""
    layers, _ = convolutions(file)
    return sum(w.size for w, _, _ in layers) / 4 + 25


def to_onnx(file: Path) -> bytes:
    """A model from u8 [1, 1, H, W] to u8 [1, 1, 2H, 2W]."""
    from onnx import TensorProto, helper, numpy_helper

    layers, base = convolutions(file)
    nodes, weights = [], []

    def const(name: str, value: Any) -> str:
        weights.append(numpy_helper.from_array(np.asarray(value), name))
        return name

    def node(kind: str, inputs: list[str], output: str, **attrs: Any) -> str:
        nodes.append(helper.make_node(kind, inputs, [output], **attrs))
        return output

    def pad(value: str, n: int) -> str:
        pads = const(f"pads{n}", np.array([0, 0, n, n, 0, 0, n, n], np.int64))
        return node("Pad", [value, pads], f"padded{n}", mode="edge")

    luma = node("Cast", ["input"], "float", to=TensorProto.FLOAT)
    luma = node("Mul", [luma, const("scale", np.float32(1 / 255))], "luma")
    x = pad(luma, len(layers))
    for i, (taps, bias, slope) in enumerate(layers):
        x = node("Conv", [x, const(f"w{i}", taps), const(f"b{i}", bias)], f"conv{i}")
        if not np.all(slope == 1):
            x = node("PRelu", [x, const(f"s{i}", slope[:, None, None])], f"act{i}")
    plain = node("Conv", [pad(luma, 2), const("base", base)], "plain")
    x = node("Add", [x, plain], "sum")
    x = node("DepthToSpace", [x], "large", blocksize=2, mode="CRD")
    x = node("Mul", [x, const("top", np.float32(255))], "levels")
    x = node("Round", [x], "rounded")
    x = node("Clip", [x, const("lo", np.float32(0)), const("hi", np.float32(255))], "clipped")
    node("Cast", [x], "output", to=TensorProto.UINT8)
    shape_in, shape_out = [1, 1, "h", "w"], [1, 1, "h2", "w2"]
    graph = helper.make_graph(
        nodes,
        "nsr",
        [helper.make_tensor_value_info("input", TensorProto.UINT8, shape_in)],
        [helper.make_tensor_value_info("output", TensorProto.UINT8, shape_out)],
        weights,
    )
    opset = [helper.make_opsetid("", 17)]
    return bytes(helper.make_model(graph, opset_imports=opset, ir_version=8).SerializeToString())


def to_ncnn(file: Path, folder: Path) -> tuple[Path, Path]:
    """Writes .param and .bin of a model from f32 [1, H, W] in 0..1 to [1, 2H, 2W]."""
    layers, base = convolutions(file)
    lines: list[str] = []
    data = bytearray()

    def layer(kind: str, name: str, inputs: str, outputs: str, *params: str) -> None:
        counts = f"{len(inputs.split())} {len(outputs.split())}"
        lines.append(
            f"{kind} {name} {counts} {inputs} {outputs} {' '.join(params)}".replace("  ", " ")
        )

    def pad(name: str, source: str, n: int) -> None:
        layer("Padding", name, source, name, f"0={n}", f"1={n}", f"2={n}", f"3={n}", "4=1")

    def conv(name: str, source: str, taps: Floats, bias: Floats | None) -> None:
        out, _, k, _ = taps.shape
        params = [f"0={out}", f"1={k}", f"5={int(bias is not None)}", f"6={taps.size}"]
        layer("Convolution", name, source, name, *params)
        data.extend(b"\0\0\0\0" + taps.astype("<f4").tobytes())  # the tag 0: raw float32
        if bias is not None:
            data.extend(bias.astype("<f4").tobytes())

    layer("Input", "in", "", "in")
    layer("Split", "split", "in", "a b")
    pad("pad", "a", len(layers))
    x = "pad"
    for i, (taps, bias, slope) in enumerate(layers):
        conv(f"conv{i}", x, taps, bias)
        x = f"conv{i}"
        if not np.all(slope == 1):
            layer("PReLU", f"act{i}", x, f"act{i}", f"0={len(slope)}")
            data.extend(slope.astype("<f4").tobytes())
            x = f"act{i}"
    pad("pad2", "b", 2)
    conv("base", "pad2", base, None)
    layer("BinaryOp", "sum", f"{x} base", "sum", "0=0")
    layer("PixelShuffle", "out", "sum", "out", "0=2")
    blobs = {name for line in lines for name in line.split()[4:] if "=" not in name}
    param = folder / "nsr.param"
    param.write_text("\n".join(["7767517", f"{len(lines)} {len(blobs)}", *lines]) + "\n")
    binary = folder / "nsr.bin"
    binary.write_bytes(data)
    return param, binary
