# SPDX-License-Identifier: Apache-2.0
"""conv2d: a convolution with zero padding, its activation and a residual, on feature maps
(kernels/maps.py).

y[o] = act(bias[o] + sum over c, a, b of w[o, c, a, b] * x[c] at (row + a - k/2, column + b - k/2));
with `residual` 1 plus r[o], which the activation GATE takes itself. k is odd and the border of the
maps at least k/2 wide. x has cin channels, a multiple of 4, in blocks of xl lanes, y and r have
cout in blocks of yl; what fills up the last block is written too. All have one geometry.

w: with n = cout rounded up to 8, f32 bias [n], slope [n]; for q8 halves that scale the weights of
four input channels, [block][cin/4][lane]; then the weights [block][k][k][cin][lane] as halves or
int8. A block has 16 output channels, the last one 8 where n ends there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from kernels import maps
from kernels.contract import FORMATS, Bind, Contract, Groups, Variant, ceil_div
from kernels.maps import F32, Array

EACH = 8  # output channels of an invocation
LANES = 16
MATRIX_K = 5  # the largest kernel of the variants for cooperative matrices
PIXELS = 4


def rounded(cout: int) -> int:
    """Output channels that have weights."""
    return ceil_div(cout, EACH) * EACH


def nbytes(fmt: str, cin: int, cout: int, k: int) -> int:
    """Bytes of a packed convolution."""
    n = rounded(cout)
    return (
        8 * n + n * k * k * cin * (2 if fmt == "f16" else 1) + (n * cin // 2 if fmt == "q8" else 0)
    )


def _blocks(w: Array) -> list[Array]:
    """[n, ...] in blocks of 16 and one of 8."""
    return [w[at : at + LANES] for at in range(0, len(w), LANES)]


def pack(fmt: str, w: Array, bias: Array, slope: Array) -> Array:
    """Weights [cout, cin, k, k] as the operation reads them: bytes. cin is a multiple of 4."""
    cout, cin, k, _ = w.shape
    n = rounded(cout)
    front = np.zeros((2, n), np.float32)
    front[0, :cout], front[1, :cout] = bias, slope
    wide = np.zeros((n, cin, k, k), np.float32)
    wide[:cout] = w
    parts = [front]
    if fmt == "q8":
        wide, scale = quantised(wide)
        parts += [np.ascontiguousarray(b.T) for b in _blocks(scale)]
    dtype = np.float16 if fmt == "f16" else np.int8
    parts += [np.ascontiguousarray(b.transpose(2, 3, 1, 0), dtype) for b in _blocks(wide)]
    return np.concatenate([p.reshape(-1).view(np.uint8) for p in parts])


def quantised(w: Array) -> tuple[Array, Array]:
    """[n, cin, k, k] as whole numbers of -127..127, and the scales [n, cin / 4] (halves).

    What rounding leaves of a tap goes to the next one on a way to and fro over the kernel: maps are
    smooth, so that errors of neighbours cancel.
    """
    n, cin, k, _ = w.shape
    most = np.abs(w).reshape(n, cin // 4, -1).max(2)
    scale = np.maximum(most / 127, 2.0**-24).astype(np.float16)
    scale = np.where(
        scale.astype(np.float32) * 127 < most, np.nextafter(scale, np.float16(np.inf)), scale
    )
    exact = w / np.repeat(scale.astype(np.float32), 4, axis=1)[:, :, None, None]
    whole = np.empty_like(exact)
    error = np.zeros((n, cin), np.float32)
    for a in range(k):
        for b in range(k) if a % 2 == 0 else reversed(range(k)):
            wanted = exact[:, :, a, b] + error
            whole[:, :, a, b] = np.clip(np.rint(wanted), -127, 127)
            error = (wanted - whole[:, :, a, b]).astype(np.float32, copy=False)
    return whole, scale


def unpack(fmt: str, data: Array, cin: int, cout: int, k: int) -> tuple[Array, F32, F32]:
    """Weights [n, cin, k, k], bias and slope [n] as the operation understands them."""
    n, at = rounded(cout), 8 * rounded(cout)
    flat = data.reshape(-1).view(np.uint8)
    bias, slope = flat[:at].view(np.float32).reshape(2, n)
    scale = np.ones((n, cin // 4), np.float32)
    w: Array = np.empty((n, cin, k, k), np.float32)
    if fmt == "q8":
        for part in _blocks(scale):
            end = at + 2 * part.size
            part[:] = flat[at:end].view(np.float16).reshape(part.shape[::-1]).T
            at = end
    dtype = np.dtype(np.float16 if fmt == "f16" else np.int8)
    for part in _blocks(w):
        end = at + dtype.itemsize * part.size
        part[:] = flat[at:end].view(dtype).reshape(k, k, cin, len(part)).transpose(3, 2, 0, 1)
        at = end
    return w * np.repeat(scale, 4, axis=1)[:, :, None, None], bias, slope


def _groups(push: Mapping[str, Any], variant: Variant) -> Groups:
    if not variant.baseline:
        lanes = ceil_div(push["cout"], push["yl"]) * push["yl"]
        return ceil_div(push["w"], 16), ceil_div(push["h"], 8), ceil_div(lanes, 64)
    across = ceil_div(ceil_div(push["w"], PIXELS), variant.workgroup[0])
    lanes = ceil_div(push["cout"], push["yl"]) * push["yl"]
    return across, push["h"], ceil_div(lanes, EACH)


def reference(params: Array, buffers: Mapping[str, Any], push: Mapping[str, Any]) -> None:
    cin, cout, k, w, h = (int(push[n]) for n in ("cin", "cout", "k", "w", "h"))
    fmt = "f16" if push["fmt"] == FORMATS["f16"] else "q8"
    packed = unpack(fmt, buffers["w"], cin, cout, k)
    lanes = int(push["yl"])
    n = ceil_div(cout, lanes) * lanes
    weights, bias, slope = (
        np.concatenate([v[:n], np.zeros((max(0, n - len(v)), *v.shape[1:]), np.float32)])
        for v in packed
    )
    blocks, lanes = ceil_div(cin, push["xl"]), int(push["xl"])
    reach = k // 2
    around = {**push, "w": w + 2 * reach, "h": h + 2 * reach}
    around["origin"] = push["origin"] - reach * push["xs"] - reach
    x = maps.view(buffers["x"], blocks, lanes, around)
    out = np.broadcast_to(bias[:, None, None], (len(bias), h, w)).astype(np.float32)
    for a in range(k):
        for b in range(k):
            part = x[:, a : a + h, b : b + w].transpose(0, 3, 1, 2).reshape(-1, h * w)[:cin]
            out += (weights[:, :, a, b] @ part).reshape(out.shape)
    out_blocks, lanes = ceil_div(cout, push["yl"]), int(push["yl"])
    out = out[: out_blocks * lanes].reshape(out_blocks, lanes, h, w).transpose(0, 2, 3, 1)
    slope = slope[: out_blocks * lanes].reshape(out_blocks, 1, 1, lanes)
    r = maps.view(buffers["r"], out_blocks, lanes, push) if push["residual"] else 0.0
    out = maps.activated(push["act"], out, slope, r)
    if push["residual"] and push["act"] != maps.GATE:
        out = out + r
    maps.view(buffers["y"], out_blocks, lanes, push)[:] = out


def coopmat(fmt: str) -> Variant:
    """Pixels and weights as halves, sums in float32 (kernels/include/conv2d_coopmat.glsl); kernels
    of at most MATRIX_K.
    """
    side = MATRIX_K - 1
    shared = (8 + side) * (16 + side) * 32 + MATRIX_K * 16 * 128 + 4 * 1024
    defines = {f"FMT_{fmt.upper()}": "1", "COOPMAT": "1"}
    needs = frozenset({"coopmat", "fp16", "memory_model", "subgroup_basic"})
    return Variant(f"{fmt}_coopmat", (128, 1, 1), defines, needs, shared, baseline=False)


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
        *maps.geometry(),
    ),
    variants=(
        Variant("f16", (32, 1, 1), {"FMT_F16": "1"}),
        Variant("q8", (32, 1, 1), {"FMT_Q8": "1"}),
        coopmat("f16"),
        coopmat("q8"),
    ),
    groups=_groups,
    reference=reference,
)
