# SPDX-License-Identifier: Apache-2.0
"""Networks from pairs of ncnn files that the tests write, against numpy."""

from __future__ import annotations

import contextlib
import os
import struct
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import BadModel, PvrError, UnsupportedModel
from engine.importers import convnets, ncnn, ncnn_files
from engine.video.convnet import prepared
from engine.video.convnet_graph import Net
from tests.engine import networks
from tests.engine.networks import Array, conv, evaluate, prelu, shuffle, sigmoid, weights

RNG = np.random.default_rng(11)
IMAGE = RNG.random((3, 8, 12)).astype(np.float32)


def tagged(w: Array, form: str = "raw") -> bytes:
    """Weights behind the word that says their type."""
    flat = w.reshape(-1)
    if form == "half":
        return (
            struct.pack("<I", 0x01306B47) + flat.astype("<f2").tobytes() + bytes(flat.size % 2 * 2)
        )
    if form == "table":
        table, places = np.unique(flat, return_inverse=True)
        assert table.size <= 256
        data = np.resize(table, 256).astype("<f4").tobytes() + places.astype(np.uint8).tobytes()
        return struct.pack("<I", 1) + data + bytes(-flat.size % 4)
    return struct.pack("<I", 0) + flat.astype("<f4").tobytes()


def load(lines: Sequence[str], data: bytes, layers: int | None = None) -> Net:
    text = f"7767517\n{len(lines) if layers is None else layers} 99\n" + "\n".join(lines) + "\n"
    fds = [os.memfd_create(name) for name in ("param", "bin")]
    try:
        os.write(fds[0], text.encode())
        os.write(fds[1], data)
        return ncnn.load(*fds)
    finally:
        for fd in fds:
            os.close(fd)


def check(lines: Sequence[str], data: bytes, want: Array) -> Net:
    net = load(lines, data)
    np.testing.assert_allclose(evaluate(net, IMAGE), want, rtol=1e-4, atol=1e-5)
    ready = prepared(net)
    np.testing.assert_allclose(evaluate(ready, IMAGE), want, rtol=1e-4, atol=1e-5)
    return ready


INPUT = "Input in 0 1 data"
W8, W12, W3 = weights(RNG, 8, 3, 3), weights(RNG, 12, 8, 3), weights(RNG, 3, 8, 3)
B8, B12 = networks.random(RNG, 8), networks.random(RNG, 12)


@pytest.mark.parametrize("form", ["raw", "half", "table"])
def test_convolution_prelu_pixel_shuffle_and_interp(form: str) -> None:
    slope = networks.random(RNG, 8)
    w8, w12 = W8, W12
    if form == "half":
        w8, w12 = (w.astype(np.float16).astype(np.float32) for w in (W8, W12))
    elif form == "table":
        w8, w12 = (np.round(w * 64) / 64 for w in (W8, W12))
    lines = [
        INPUT,
        "Split s 1 2 data d0 d1",
        f"Convolution c0 1 1 d1 a 0=8 1=3 4=1 5=1 6={W8.size}",
        "PReLU p 1 1 a b 0=8",
        f"Convolution c1 1 1 b c 0=12 1=3 4=1 5=1 6={W12.size}",
        "PixelShuffle ps 1 1 c e 0=2",
        "Interp i 1 1 d0 f 0=1 1=2.0 2=2.0",
        "BinaryOp add 2 1 e f y 0=0",
    ]
    data = tagged(w8, form) + B8.tobytes() + slope.tobytes() + tagged(w12, form) + B12.tobytes()
    hidden = prelu(conv(IMAGE, w8, B8), slope)
    want = shuffle(conv(hidden, w12, B12), 2) + networks.nearest(IMAGE, 2)
    ready = check(lines, data, want)
    assert [n.op for n in ready.nodes] == ["conv", "conv", "shuffle", "resize"]


