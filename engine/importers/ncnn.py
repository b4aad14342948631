# SPDX-License-Identifier: Apache-2.0
"""A network from the layers and weights that ncnn's pair of files holds (`ncnn_files`).

Each type of layer has a handler, which reads its weights, in the order of the file, and makes nodes
of it. Constants are kept beside the values until a layer reads them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from fractions import Fraction

import numpy as np

from engine.errors import BadModel, UnsupportedModel
from engine.importers import ncnn_files
from engine.importers.ncnn_files import F32, Layer, Weights
from engine.video.convnet_builder import Builder, unsupported
from engine.video.convnet_graph import INPUT, Net


def load(param: int, weights: int) -> Net:
    """The network of a pair of files. The descriptors stay the caller's.

    Raises:
        BadModel: no ncnn files, damaged, cut short, or not of one network.
        UnsupportedModel: names the layer's type and its name.
    """
    layers = ncnn_files.read(param)
    strange = [n for n in layers if n.op not in _HANDLERS and n.op != "Input"]
    if strange:
        named = ", ".join(f"{n.op} (layer {n.name})" for n in strange[:3])
        more = f" and {len(strange) - 3} more" if len(strange) > 3 else ""
        raise UnsupportedModel(f"The network has layers that are not run: {named}{more}.")
    return _Import(layers, Weights(weights)).net()


class _Import:
    def __init__(self, layers: list[Layer], weights: Weights) -> None:
        self.layers, self.weights = layers, weights
        inputs = [n for n in layers if n.op == "Input"]
        if len(inputs) != 1 or len(inputs[0].outputs) != 1:
            raise UnsupportedModel(f"The network has {len(inputs)} inputs; one is run.")
        self.b = Builder(_channels(layers, inputs[0].outputs[0]))
        self.known: dict[str, str | F32] = {inputs[0].outputs[0]: INPUT}

    def net(self) -> Net:
        read = {v for layer in self.layers for v in layer.inputs}
        last = [v for layer in self.layers for v in layer.outputs if v not in read]
        if len(last) != 1:
            raise UnsupportedModel(f"The network has {len(last)} outputs; one is run.")
        for layer in self.layers:
            if layer.op == "Input":
                continue
            if not layer.outputs or (not layer.inputs and layer.op != "MemoryData"):
                raise BadModel(f"The layer {layer.name} reads or writes nothing.")
            try:
                found = _HANDLERS[layer.op](self, layer)
            except (ValueError, OverflowError):
                raise BadModel(f"The layer {layer.name} ({layer.op}) makes no sense.") from None
            if len(found) != len(layer.outputs):
                raise unsupported(layer.op, layer.name, f"{len(layer.outputs)} outputs")
            self.known.update(zip(layer.outputs, found, strict=True))
        self.weights.end()
        output = self.known[last[0]]
        if not isinstance(output, str):
            raise BadModel("The network's output is a constant.")
        return self.b.finish(output)

    def value(self, layer: Layer, i: int = 0) -> str | F32:
        """What a layer reads: a value's name, or a constant."""
        value = self.known.get(layer.inputs[i]) if i < len(layer.inputs) else None
        if value is None:
            raise BadModel(f"The layer {layer.name} reads what no layer before it writes.")
        return value

    def maps(self, layer: Layer, i: int = 0) -> str:
        value = self.value(layer, i)
        if not isinstance(value, str):
            raise unsupported(layer.op, layer.name, "it reads a constant")
        return value


