# SPDX-License-Identifier: Apache-2.0
"""Our luma networks as ONNX and ncnn files, so that peers run the very same arithmetic.

A plane's border is repeated, so padding is explicit and convolutions are valid.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from engine.pvrm import Pvrm
from engine.video import kinds
from engine.video.network import VideoModel

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Layer:
    """A convolution [cout, cin, 3, 3] and its PReLU (slopes of 1: none). `adds`: the layer whose
    result, cropped to the middle, comes on top before the PReLU.
    """

    taps: Floats
    bias: Floats
    slope: Floats
    adds: int | None = None

    @property
    def activated(self) -> bool:
        return not np.all(self.slope == 1)


@dataclass(frozen=True)
class Net:
    """A luma network: its layers, and the filters [scale^2, 1, 5, 5] of the input beside them."""

    scale: int
    layers: tuple[Layer, ...]
    base: Floats

    @property
    def kept(self) -> set[int]:
        """Layers whose results are read again further on."""
        return {layer.adds for layer in self.layers if layer.adds is not None}

    @property
    def macs(self) -> float:
        """Multiply-accumulates an output pixel, the interpolation's 25 included."""
        return (sum(k.taps.size for k in self.layers) + self.base.size) / self.scale**2


def shipped(tier: str, scale: int = 2) -> Path:
    """The file of a shipped tier (fast, balanced, quality)."""
    import engine.video

    name = f"nsr-{tier}" if scale == 2 else f"nsr-{tier}-x{scale}"
    return Path(engine.video.__file__).parent / "models" / f"{name}.pvrm"


def read(file: Path) -> Net:
    """The luma network of a model file, as engine/video/network.py lays it out."""
    model = Pvrm.open(str(file))
    meta = model.metadata
    scale, channels = int(meta["scale"]), int(meta["channels"])
    phases = scale * scale
    adds = {int(b): int(a) for a, b in meta.get("skips", ())}
    filled = -(-phases // 4) * 4
    sizes = [1, *[channels] * (int(meta["blocks"]) + 1), filled]
    layers = []
    for i, (cin, cout) in enumerate(pairwise(sizes)):
        flat = model.blob(f"conv{i}").view("<f4").astype(np.float32)
        taps = flat[: cin * 9 * cout].reshape(cin, 3, 3, cout).transpose(3, 0, 1, 2)
        bias, slope = flat[cin * 9 * cout :].reshape(2, cout)
        if i in adds:
            slope = model.blob(f"skip{i}").view("<f4").astype(np.float32)
        used = phases if i == len(sizes) - 2 else cout
        layer = (np.ascontiguousarray(taps[:used]), bias[:used], slope[:used])
        layers.append(Layer(*layer, adds.get(i)))
    base = model.blob("base").view("<f4").astype(np.float32).reshape(phases, 1, 5, 5)
    return Net(scale, tuple(layers), base)


def precise(model: VideoModel, precision: str) -> VideoModel:
    """The model in a precision (kinds.precise)."""
    found = kinds.precise(model, precision)
    assert isinstance(found, VideoModel)
    return found


def macs(file: Path) -> float:
    """Multiply-accumulates an output pixel of a model file's network."""
    return read(file).macs


def to_onnx(file: Path) -> bytes:
    """A model from u8 [1, 1, H, W] to u8 [1, 1, scale H, scale W]."""
    from onnx import TensorProto, helper, numpy_helper

    net = read(file)
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

    def crop(value: str, n: int) -> str:
        ranges = {"from": [n, n], "to": [-n, -n], "axes": [2, 3]}
        names = [const(f"{value}.{k}", np.array(v, np.int64)) for k, v in ranges.items()]
        return node("Slice", [value, *names], f"{value}.cropped")

    luma = node("Cast", ["input"], "float", to=TensorProto.FLOAT)
    luma = node("Mul", [luma, const("scale", np.float32(1 / 255))], "luma")
    x = pad(luma, len(net.layers))
    results: list[str] = []
    for i, layer in enumerate(net.layers):
        x = node("Conv", [x, const(f"w{i}", layer.taps), const(f"b{i}", layer.bias)], f"conv{i}")
        if layer.adds is not None:
            x = node("Add", [x, crop(results[layer.adds], i - layer.adds)], f"skip{i}")
        if layer.activated:
            x = node("PRelu", [x, const(f"s{i}", layer.slope[:, None, None])], f"act{i}")
        results.append(x)
    plain = node("Conv", [pad(luma, 2), const("base", net.base)], "plain")
    x = node("Add", [x, plain], "sum")
    x = node("DepthToSpace", [x], "large", blocksize=net.scale, mode="CRD")
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
    """Writes .param and .bin of a model from f32 [1, H, W] in 0..1 to [1, scale H, scale W]."""
    net = read(file)
    lines: list[str] = []
    data = bytearray()

    def layer(kind: str, name: str, inputs: str, outputs: str, *params: str) -> str:
        counts = f"{len(inputs.split())} {len(outputs.split())}"
        lines.append(
            f"{kind} {name} {counts} {inputs} {outputs} {' '.join(params)}".replace("  ", " ")
        )
        return name

    def pad(name: str, source: str, n: int) -> None:
        layer("Padding", name, source, name, f"0={n}", f"1={n}", f"2={n}", f"3={n}", "4=1")

    def conv(name: str, source: str, taps: Floats, bias: Floats | None) -> str:
        out, _, k, _ = taps.shape
        params = [f"0={out}", f"1={k}", f"5={int(bias is not None)}", f"6={taps.size}"]
        data.extend(b"\0\0\0\0" + taps.astype("<f4").tobytes())  # the tag 0: raw float32
        if bias is not None:
            data.extend(bias.astype("<f4").tobytes())
        return layer("Convolution", name, source, name, *params)

    layer("Input", "in", "", "in")
    layer("Split", "split", "in", "a b")
    pad("pad", "a", len(net.layers))
    x = "pad"
    for i, one in enumerate(net.layers):
        x = conv(f"conv{i}", x, one.taps, one.bias)
        if one.adds is not None:
            n = i - one.adds
            whole = ["3=-233", "4=-233", "5=-233"]  # up to the far margins, which are 6 and 7
            layer(
                "Crop",
                f"crop{i}",
                f"kept{one.adds}",
                f"crop{i}",
                f"0={n}",
                f"1={n}",
                "2=0",
                *whole,
                f"6={n}",
                f"7={n}",
            )
            x = layer("BinaryOp", f"skip{i}", f"{x} crop{i}", f"skip{i}", "0=0")
        if one.activated:
            x = layer("PReLU", f"act{i}", x, f"act{i}", f"0={len(one.slope)}")
            data.extend(one.slope.astype("<f4").tobytes())
        if i in net.kept:
            layer("Split", f"split{i}", x, f"next{i} kept{i}")
            x = f"next{i}"
    pad("pad2", "b", 2)
    conv("base", "pad2", net.base, None)
    layer("BinaryOp", "sum", f"{x} base", "sum", "0=0")
    layer("PixelShuffle", "out", "sum", "out", f"0={net.scale}")
    blobs = {name for line in lines for name in line.split()[4:] if "=" not in name}
    param = folder / "nsr.param"
    param.write_text("\n".join(["7767517", f"{len(lines)} {len(blobs)}", *lines]) + "\n")
    binary = folder / "nsr.bin"
    binary.write_bytes(data)
    return param, binary