def test_spans_gate_is_one_convolution() -> None:
    w, u = weights(RNG, 8, 8, 3), weights(RNG, 3, 8, 1)
    lines = [
        INPUT,
        "MemoryData mean 0 1 mean 0=1 1=1 2=3",
        "BinaryOp sub 2 1 data mean m 0=1",
        "BinaryOp mul 1 1 m n 0=2 1=1 2=2.0",
        f"Convolution c0 1 1 n a 0=8 1=3 4=1 5=1 6={W8.size}",
        "Split s0 1 2 a a0 a1",
        f"Convolution c1 1 1 a0 b 0=8 1=3 4=1 5=0 6={w.size}",
        "Split s1 1 2 b b0 b1",
        "Sigmoid sg 1 1 b0 g",
        "BinaryOp half 1 1 g h 0=1 1=1 2=0.5",
        "BinaryOp add 2 1 b1 a1 t 0=0",
        "BinaryOp gate 2 1 t h k 0=2",
        "Swish sw 1 1 k l",
        f"Convolution c2 1 1 l y 0=3 1=1 5=0 6={u.size}",
    ]
    mean = networks.random(RNG, 3)
    data = mean.tobytes() + tagged(W8) + B8.tobytes() + tagged(w) + tagged(u)
    a = conv(2 * (IMAGE - mean.reshape(-1, 1, 1)), W8, B8)
    b = conv(a, w)
    k = (b + a) * (sigmoid(b) - 0.5)
    ready = check(lines, data, conv(k * sigmoid(k), u))
    assert [n.attrs.get("act") for n in ready.nodes if n.op == "conv"] == ["slope", "gate", "slope"]


def test_eltwise_concat_and_fused_activations() -> None:
    w, u = weights(RNG, 5, 3, 3), weights(RNG, 3, 8, 3)
    lines = [
        INPUT,
        "Split s 1 3 data d0 d1 d2",
        f"Convolution c0 1 1 d0 a 0=5 1=3 4=1 5=0 6={w.size} 9=2 -23310=1,0.2",
        "Concat cat 2 1 a d1 b 0=0",
        f"Convolution c1 1 1 b c 0=3 1=3 4=1 5=0 6={u.size}",
        "Eltwise e 2 1 c d2 f 0=1 -23301=2,0.2,1.0",
        "Eltwise e2 2 1 f f f2 0=1",
        "BatchNorm bn 1 1 f2 y 0=3 1=0.001",
    ]
    slope, mean, bias = (networks.random(RNG, 3) for _ in range(3))
    var = np.abs(networks.random(RNG, 3)) + np.float32(0.1)
    data = tagged(w) + tagged(u) + b"".join(v.tobytes() for v in (slope, mean, var, bias))
    a = prelu(conv(IMAGE, w), 0.2)
    f = 2 * (0.2 * conv(np.concatenate([a, IMAGE]), u) + IMAGE)
    factor, shift, middle = (
        v.reshape(-1, 1, 1) for v in (slope / np.sqrt(var + 0.001), bias, mean)
    )
    check(lines, data, (f - middle) * factor + shift)


def test_int8_weights_have_scales() -> None:
    whole = RNG.integers(-127, 128, W3.size).astype(np.int8)
    first = tagged(W8) + B8.tobytes()
    scales = np.array([100, 200, 300], np.float32)
    data = first + struct.pack("<I", 0x000D4B38) + whole.tobytes() + bytes(-W3.size % 4)
    data += scales.tobytes() + struct.pack("<f", 40.0)
    lines = [
        INPUT,
        f"Convolution c0 1 1 data a 0=8 1=3 4=1 5=1 6={W8.size}",
        f"Convolution c1 1 1 a y 0=3 1=3 4=1 5=0 6={W3.size} 8=1",
    ]
    w = whole.reshape(W3.shape) / scales.reshape(-1, 1, 1, 1)
    check(lines, data, conv(conv(IMAGE, W8, B8), w))