def _channels(layers: list[Layer], name: str) -> int:
    """Channels of the input, as the first convolution that reads it says them; else 3."""
    names = {name}
    for layer in layers:
        if names.isdisjoint(layer.inputs):
            continue
        if layer.op == "Convolution":
            outputs, side = layer.whole(0), layer.whole(1) * layer.whole(11, layer.whole(1))
            return max(1, layer.whole(6) // max(1, outputs * side))
        names.update(layer.outputs)
    return 3


def _pads(layer: Layer, side: int, down: int) -> tuple[int, int, int, int]:
    """Top, left, bottom, right. -233 and -234 stand for what keeps the size."""
    left = layer.whole(4)
    top = layer.whole(14, left)
    right, bottom = layer.whole(15, left), layer.whole(16, top)
    if left in (-233, -234):
        return (down // 2, side // 2, down // 2, side // 2)
    return top, left, bottom, right


def _activated(i: _Import, layer: Layer, x: str) -> list[str | F32]:
    """The activation that a layer carries."""
    kind, numbers = layer.whole(9), layer.numbers(10)
    if kind == 0:
        return [x]
    if kind in (1, 2):
        slope = 0.0 if kind == 1 else (numbers or [0.01])[0]
        return [i.b.act(layer.name, layer.op, x, "slope", slope)]
    if kind == 4:
        return [i.b.act(layer.name, layer.op, x, "sigmoid")]
    raise unsupported(layer.op, layer.name, f"the activation {kind}")


def _conv(i: _Import, layer: Layer) -> list[str | F32]:
    x, outputs = i.maps(layer), layer.whole(0)
    columns = layer.whole(1)
    rows = layer.whole(11, columns)
    count, groups = layer.whole(6), layer.whole(7, 1)
    each = outputs * rows * columns
    if min(outputs, rows, columns, groups) < 1 or count < 1 or count % each:
        raise BadModel(f"The layer {layer.name} has {count} weights for {outputs} outputs.")
    if layer.whole(19) or layer.number(18):
        raise unsupported(
            layer.op, layer.name, "weights that are computed, or padding with a number"
        )
    w, quantised = i.weights.tagged(count, layer)
    bias = i.weights.floats(outputs, layer) if layer.whole(5) else None
    w = w.reshape(outputs, count // each, rows, columns)
    if layer.whole(8):
        scales = i.weights.floats(groups if layer.whole(8) == 2 else outputs, layer)
        i.weights.floats(1 + (layer.whole(8) > 100), layer)  # of activations
        if quantised:
            with np.errstate(divide="ignore"):
                w = w / scales.repeat(outputs // scales.size)[:, None, None, None]
    elif quantised:
        raise BadModel(f"The layer {layer.name} has int8 weights without scales.")
    steps = layer.whole(3, 1), layer.whole(13, layer.whole(3, 1))
    holes = layer.whole(12, layer.whole(2, 1)), layer.whole(2, 1)
    pads = _pads(layer, (columns - 1) * holes[1] + 1, (rows - 1) * holes[0] + 1)
    name, op = layer.name, layer.op
    y = i.b.conv(name, op, x, w, bias, groups=groups, strides=steps, dilations=holes, pads=pads)
    return _activated(i, layer, y)


def _deconv(i: _Import, layer: Layer) -> list[str | F32]:
    x, outputs, k = i.maps(layer), layer.whole(0), layer.whole(1)
    count = layer.whole(6)
    if min(outputs, k) < 1 or count < 1 or count % (outputs * k * k) or layer.whole(11, k) != k:
        raise unsupported(layer.op, layer.name, f"a kernel of {k}x{layer.whole(11, k)}")
    if layer.whole(2, 1) != 1 or layer.whole(13, layer.whole(3, 1)) != layer.whole(3, 1):
        raise unsupported(layer.op, layer.name, "dilation or uneven steps")
    pads = {layer.whole(4), *(layer.whole(n, layer.whole(4)) for n in (14, 15, 16))}
    more = {layer.whole(18), layer.whole(19, layer.whole(18))}
    if len(pads) != 1 or len(more) != 1:
        raise unsupported(layer.op, layer.name, "uneven padding")
    w, quantised = i.weights.tagged(count, layer)
    if quantised:
        raise unsupported(layer.op, layer.name, "int8 weights")
    bias = i.weights.floats(outputs, layer) if layer.whole(5) else None
    w = w.reshape(outputs, -1, k, k).transpose(1, 0, 2, 3)
    stride = layer.whole(3, 1)
    name, op, pad = layer.name, layer.op, pads.pop()
    y = i.b.deconv(name, op, x, w, bias, stride=stride, pad=pad, more=more.pop())
    return _activated(i, layer, y)


def _prelu(i: _Import, layer: Layer) -> list[str | F32]:
    slope = i.weights.floats(layer.whole(0), layer)
    return [i.b.act(layer.name, layer.op, i.maps(layer), "slope", slope)]


def _relu(i: _Import, layer: Layer) -> list[str | F32]:
    return [i.b.act(layer.name, layer.op, i.maps(layer), "slope", layer.number(0))]


def _named(act: str) -> Callable[[_Import, Layer], list[str | F32]]:
    def handle(i: _Import, layer: Layer) -> list[str | F32]:
        return [i.b.act(layer.name, layer.op, i.maps(layer), act)]

    return handle


def _batch_norm(i: _Import, layer: Layer) -> list[str | F32]:
    n = layer.whole(0)
    slope, mean, var, bias = (i.weights.floats(n, layer).astype(np.float64) for _ in range(4))
    with np.errstate(all="ignore"):
        factor = slope / np.sqrt(var + layer.number(1))
    return [i.b.affine(layer.name, layer.op, i.maps(layer), factor, bias - mean * factor)]


def _scale(i: _Import, layer: Layer) -> list[str | F32]:
    n = layer.whole(0)
    if n < 1:
        raise unsupported(layer.op, layer.name, "a scale that is computed")
    scale = i.weights.floats(n, layer)
    shift = i.weights.floats(n, layer) if layer.whole(1) else np.zeros(1)
    return [i.b.affine(layer.name, layer.op, i.maps(layer), scale, shift)]


def _eltwise(i: _Import, layer: Layer) -> list[str | F32]:
    kind, factors = layer.whole(0), layer.numbers(1)
    names = [i.maps(layer, k) for k in range(len(layer.inputs))]
    if len(names) < 2 or kind > 1 or (factors and len(factors) != len(names)):
        raise unsupported(layer.op, layer.name, f"the kind {kind} of {len(names)} values")
    y = names[0]
    for k, other in enumerate(names[1:], 1):
        if kind == 0:
            y = i.b.product(layer.name, layer.op, y, other)
        else:
            alpha = factors[0] if factors and k == 1 else 1.0
            y = i.b.sum(layer.name, layer.op, y, other, alpha, factors[k] if factors else 1.0)
    return [y]


_ADD, _SUB, _MUL, _DIV, _RSUB = 0, 1, 2, 3, 7


def _binary(i: _Import, layer: Layer) -> list[str | F32]:
    kind, name, op = layer.whole(0), layer.name, layer.op
    if kind not in (_ADD, _SUB, _MUL, _DIV, _RSUB):
        raise unsupported(op, name, f"the kind {kind}")
    a = i.value(layer)
    b: str | F32 | float = layer.number(2) if layer.whole(1) else i.value(layer, 1)
    if isinstance(a, str) and isinstance(b, str):
        if kind == _MUL:
            return [i.b.product(name, op, a, b)]
        if kind == _DIV:
            raise unsupported(op, name, "it divides by maps")
        alpha, beta = {_ADD: (1, 1), _SUB: (1, -1), _RSUB: (-1, 1)}[kind]
        return [i.b.sum(name, op, a, b, alpha, beta)]
    if isinstance(a, str):
        x, n = a, np.asarray(b, np.float64)
    elif isinstance(b, str):
        x, n = b, np.asarray(a, np.float64)
        if kind == _DIV:
            raise unsupported(op, name, "it divides by maps")
        kind = {_SUB: _RSUB, _RSUB: _SUB}.get(kind, kind)
    else:
        raise unsupported(op, name, "it reads constants alone")
    if kind == _DIV and not np.all(n):
        raise unsupported(op, name, "it divides by 0")
    scale = {_MUL: n, _DIV: 1 / n if kind == _DIV else 1, _RSUB: -1.0}.get(kind, 1.0)
    shift = {_ADD: n, _SUB: -n, _RSUB: n}.get(kind, 0.0)
    return [i.b.affine(name, op, x, scale, shift)]


def _memory(i: _Import, layer: Layer) -> list[str | F32]:
    w, h, c = layer.whole(0), layer.whole(1), layer.whole(2)
    sizes = [n for n in (w, h, c) if n]
    if layer.whole(11) > 1 or any(n < 1 for n in sizes) or not sizes:
        raise unsupported(layer.op, layer.name, "a shape that is not read")
    count = sizes[0] * (sizes[1] if len(sizes) > 1 else 1) * (sizes[2] if len(sizes) > 2 else 1)
    if count > 1 and (len(sizes) < 3 or (w, h) != (1, 1)):
        raise unsupported(layer.op, layer.name, f"a constant of {w}x{h}x{c}")
    return [i.weights.floats(count, layer)]


def _concat(i: _Import, layer: Layer) -> list[str | F32]:
    if layer.whole(0) not in (0, -3):
        raise unsupported(layer.op, layer.name, "it joins other than channels")
    parts = [i.maps(layer, k) for k in range(len(layer.inputs))]
    return [i.b.concat(layer.name, layer.op, parts)]


def _split(i: _Import, layer: Layer) -> list[str | F32]:
    return [i.value(layer)] * len(layer.outputs)


def _slice(i: _Import, layer: Layer) -> list[str | F32]:
    x = i.maps(layer)
    channels, count = i.b.values[x].channels, len(layer.outputs)
    if layer.whole(1) not in (0, -3) or len(layer.numbers(0)) != count:
        raise unsupported(layer.op, layer.name, "it cuts other than channels")
    found: list[str | F32] = []
    at = 0
    for k, size in enumerate(layer.numbers(0)):
        rest = (channels - at) // (count - k)
        n = rest if size == -233 else int(size)
        found.append(i.b.slice(layer.name, layer.op, x, at, at + n))
        at += n
    return found


def _pixel_shuffle(i: _Import, layer: Layer) -> list[str | F32]:
    deep = layer.whole(1) == 1
    return [i.b.shuffle(layer.name, layer.op, i.maps(layer), layer.whole(0, 1), deep)]


def _reorg(i: _Import, layer: Layer) -> list[str | F32]:
    deep = layer.whole(1) == 1
    return [i.b.shuffle(layer.name, layer.op, i.maps(layer), layer.whole(0, 1), deep, True)]


def _interp(i: _Import, layer: Layer) -> list[str | F32]:
    kind = layer.whole(0)
    modes = {1: "nearest", 2: "linear", 3: "cubic"}
    tall, wide = layer.number(1, 1.0), layer.number(2, 1.0)
    if kind not in modes or layer.whole(3) or layer.whole(4) or layer.whole(5) or layer.whole(6):
        raise unsupported(layer.op, layer.name, "a size that is no fixed ratio, or aligned corners")
    if tall != wide or not 0 < tall <= 64 or len(layer.inputs) != 1:
        raise unsupported(layer.op, layer.name, f"ratios {tall:g} and {wide:g}")
    ratio = Fraction(tall).limit_denominator(64)
    mode, x = modes[kind], i.maps(layer)
    return [i.b.resize(layer.name, layer.op, x, ratio, mode, centred=mode != "nearest")]


_HANDLERS: Mapping[str, Callable[[_Import, Layer], list[str | F32]]] = {
    "Convolution": _conv,
    "ConvolutionDepthWise": _conv,
    "Deconvolution": _deconv,
    "PReLU": _prelu,
    "ReLU": _relu,
    "Sigmoid": _named("sigmoid"),
    "Swish": _named("silu"),
    "BatchNorm": _batch_norm,
    "Scale": _scale,
    "Eltwise": _eltwise,
    "BinaryOp": _binary,
    "MemoryData": _memory,
    "Concat": _concat,
    "Split": _split,
    "Noop": _split,
    "Dropout": _split,
    "Slice": _slice,
    "PixelShuffle": _pixel_shuffle,
    "Reorg": _reorg,
    "Interp": _interp,
}
