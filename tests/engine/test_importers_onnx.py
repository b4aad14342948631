# SPDX-License-Identifier: Apache-2.0
"""Networks from ONNX files that the tests write, against numpy."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import BadModel, PvrError, UnsupportedModel
from engine.importers import convnets, onnx, onnx_wire
from engine.video.convnet import prepared
from engine.video.convnet_graph import Net
from tests.engine import networks
from tests.engine.networks import Array, conv, evaluate, node, prelu, shuffle, sigmoid, weights

RNG = np.random.default_rng(7)
IMAGE = RNG.random((3, 12, 8)).astype(np.float32)


def load(data: bytes) -> Net:
    fd = os.memfd_create("onnx")
    try:
        os.write(fd, data)
        return convnets.load_fd(fd)
    finally:
        os.close(fd)


def check(data: bytes, want: Array, x: Array = IMAGE) -> Net:
    """The network computes what is wanted, after the passes too."""
    net = load(data)
    np.testing.assert_allclose(evaluate(net, x), want, rtol=1e-4, atol=1e-5)
    ready = prepared(net)
    np.testing.assert_allclose(evaluate(ready, x), want, rtol=1e-4, atol=1e-5)
    return ready


def i64(*numbers: int) -> Array:
    return np.array(numbers, np.int64)


W = {
    k: weights(RNG, *k)
    for k in [(8, 3, 3), (12, 8, 3), (3, 8, 3), (3, 3, 3), (8, 8, 1), (12, 3, 5)]
}
PADS = {1: [0, 0, 0, 0], 3: [1, 1, 1, 1], 5: [2, 2, 2, 2]}


def layer(x: str, w: str, y: str, k: int = 3, **more: Any) -> bytes:
    return node("Conv", f"{x} {w}", y, pads=PADS[k], kernel_shape=[k, k], **more)


def test_convolutions_prelu_and_pixel_shuffle() -> None:
    bias, slope = networks.random(RNG, 8), networks.random(RNG, 8, 1, 1)
    data = networks.onnx(
        [
            node("Conv", "x w0 b0", "a", pads=PADS[3]),
            node("PRelu", "a slope", "b"),
            layer("b", "w1", "c"),
            node("DepthToSpace", "c", "y", blocksize=2, mode="CRD"),
        ],
        {"w0": W[8, 3, 3], "b0": bias, "slope": slope, "w1": W[12, 8, 3]},
    )
    hidden = prelu(conv(IMAGE, W[8, 3, 3], bias), slope)
    ready = check(data, shuffle(conv(hidden, W[12, 8, 3]), 2))
    assert [n.op for n in ready.nodes] == ["conv", "conv", "shuffle"]
    assert (ready.scale, ready.colours) == (2, 3)


def test_depth_to_space_the_other_way_round() -> None:
    nodes = [layer("x", "w", "a", 5), node("DepthToSpace", "a", "y", blocksize=2)]
    data = networks.onnx(nodes, {"w": W[12, 3, 5]})
    check(data, shuffle(conv(IMAGE, W[12, 3, 5]), 2, deep=True))


@pytest.mark.parametrize("deep", [False, True])
def test_reshape_and_transpose_that_are_a_pixel_shuffle(deep: bool) -> None:
    order = [0, 3, 4, 1, 5, 2] if deep else [0, 1, 4, 2, 5, 3]
    first = i64(1, 2, 2, 3, 12, 8) if deep else i64(1, 3, 2, 2, 12, 8)
    data = networks.onnx(
        [
            layer("x", "w", "a", 5),
            node("Reshape", "a first", "b"),
            node("Transpose", "b", "c", perm=order),
            node("Reshape", "c last", "y"),
        ],
        {"w": W[12, 3, 5], "first": first, "last": i64(1, 3, 24, -1)},
        size=(12, 8),
    )
    check(data, shuffle(conv(IMAGE, W[12, 3, 5]), 2, deep))


def test_sizes_that_are_computed_become_numbers() -> None:
    # What PyTorch writes for view(b, c, 2, 2, h, w) with a size that is not known.
    data = networks.onnx(
        [
            layer("x", "w", "a", 5),
            node("Shape", "a", "shape"),
            node("Gather", "shape two", "h", axis=0),
            node("Gather", "shape three", "v", axis=0),
            node("Unsqueeze", "h zero", "h1"),
            node("Unsqueeze", "v zero", "v1"),
            node("Concat", "front h1 v1", "first", axis=0),
            node("Reshape", "a first", "b"),
            node("Transpose", "b", "c", perm=[0, 1, 4, 2, 5, 3]),
            node("Mul", "h1 double", "h2"),
            node("Mul", "v1 double", "v2"),
            node("Concat", "ends h2 v2", "last", axis=0),
            node("Reshape", "c last", "y"),
        ],
        {
            "w": W[12, 3, 5],
            "two": np.array(2, np.int64),
            "three": np.array(3, np.int64),
            "zero": i64(0),
            "double": i64(2),
            "front": i64(1, 3, 2, 2),
            "ends": i64(1, 3),
        },
    )
    check(data, shuffle(conv(IMAGE, W[12, 3, 5]), 2))


def test_space_to_depth_and_back() -> None:
    data = networks.onnx(
        [
            node("SpaceToDepth", "x", "a", blocksize=2),
            layer("a", "w", "b", 1),
            node("DepthToSpace", "b", "y", blocksize=2, mode="CRD"),
        ],
        {"w": weights(RNG, 12, 12, 1)},
    )
    net = load(data)
    w = net.array(net.nodes[1], 0)
    check(data, shuffle(conv(networks.unshuffle(IMAGE, 2, True), w), 2))


def test_batch_norm_goes_into_the_weights() -> None:
    scale, shift, mean = (networks.random(RNG, 8) for _ in range(3))
    var = np.abs(networks.random(RNG, 8)) + 0.1
    data = networks.onnx(
        [
            layer("x", "w", "a"),
            node("BatchNormalization", "a scale shift mean var", "b", epsilon=0.001),
            node("Relu", "b", "c"),
            layer("c", "v", "y"),
        ],
        {
            "w": W[8, 3, 3],
            "v": W[3, 8, 3],
            "scale": scale,
            "shift": shift,
            "mean": mean,
            "var": var,
        },
    )
    factor = (scale / np.sqrt(var + 0.001)).reshape(-1, 1, 1)
    normed = (conv(IMAGE, W[8, 3, 3]) - mean.reshape(-1, 1, 1)) * factor + shift.reshape(-1, 1, 1)
    ready = check(data, conv(prelu(normed, 0.0), W[3, 8, 3]))
    assert [n.op for n in ready.nodes] == ["conv", "conv"]


def test_silu_residuals_constants_and_leaky_relu() -> None:
    mean = networks.random(RNG, 1, 3, 1, 1)
    data = networks.onnx(
        [
            node("Sub", "x mean", "m"),
            node("Mul", "m two", "n"),
            layer("n", "w", "a"),
            node("Sigmoid", "a", "s"),
            node("Mul", "a s", "b"),
            layer("b", "u", "c", 1),
            node("Mul", "c fifth", "d"),
            node("Add", "b d", "e"),
            node("LeakyRelu", "e", "f", alpha=0.2),
            layer("f", "v", "g"),
            node("Sub", "g x", "h"),
            node("Div", "h two", "i"),
            node("Clip", "i low high", "y"),
        ],
        {
            "mean": mean,
            "two": np.array(2, np.float32),
            "fifth": np.array([0.2], np.float32),
            "w": W[8, 3, 3],
            "u": W[8, 8, 1],
            "v": W[3, 8, 3],
            "low": np.array(0, np.float32),
            "high": np.array(1, np.float32),
        },
    )
    a = conv(2 * (IMAGE - mean[0]), W[8, 3, 3])
    b = a * sigmoid(a)
    f = prelu(b + 0.2 * conv(b, W[8, 8, 1]), 0.2)
    ready = check(data, (conv(f, W[3, 8, 3]) - IMAGE) / 2)
    acts = [n.attrs["act"] for n in ready.nodes if n.op == "conv"]
    assert acts == ["silu", "slope", "slope"]
    residuals = [n.attrs["residual"] for n in ready.nodes if n.op == "conv"]
    assert residuals == [False, True, False]


@pytest.mark.parametrize(
    ("attrs", "tensors", "want"),
    [
        ({"mode": "nearest"}, True, lambda x: networks.nearest(x, 2)),
        (
            {"mode": "nearest", "coordinate_transformation_mode": "asymmetric"}
            | {"nearest_mode": "floor"},
            False,
            lambda x: networks.nearest(x, 2),
        ),
        ({"mode": "linear"}, False, lambda x: _linear(x)),
    ],
)
def test_resize(attrs: dict[str, Any], tensors: bool, want: Callable[[Array], Array]) -> None:
    held = {"w": W[3, 3, 3], "sizes": i64(1, 3, 24, 16)}
    held["scales"] = np.array([1, 1, 2, 2], np.float32)
    inputs = "a - - sizes" if tensors else "a - scales"
    nodes = [layer("x", "w", "a"), node("Resize", inputs, "b", **attrs), layer("b", "w", "y")]
    data = networks.onnx(nodes, held, size=(12, 8))
    check(data, conv(want(conv(IMAGE, W[3, 3, 3])), W[3, 3, 3]))


def _linear(x: Array) -> Array:
    """Twice the size, between the samples' centres."""
    for axis in (1, 2):
        low = np.concatenate([x.take([0], axis), x.take(range(x.shape[axis] - 1), axis)], axis)
        high = np.concatenate([x.take(range(1, x.shape[axis]), axis), x.take([-1], axis)], axis)
        both = np.stack([0.25 * low + 0.75 * x, 0.75 * x + 0.25 * high], axis + 1)
        x = both.reshape([n * (2 if i == axis else 1) for i, n in enumerate(x.shape)])
    return x