def test_deconvolution_slices_and_reorg() -> None:
    w = networks.random(RNG, 3, 6, 4, 4, scale=0.1)  # outputs first
    lines = [
        INPUT,
        "Reorg r 1 1 data a 0=2",
        "Slice s 1 2 a b c -23300=2,6,-233 1=0",
        "BinaryOp sub 2 1 b c d 0=1",
        f"Deconvolution dc 1 1 d y 0=3 1=4 3=2 4=1 5=0 6={w.size}",
    ]
    deep = networks.unshuffle(IMAGE, 2)
    d = deep[:6] - deep[6:]
    full = np.zeros((3, 2 * 4 + 4, 2 * 6 + 4))
    for i in range(4):
        for j in range(6):
            full[:, 2 * i : 2 * i + 4, 2 * j : 2 * j + 4] += np.einsum("c,ochw->ohw", d[:, i, j], w)
    check(lines, tagged(w), full[:, 1 : 1 + 8, 1 : 1 + 12])


CONV = f"Convolution c 1 1 data y 0=8 1=3 4=1 5=1 6={W8.size}"


@pytest.mark.parametrize(
    ("lines", "data", "message"),
    [
        (["Input in 0 1 data", "LSTM l 1 1 data y"], b"", r"LSTM \(layer l\)"),
        ([INPUT, CONV.replace("1=3", "1=3 3=2")], tagged(W8) + B8.tobytes(), r"\(node c\).*steps"),
        ([INPUT, CONV.replace("4=1", "4=0")], tagged(W8) + B8.tobytes(), r"\(node c\).*padding"),
        ([INPUT, CONV], tagged(W8) + B8.tobytes()[:8], "ends in the weights of the layer c"),
        ([INPUT, CONV], tagged(W8) + B8.tobytes() + bytes(4), "another .param"),
        ([INPUT, CONV], tagged(W8) + B8.tobytes(), "8 channels of 3"),
        ([INPUT, "BinaryOp r 2 1 data z y 0=0"], b"", "no layer before"),
        ([INPUT, "Interp i 1 1 data y 0=2 6=1"], b"", "aligned corners"),
        ([INPUT, "ReLU r 1 1 data y 0"], b"", "line 4 is damaged"),
        ([INPUT, "ReLU r 9 1 data y"], b"", "line 4 is damaged"),
        ([INPUT, "ReLU r 1 1 data y", "ReLU q 1 1 data z"], b"", "2 outputs"),
        ([INPUT, f"Convolution c 1 1 data y 0=-8 1=3 6={W8.size}"], b"", "weights for -8"),
        ([INPUT, "Convolution c 1 1 data y 0=8 1=3 6=999999999"], tagged(W8), "weights"),
        (["ReLU r 1 1 data y"], b"", "0 inputs"),
    ],
)
def test_what_is_wrong_is_named(lines: list[str], data: bytes, message: str) -> None:
    with pytest.raises((BadModel, UnsupportedModel), match=message):
        load(lines, data)


def test_a_param_file_that_is_cut_short() -> None:
    with pytest.raises(BadModel, match="not as many as it says"):
        load([INPUT, CONV], b"", layers=3)
    with pytest.raises(BadModel, match=r"no ncnn \.param"):
        ncnn_files.parse(b"7767516\n1 1\n")


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 200), st.binary(min_size=1, max_size=4))
def test_damage_ends_in_a_sentence_or_in_a_network(at: int, noise: bytes) -> None:
    text = "\n".join([INPUT, CONV, f"Convolution d 1 1 y z 0=3 1=3 4=1 5=0 6={W3.size}"]).encode()
    damaged = (text[:at] + noise + text[at + len(noise) :]).decode("utf-8", "replace")
    with contextlib.suppress(PvrError):
        prepared(load(damaged.split("\n"), tagged(W8) + B8.tobytes() + tagged(W3)))


def test_the_other_file_is_found(tmp_path: Path) -> None:
    lines = ["7767517", "3 3", INPUT, CONV, f"Convolution d 1 1 y z 0=3 1=3 4=1 5=0 6={W3.size}"]
    (tmp_path / "a.param").write_text("\n".join(lines) + "\n")
    with pytest.raises(PvrError, match=r"a\.bin cannot be opened"):
        convnets.load(tmp_path / "a.param")
    (tmp_path / "a.bin").write_bytes(tagged(W8) + B8.tobytes() + tagged(W3))
    for name in ("a.param", "a.bin"):
        assert convnets.load(tmp_path / name).scale == 1
