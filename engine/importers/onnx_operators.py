# SPDX-License-Identifier: Apache-2.0
"""The operators of an ONNX network: each has a handler, which makes nodes of a Net of it.

A handler gets what its node reads: maps, constants, None for what is left out. Reshape, Transpose,
Reshape is understood where it is a pixel shuffle. The last Clip is what happens to samples anyway.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from engine.errors import BadModel, UnsupportedModel
from engine.importers.onnx_wire import Array, OnnxNode
from engine.video.convnet_builder import Builder, unsupported


@dataclass(frozen=True)
class Maps:
    """A value of the network and its shape at the probed size: [1, channels, rows, columns]."""

    name: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class View:
    """Maps in the middle of a pixel shuffle: after a Reshape to `dims`, then a Transpose."""

    maps: Maps
    dims: tuple[int, ...]
    order: tuple[int, ...] = ()

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.dims[i] for i in self.order) if self.order else self.dims


Known = Maps | View | Array


@dataclass(frozen=True)
class Draft:
    """The network that is being made, and what handlers share."""

    b: Builder
    opset: int  # of the file

    def maps(self, node: OnnxNode, value: Known | None) -> Maps:
        """A value that has to be maps."""
        if not isinstance(value, Maps):
            raise unsupported(node.op, node.name, "what it reads is not the maps of a layer")
        return value

    def array(self, node: OnnxNode, value: Known | None) -> Array:
        """A value that has to be constant."""
        if not isinstance(value, np.ndarray):
            raise unsupported(node.op, node.name, "its weights are not constant")
        return value

    def made(self, name: str, like: Maps) -> list[Known]:
        """The result of the Builder, with its shape at the probed size."""
        before, after = self.b.values[like.name], self.b.values[name]
        ratio = after.scale / before.scale
        sides = [ratio * n for n in like.shape[2:]]
        if any(n.denominator != 1 for n in sides):
            raise UnsupportedModel(f"The network asks for sides that {1 / ratio} divides.")
        return [Maps(name, (1, after.channels, *(int(n) for n in sides)))]

    def per_channel(self, node: OnnxNode, array: Array, maps: Maps) -> Array:
        """A constant that is the same all over a map, as a number a channel (or one)."""
        if array.size == 1:
            return array.reshape(1)
        shape = (1,) * (4 - array.ndim) + array.shape
        if len(shape) != 4 or shape != (1, maps.shape[1], 1, 1):
            raise unsupported(node.op, node.name, f"a constant of the shape {list(array.shape)}")
        return array.reshape(-1)


def _conv(net: Draft, node: OnnxNode, given: list[Known | None]) -> list[Known]:
    x, w = net.maps(node, given[0]), net.array(node, given[1])
    bias = net.array(node, given[2]) if len(given) > 2 and given[2] is not None else None
    a = node.attrs
    pads = a.get("pads") or [0, 0, 0, 0]
    if a.get("auto_pad", b"NOTSET") in (b"SAME_UPPER", b"SAME_LOWER"):
        half = [
            (n - 1) * d // 2 for n, d in zip(w.shape[2:], a.get("dilations") or (1, 1), strict=True)
        ]
        pads = half * 2
    name = net.b.conv(
        node.name,
        node.op,
        x.name,
        w.astype(np.float32),
        bias,
        groups=a.get("group", 1),
        strides=a.get("strides") or (1, 1),
        dilations=a.get("dilations") or (1, 1),
        pads=pads,
    )
    return net.made(name, x)


def _deconv(net: Draft, node: OnnxNode, given: list[Known | None]) -> list[Known]:
    x, w = net.maps(node, given[0]), net.array(node, given[1])
    bias = net.array(node, given[2]) if len(given) > 2 and given[2] is not None else None
    a = node.attrs
    strides, pads = a.get("strides") or [1, 1], a.get("pads") or [0, 0, 0, 0]
    more = a.get("output_padding") or [0, 0]
    odd = len({*strides}) != 1 or len({*pads}) != 1 or len({*more}) != 1
    if odd or a.get("group", 1) != 1 or set(a.get("dilations") or [1]) != {1}:
        raise unsupported(node.op, node.name, "groups, dilation or uneven sides")
    weights = w.astype(np.float32)
    name = net.b.deconv(
        node.name, node.op, x.name, weights, bias, stride=strides[0], pad=pads[0], more=more[0]
    )
    return net.made(name, x)


def _activation(act: str, slope: Callable[[OnnxNode], float]) -> Callable[..., list[Known]]:
    def handle(net: Draft, node: OnnxNode, given: list[Known | None]) -> list[Known]:
        x = net.maps(node, given[0])
        return net.made(net.b.act(node.name, node.op, x.name, act, slope(node)), x)

    return handle


def _prelu(net: Draft, node: OnnxNode, given: list[Known | None]) -> list[Known]:
    x, slope = net.maps(node, given[0]), net.array(node, given[1])
    return net.made(net.b.act(node.name, node.op, x.name, "slope", slope), x)


def _batch_norm(net: Draft, node: OnnxNode, given: list[Known | None]) -> list[Known]:
    x = net.maps(node, given[0])
    scale, shift, mean, var = (net.array(node, v).astype(np.float64) for v in given[1:5])
    factor = scale / np.sqrt(var + node.attrs.get("epsilon", 1e-5))
    return net.made(net.b.affine(node.name, node.op, x.name, factor, shift - mean * factor), x)


def _arithmetic(net: Draft, node: OnnxNode, given: list[Known | None]) -> list[Known]:
    a, b = given[:2]
    if isinstance(a, Maps) and isinstance(b, Maps):
        if node.op == "Mul":
            return net.made(net.b.product(node.name, node.op, a.name, b.name), a)
        if node.op == "Div":
            raise unsupported(node.op, node.name, "it divides by maps")
        beta = 1.0 if node.op == "Add" else -1.0
        return net.made(net.b.sum(node.name, node.op, a.name, b.name, 1.0, beta), a)
    x = net.maps(node, a if isinstance(a, Maps) else b)
    n = net.per_channel(node, net.array(node, b if x is a else a), x).astype(np.float64)
    if node.op == "Add":
        scale, shift = np.ones(1), n
    elif node.op == "Sub":
        scale, shift = (np.ones(1), -n) if x is a else (-np.ones(1), n)
    elif node.op == "Mul":
        scale, shift = n, np.zeros(1)
    elif x is a and np.all(n != 0):
        scale, shift = 1 / n, np.zeros(1)
    else:
        raise unsupported(node.op, node.name, "it divides by maps or by 0")
    return net.made(net.b.affine(node.name, node.op, x.name, scale, shift), x)


def _concat(net: Draft, node: OnnxNode, given: list[Known | None]) -> list[Known]:
    parts = [net.maps(node, v) for v in given]
    if node.attrs.get("axis") not in (1, -3):
        raise unsupported(node.op, node.name, "it joins other than channels")
    return net.made(net.b.concat(node.name, node.op, [p.name for p in parts]), parts[0])


def _depth_to_space(net: Draft, node: OnnxNode, given: list[Known | None]) -> list[Known]:
    x, down = net.maps(node, given[0]), node.op == "SpaceToDepth"
    deep = down or node.attrs.get("mode", b"DCR") == b"DCR"
    s = node.attrs.get("blocksize", 0)
    return net.made(net.b.shuffle(node.name, node.op, x.name, s, deep, down), x)


def _ratio(net: Draft, node: OnnxNode, given: list[Known | None], x: Maps) -> Fraction:
    """How much larger a Resize or Upsample makes maps, in both directions."""
    upsample = node.op == "Upsample"
    scales = given[1] if upsample or len(given) == 2 else given[2] if len(given) > 2 else None
    sizes = given[3] if len(given) > 3 else None
    if upsample and scales is None:
        scales = np.array(node.attrs.get("scales") or [], np.float32)
    if isinstance(sizes, np.ndarray) and sizes.size:
        ratios = [Fraction(int(n), m) for n, m in zip(sizes.tolist(), x.shape, strict=False)]
    else:
        numbers = net.array(node, scales).astype(np.float64).tolist()
        ratios = [Fraction(n).limit_denominator(64) for n in numbers]
    if len(ratios) != 4 or ratios[:2] != [1, 1] or ratios[2] != ratios[3] or ratios[2] <= 0:
        raise unsupported(node.op, node.name, f"ratios {[float(r) for r in ratios]}")
    return ratios[2]


def _resize(net: Draft, node: OnnxNode, given: list[Known | None]) -> list[Known]:
    x = net.maps(node, given[0])
    ratio, upsample = _ratio(net, node, given, x), node.op == "Upsample"
    a = node.attrs
    mode = a.get("mode", b"nearest").decode("utf-8", "replace")
    where = a.get("coordinate_transformation_mode", b"half_pixel").decode("utf-8", "replace")
    if upsample or (mode == "nearest" and len(given) == 2 and net.opset < 11):
        where = "asymmetric"
    if where not in ("half_pixel", "pytorch_half_pixel", "asymmetric"):
        raise unsupported(node.op, node.name, f"the coordinates {where}")
    if mode not in ("nearest", "linear", "cubic") or a.get("antialias", 0):
        raise unsupported(node.op, node.name, f"the mode {mode}")
    rounding = a.get("nearest_mode", b"round_prefer_floor")
    floor = upsample or rounding == b"floor"
    if mode == "nearest" and not (floor or rounding == b"round_prefer_floor"):
        raise unsupported(node.op, node.name, f"the rounding {rounding.decode('utf-8', 'replace')}")
    centred = where != "asymmetric"
    name = net.b.resize(
        node.name,
        node.op,
        x.name,
        ratio,
        mode,
        centred=centred,
        floor=floor and not centred,
        a=a.get("cubic_coeff_a", -0.75),
    )
    return net.made(name, x)


def _same(net: Draft, node: OnnxNode, given: list[Known | None]) -> list[Known]:
    if given[0] is None:
        raise BadModel(f"The node {node.name} reads nothing.")
    return [given[0]]


def _clip(net: Draft, node: OnnxNode, given: list[Known | None]) -> list[Known]:
    limits = [node.attrs.get("min"), node.attrs.get("max")]
    for k, value in enumerate(given[1:3]):
        if value is not None:
            limits[k] = float(net.array(node, value).reshape(-1)[:1].sum())
    low, high = limits
    if (low is not None and low > 0) or (high is not None and high < 1):
        raise unsupported(node.op, node.name, f"limits {low} and {high}")
    return _same(net, node, given)


def _reshape(net: Draft, node: OnnxNode, given: list[Known | None]) -> list[Known]:
    x, dims = given[0], [int(n) for n in net.array(node, given[1]).reshape(-1)]
    if not isinstance(x, Maps | View) or len(dims) > 8:
        raise unsupported(node.op, node.name)
    dims = [x.shape[k] if n == 0 and k < len(x.shape) else n for k, n in enumerate(dims)]
    total = int(np.prod(x.shape, dtype=object))
    if dims.count(-1) == 1:
        rest = -int(np.prod(dims, dtype=object))
        dims = [total // rest if n == -1 and rest > 0 else n for n in dims]
    if any(n <= 0 for n in dims) or int(np.prod(dims, dtype=object)) != total:
        raise unsupported(node.op, node.name, f"{list(x.shape)} to {dims}")
    if isinstance(x, Maps):
        return [x] if tuple(dims) == x.shape else [View(x, tuple(dims))]
    return _shuffled(net, node, x, tuple(dims))


def _shuffled(net: Draft, node: OnnxNode, x: View, dims: tuple[int, ...]) -> list[Known]:
    """The second Reshape of a pixel shuffle."""
    d, (_, channels, rows, columns) = x.dims, x.maps.shape
    if len(d) == 6 and len(dims) == 4:
        up = {(0, 1, 4, 2, 5, 3): (False, 2), (0, 3, 4, 1, 5, 2): (True, 1)}
        if x.order in up:
            deep, at = up[x.order]
            s = d[at]
            inner = (s, s, channels // (s * s)) if deep else (channels // (s * s), s, s)
            after = (1, channels // (s * s), rows * s, columns * s)
            if d == (1, *inner, rows, columns) and dims == after:
                return net.made(net.b.shuffle(node.name, node.op, x.maps.name, s, deep), x.maps)
        down = {(0, 1, 3, 5, 2, 4): False, (0, 3, 5, 1, 2, 4): True}
        if x.order in down:
            s = d[3]
            before = (1, channels, rows // s, s, columns // s, s)
            if d == before and dims == (1, channels * s * s, rows // s, columns // s):
                deep = down[x.order]
                made = net.b.shuffle(node.name, node.op, x.maps.name, s, deep, True)
                return net.made(made, x.maps)
    raise unsupported(node.op, node.name, "it is no part of a pixel shuffle")


def _transpose(net: Draft, node: OnnxNode, given: list[Known | None]) -> list[Known]:
    x = given[0]
    order = tuple(node.attrs.get("perm") or ())
    if not isinstance(x, View) or x.order or sorted(order) != list(range(len(x.dims))):
        raise unsupported(node.op, node.name, "it is no part of a pixel shuffle")
    return [View(x.maps, x.dims, order)]


def _slice(net: Draft, node: OnnxNode, given: list[Known | None]) -> list[Known]:
    x, a = net.maps(node, given[0]), node.attrs
    if len(given) > 1:
        numbers = [net.array(node, v).reshape(-1).tolist() for v in given[1:] if v is not None]
    else:
        numbers = [a.get("starts") or [], a.get("ends") or []]
        numbers += [a["axes"]] if a.get("axes") else []
    starts, ends = ([*numbers, [], []])[:2]
    axes = numbers[2] if len(numbers) > 2 else list(range(len(starts)))
    steps = numbers[3] if len(numbers) > 3 else [1]
    if len(starts) != 1 or len(ends) != 1 or axes not in ([1], [-3]) or steps != [1]:
        raise unsupported(node.op, node.name, "it cuts other than channels")
    begin, end, _ = slice(int(starts[0]), int(ends[0])).indices(x.shape[1])
    return net.made(net.b.slice(node.name, node.op, x.name, begin, end), x)


def _split(net: Draft, node: OnnxNode, given: list[Known | None]) -> list[Known]:
    x, count = net.maps(node, given[0]), len(node.outputs)
    if node.attrs.get("axis", 0) not in (1, -3):
        raise unsupported(node.op, node.name, "it cuts other than channels")
    if len(given) > 1 and given[1] is not None:
        sizes = [int(n) for n in net.array(node, given[1]).reshape(-1)]
    else:
        sizes = list(node.attrs.get("split") or [-(-x.shape[1] // count)] * count)
        sizes[-1] -= sum(sizes) - x.shape[1]
    if len(sizes) != count or min(sizes) < 1 or sum(sizes) != x.shape[1]:
        raise unsupported(node.op, node.name, f"{x.shape[1]} channels to {sizes}")
    found, at = [], 0
    for n in sizes:
        found += net.made(net.b.slice(node.name, node.op, x.name, at, at + n), x)
        at += n
    return found


HANDLERS: Mapping[str, Callable[[Draft, OnnxNode, list[Known | None]], list[Known]]] = {
    "Conv": _conv,
    "ConvTranspose": _deconv,
    "Relu": _activation("slope", lambda node: 0.0),
    "LeakyRelu": _activation("slope", lambda node: node.attrs.get("alpha", 0.01)),
    "PRelu": _prelu,
    "Sigmoid": _activation("sigmoid", lambda node: 1.0),
    "BatchNormalization": _batch_norm,
    "Add": _arithmetic,
    "Sub": _arithmetic,
    "Mul": _arithmetic,
    "Div": _arithmetic,
    "Concat": _concat,
    "DepthToSpace": _depth_to_space,
    "SpaceToDepth": _depth_to_space,
    "Resize": _resize,
    "Upsample": _resize,
    "Reshape": _reshape,
    "Transpose": _transpose,
    "Slice": _slice,
    "Split": _split,
    "Clip": _clip,
    "Identity": _same,
    "Dropout": _same,
    "Cast": _same,
}