def test_concat_slices_and_split() -> None:
    w, u = weights(RNG, 6, 3, 3), weights(RNG, 3, 8, 1)
    data = networks.onnx(
        [
            layer("x", "w", "a"),
            node("Split", "a sizes", "b c", axis=1),
            node("Slice", "c one five one", "d"),
            node("Concat", "b x d", "e", axis=1),
            layer("e", "u", "y", 1),
        ],
        {
            "w": w,
            "u": u,
            "sizes": i64(2, 4),
            "one": i64(1),
            "five": i64(5),
        },
    )
    a = conv(IMAGE, w)
    check(data, conv(np.concatenate([a[:2], IMAGE, a[3:6]]), u))


def test_a_transposed_convolution() -> None:
    w, bias = networks.random(RNG, 3, 3, 9, 9, scale=0.05), networks.random(RNG, 3)
    attrs = {"strides": [2, 2], "pads": [4, 4, 4, 4], "output_padding": [1, 1]}
    data = networks.onnx([node("ConvTranspose", "x w b", "y", **attrs)], {"w": w, "b": bias})
    full = np.zeros((3, 2 * 12 + 9, 2 * 8 + 9))
    for i in range(12):
        for j in range(8):
            full[:, 2 * i : 2 * i + 9, 2 * j : 2 * j + 9] += np.einsum(
                "c,cohw->ohw", IMAGE[:, i, j], w
            )
    check(data, full[:, 4 : 4 + 24, 4 : 4 + 16] + bias.reshape(-1, 1, 1))


