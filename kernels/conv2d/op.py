# SPDX-License-Identifier: Apache-2.0
"""conv2d: a convolution with zero padding, its activation and a residual, on feature maps
(kernels/maps.py).

y[o] = act(bias[o] + sum over c, a, b of w[o, c, a, b] * x[c] at (row + a - k/2, column + b - k/2));
with `residual` 1 plus r[o], which the activation GATE takes itself. k is odd and the border of the
maps at least k/2 wide. x has cin channels in blocks of xl lanes, a multiple of them, y and r have
cout in blocks of yl; what fills up the last block is written too. All have one geometry.

w: with n = cout rounded up to 16, f32 bias [n], slope [n], scale [n], then the weights [n/16][k][k]
[cin][16]: f16 as halves (scale is not read), q8 as int8 that are worth `scale` of their channel.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from kernels import maps
from kernels.contract import FORMATS, Bind, Contract, Groups, Variant, ceil_div
from kernels.maps import F32, Array

EACH = 8  # output channels of an invocation
PIXELS = 4


def nbytes(fmt: str, cin: int, cout: int, k: int) -> int:
    """Bytes of a packed convolution."""
    n = ceil_div(cout, 16) * 16
    return 12 * n + n * k * k * cin * (2 if fmt == "f16" else 1)


def pack(fmt: str, w: Array, bias: Array, slope: Array) -> Array:
    """Weights [cout, cin, k, k] as the operation reads them: bytes. cin is a multiple of 4."""
    cout, cin, k, _ = w.shape
    n = ceil_div(cout, 16) * 16
    tail = np.zeros((3, n), np.float32)
    tail[0, :cout], tail[1, :cout], tail[2] = bias, slope, 1
    wide = np.zeros((n, cin, k, k), np.float32)
    wide[:cout] = w
    if fmt == "q8":
        most = np.abs(wide).reshape(n, -1).max(1)
        tail[2] = np.where(most > 0, most / 127, 1)
        wide = np.rint(wide / tail[2][:, None, None, None])
    packed = wide.reshape(n // 16, 16, cin, k, k).transpose(0, 3, 4, 2, 1)
    body = np.ascontiguousarray(packed).astype(np.float16 if fmt == "f16" else np.int8)
    return np.concatenate([tail.reshape(-1).view(np.uint8), body.reshape(-1).view(np.uint8)])


def unpack(fmt: str, data: Array, cin: int, cout: int, k: int) -> tuple[Array, F32, F32]:
    """Weights [n, cin, k, k], bias and slope [n] as the operation understands them."""
    n = ceil_div(cout, 16) * 16
    flat = data.reshape(-1).view(np.uint8)
    bias, slope, scale = flat[: 12 * n].view(np.float32).reshape(3, n)
    dtype = np.float16 if fmt == "f16" else np.int8
    body = flat[12 * n : nbytes(fmt, cin, cout, k)].view(dtype)
    w: Array = body.reshape(n // 16, k, k, cin, 16).transpose(0, 4, 3, 1, 2).reshape(n, cin, k, k)
    w = w.astype(np.float32)
    if fmt == "q8":
        w *= scale[:, None, None, None]
    return w, bias, slope


def _groups(push: Mapping[str, Any], variant: Variant) -> Groups:
    across = ceil_div(ceil_div(push["w"], PIXELS), variant.workgroup[0])
    lanes = ceil_div(push["cout"], push["yl"]) * push["yl"]
    return across, push["h"], ceil_div(lanes, EACH)


def reference(params: Array, buffers: Mapping[str, Any], push: Mapping[str, Any]) -> None:
    cin, cout, k, w, h = (int(push[n]) for n in ("cin", "cout", "k", "w", "h"))
    fmt = "f16" if push["fmt"] == FORMATS["f16"] else "q8"
    weights, bias, slope = unpack(fmt, buffers["w"], cin, cout, k)
    blocks, lanes = ceil_div(cin, push["xl"]), int(push["xl"])
    reach = k // 2
    around = {**push, "w": w + 2 * reach, "h": h + 2 * reach}
    around["origin"] = push["origin"] - reach * push["xs"] - reach
    x = maps.view(buffers["x"], blocks, lanes, around)
    out = np.broadcast_to(bias[:, None, None], (len(bias), h, w)).astype(np.float32)
    for a in range(k):
        for b in range(k):
            part = x[:, a : a + h, b : b + w].transpose(0, 3, 1, 2).reshape(-1, h * w)
            out += (weights[:, :, a, b] @ part).reshape(out.shape)
    out_blocks, lanes = ceil_div(cout, push["yl"]), int(push["yl"])
    out = out[: out_blocks * lanes].reshape(out_blocks, lanes, h, w).transpose(0, 2, 3, 1)
    slope = slope[: out_blocks * lanes].reshape(out_blocks, 1, 1, lanes)
    r = maps.view(buffers["r"], out_blocks, lanes, push) if push["residual"] else 0.0
    out = maps.activated(push["act"], out, slope, r)
    if push["residual"] and push["act"] != maps.GATE:
        out = out + r
    maps.view(buffers["y"], out_blocks, lanes, push)[:] = out


OP = Contract(
    name="conv2d",
    bindings=(Bind("x", "r"), Bind("w", "r"), Bind("r", "r"), Bind("y", "w")),
    push=(
        ("fmt", "u32"),
        ("cin", "u32"),
        ("cout", "u32"),
        ("k", "u32"),
        ("act", "u32"),
        ("residual", "u32"),
        ("xl", "u32"),
        ("yl", "u32"),
        ("w", "u32"),
        ("h", "u32"),
        ("xs", "u32"),
        ("ps", "u32"),
        ("origin", "u32"),
    ),
    variants=(
        Variant("f16", (32, 1, 1), {"FMT_F16": "1"}),
        Variant("q8", (32, 1, 1), {"FMT_Q8": "1"}),
    ),
    groups=_groups,
    reference=reference,
)