def test_groups_dilation_and_oblong_kernels_become_dense() -> None:
    w = networks.random(RNG, 3, 1, 3, 1)
    attrs = {"group": 3, "dilations": [2, 1], "pads": [2, 0, 2, 0]}
    data = networks.onnx([node("Conv", "x w", "y", **attrs)], {"w": w})
    padded = np.pad(IMAGE, ((0, 0), (2, 2), (0, 0)))
    want = sum(w[:, 0, a].reshape(3, 1, 1) * padded[:, 2 * a : 2 * a + 12] for a in range(3))
    check(data, np.asarray(want))


def model(*nodes: bytes, **tensors: Array) -> bytes:
    return networks.onnx(nodes, tensors)


BAD: dict[str, tuple[bytes, str]] = {
    "operator": (
        model(node("LayerNormalization", "x w", "y"), w=W[3, 3, 3]),
        r"LayerNormalization \(node /y\)",
    ),
    "stride": (
        model(node("Conv", "x w", "y", pads=PADS[3], strides=[2, 2]), w=W[3, 3, 3]),
        r"Conv \(node /y\).*steps",
    ),
    "padding": (model(node("Conv", "x w", "y"), w=W[3, 3, 3]), r"Conv \(node /y\).*padding"),
    "channels": (model(layer("x", "w", "y"), w=W[3, 8, 3]), r"Conv \(node /y\).*channels"),
    "computed weights": (
        model(layer("x", "w", "a"), layer("x", "a", "y"), w=W[3, 3, 3]),
        r"\(node /y\)",
    ),
    "view": (
        model(node("Reshape", "x s", "y"), s=i64(1, -1)),
        r"output is not made|Reshape \(node /y\)",
    ),
    "nothing before": (model(layer("z", "w", "y"), w=W[3, 3, 3]), "nothing writes before"),
    "four channels": (model(layer("x", "w", "y", 1), w=weights(RNG, 4, 3, 1)), "4 channels of 3"),
    "clip": (
        model(node("Clip", "x", "a", min=0.0), layer("a", "w", "y"), w=W[3, 3, 3]),
        r"Clip \(node /a\)",
    ),
    "not finite": (model(layer("x", "w", "y"), w=W[3, 3, 3] * np.float32(np.inf)), "finite"),
}


@pytest.mark.filterwarnings("ignore:invalid value")
@pytest.mark.parametrize("name", BAD)
def test_what_is_not_run_is_named(name: str) -> None:
    data, message = BAD[name]
    with pytest.raises((UnsupportedModel, BadModel), match=message):
        load(data)


def test_constants_cannot_grow_without_bound() -> None:
    column, row = np.zeros((1 << 14, 1), np.float32), np.zeros((1, 1 << 14), np.float32)
    data = model(node("Add", "c r", "y"), c=column, r=row)
    with pytest.raises(UnsupportedModel, match="too large"):
        load(data)


GOOD = networks.onnx(
    [layer("x", "w", "a"), node("DepthToSpace", "a", "y", blocksize=2)],
    {"w": weights(RNG, 12, 3, 3)},
)


def test_a_file_that_is_cut_short_is_refused() -> None:
    for end in (0, 1, 5, len(GOOD) // 3, len(GOOD) // 2, len(GOOD) - 1):
        with pytest.raises(PvrError):
            load(GOOD[:end])


@settings(max_examples=150, deadline=None)
@given(st.integers(0, len(GOOD) - 1), st.binary(min_size=1, max_size=4))
def test_damage_ends_in_a_sentence_or_in_a_network(at: int, noise: bytes) -> None:
    data = GOOD[:at] + noise + GOOD[at + len(noise) :]
    with contextlib.suppress(PvrError):
        prepared(load(data))


def test_lengths_beyond_the_file_are_refused() -> None:
    huge = networks.number(1, 8) + networks.varint(7 << 3 | 2) + networks.varint(1 << 60)
    with pytest.raises(BadModel, match="cut short"):
        load(huge)
    with pytest.raises(BadModel, match="no end"):
        load(b"\x08\x08" + b"\x3a" + b"\xff" * 12)


def test_dimensions_beside_a_zero_are_bounded_too() -> None:
    dims = b"".join(networks.number(1, d) for d in (0, 1 << 31, 1 << 31, 1 << 31))
    tensor = dims + networks.number(2, 1) + networks.part(9, b"")
    data = networks.number(1, 8) + networks.part(7, networks.part(5, tensor))
    with pytest.raises(BadModel, match="impossible shape"):
        load(data)


def test_a_file_may_become_shorter_after_it_was_read() -> None:
    fd = os.memfd_create("onnx")
    try:
        os.write(fd, GOOD)
        graph = onnx_wire.read(fd)
        os.ftruncate(fd, 0)
    finally:
        os.close(fd)
    assert all(np.isfinite(array).all() for array in graph.constants.values())


def test_other_files_are_none() -> None:
    for data in (b"", b"GGUF", b"\x89PNG\r\n\x1a\n" + bytes(20)):
        with pytest.raises(BadModel):
            load(data)
    with pytest.raises(UnsupportedModel, match="pvrctl compile"):
        load(b"7767517\n1 1\n")
    assert onnx.PROBE[0] % 48 == onnx.PROBE[1] % 48 == 0
