# SPDX-License-Identifier: Apache-2.0
"""The networks in their training form: wide linear blocks that collapse to plain 3x3 convolutions.

Each convolution is trained as (3x3 to `wide` channels, then 1x1 back) plus a direct 3x3 plus an
identity. All of that is linear, so the product is formed on the weights in every step and one 3x3
runs on the pixels (collapsible linear blocks: Bhardwaj et al., SESR, MLSys 2022). No padding: every
layer loses a ring of one pixel, the caller gives context, which is how the engine runs it, too.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from fused import bias_prelu
from torch import Tensor, nn
from torch.nn import functional as F

BASE_TAPS = 5
Arrays = Mapping[str, npt.NDArray[np.float32]]


def cubic(x: float, a: float = -0.5) -> float:
    """Keys' cubic kernel."""
    x = abs(x)
    if x <= 1:
        return (a + 2) * x**3 - (a + 3) * x**2 + 1
    if x < 2:
        return a * x**3 - 5 * a * x**2 + 8 * a * x - 4 * a
    return 0.0


def offsets(scale: int, siting: str = "centre") -> list[float]:
    """Where the output samples of one input sample lie, in input samples from its middle. `left`
    is the horizontal siting of 4:2:0 chroma whose samples lie on even columns of the luma.
    """
    shift = 0.5 if siting == "centre" else 0.25
    return [(p + shift) / scale - shift for p in range(scale)]


def bicubic_phases(scale: int, siting: str = "centre") -> Tensor:
    """Plain bicubic as scale^2 filters [scale^2, 5, 5]; phase = scale * row + column."""

    def lines(at: list[float]) -> Tensor:
        rows = torch.tensor([[cubic(t - 2 - o) for t in range(BASE_TAPS)] for o in at])
        return rows / rows.sum(1, keepdim=True)

    down, across = lines(offsets(scale)), lines(offsets(scale, siting))
    return torch.einsum("ai,bj->abij", down, across).reshape(-1, BASE_TAPS, BASE_TAPS)


@dataclass(frozen=True)
class Shape:
    """What a network looks like: `convs` 3x3 layers, `skip` pairs (a, b): the activation after
    layer a is added to the output of layer b before its activation. `siting` of a chroma network
    (whose first input is the chroma sample, then its four luma samples); empty for luma.
    """

    scale: int
    channels: int
    convs: int
    skip: tuple[tuple[int, int], ...] = ()
    siting: str = ""

    @property
    def inputs(self) -> int:
        return 5 if self.siting else 1

    @property
    def macs(self) -> int:
        """Multiplications per input sample, the linear filter included."""
        c, phases = self.channels, self.scale**2
        inner = 9 * c * c * (self.convs - 2)
        return 9 * self.inputs * c + inner + 9 * c * phases + BASE_TAPS**2 * phases


class Blocks(nn.Module):
    """`count` convolutions of one size (cin to cout channels), trained wide and collapsed at once.

    `start_from` makes a block exactly the weights that it gets; until then it is random around the
    identity. With `wide` 0 there is nothing but the direct 3x3.
    """

    def __init__(self, count: int, cin: int, cout: int, wide: int, gain: float = 1.0) -> None:
        super().__init__()
        self.size = (count, cout, cin, 3, 3)
        self.wide = wide
        if wide:
            self.w1 = nn.Parameter(torch.randn(count, wide, 9 * cin) * math.sqrt(1 / (9 * cin)))
            self.w2 = nn.Parameter(torch.randn(count, cout, wide) * gain * math.sqrt(1 / wide))
        direct = torch.zeros(self.size)
        if cin == cout:
            direct[:, range(cin), range(cin), 1, 1] = 1.0
        if not wide:
            direct += torch.randn(self.size) * gain * math.sqrt(1 / (9 * cin))
        self.direct = nn.Parameter(direct.flatten(2))
        self.bias = nn.Parameter(torch.zeros(count, cout))

    def kernels(self) -> Tensor:
        """The collapsed weights [count, cout, cin, 3, 3]."""
        if not self.wide:
            return self.direct.view(self.size)
        return torch.baddbmm(self.direct, self.w2, self.w1).view(self.size)

    @torch.no_grad()
    def start_from(self, narrow: Tensor, bias: Tensor) -> None:
        self.direct += (narrow - self.kernels()).flatten(2)
        self.bias.copy_(bias)


class Nsr(nn.Module):
    """[N, inputs, H, W] in 0..1 -> [N, 1, scale (H-2r), scale (W-2r)], r = number of layers."""

    def __init__(self, shape: Shape, wide: int = 128) -> None:
        super().__init__()
        self.shape = shape
        c, inner = shape.channels, shape.convs - 2
        self.first = Blocks(1, shape.inputs, c, wide)
        self.inner = Blocks(inner, c, c, wide, gain=0.5)
        self.last = Blocks(1, c, shape.scale**2, wide, gain=0.1)
        self.slopes = nn.Parameter(torch.full((inner + 1, c), 0.25))
        self.base = nn.Parameter(bicubic_phases(shape.scale, shape.siting or "centre"))

    @property
    def radius(self) -> int:
        return self.shape.convs

    def forward(self, x: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """The layers run in `dtype`, the linear filter in float32."""
        inner = [k.squeeze(0) for k in self.inner.kernels().to(dtype).split(1)]
        kernels = [self.first.kernels()[0].to(dtype), *inner]
        bias = [self.first.bias[0], *self.inner.bias.unbind()]
        kept: dict[int, Tensor] = {}
        f = x.to(dtype).contiguous(memory_format=torch.channels_last)
        for i, (kernel, b, slope) in enumerate(zip(kernels, bias, self.slopes, strict=True)):
            f = F.conv2d(f, kernel.contiguous(memory_format=torch.channels_last))
            for a, _ in (s for s in self.shape.skip if s[1] == i):
                m = i - a
                f = f + kept[a][:, :, m:-m, m:-m]
            f = bias_prelu(f, b, slope).to(dtype)
            if any(s[0] == i for s in self.shape.skip):
                kept[i] = f
        last = self.last.kernels()[0].to(dtype).contiguous(memory_format=torch.channels_last)
        f = F.conv2d(f, last, self.last.bias[0].to(dtype)).float()
        m = self.radius - BASE_TAPS // 2
        plain = x[:, :1, m : x.shape[2] - m, m : x.shape[3] - m]
        return F.pixel_shuffle(f + F.conv2d(plain, self.base[:, None]), self.shape.scale)

    @torch.no_grad()
    def folded(self) -> dict[str, npt.NDArray[np.float32]]:
        """What is shipped: conv<i>.weight [cout, cin, 3, 3], conv<i>.bias, conv<i>.slope, base
        [scale^2, 5, 5].
        """
        out = {"base": self.base}
        n = self.shape.convs
        kernels = [*self.first.kernels(), *self.inner.kernels(), *self.last.kernels()]
        bias = [*self.first.bias, *self.inner.bias, *self.last.bias]
        slopes = [*self.slopes, torch.ones(self.shape.scale**2)]
        for i in range(n):
            out[f"conv{i}.weight"], out[f"conv{i}.bias"] = kernels[i], bias[i]
            out[f"conv{i}.slope"] = slopes[i]
        return {k: v.float().cpu().numpy() for k, v in out.items()}

    @torch.no_grad()
    def start_from(self, saved: Arrays) -> None:
        """Starts as the network whose collapsed weights these are. The weights of another scale
        give the trunk alone: last layer and linear filter keep their fresh start.
        """
        here = self.base.device

        def get(i: int, what: str) -> Tensor:
            return torch.from_numpy(np.array(saved[f"conv{i}.{what}"])).to(here)

        n = self.shape.convs
        trunk = range(1, n - 1)
        self.first.start_from(get(0, "weight")[None], get(0, "bias")[None])
        self.inner.start_from(
            torch.stack([get(i, "weight") for i in trunk]),
            torch.stack([get(i, "bias") for i in trunk]),
        )
        self.slopes.copy_(torch.stack([get(i, "slope") for i in range(n - 1)]))
        if saved["base"].shape == self.base.shape:
            self.last.start_from(get(n - 1, "weight")[None], get(n - 1, "bias")[None])
            self.base.copy_(torch.from_numpy(np.array(saved["base"])).to(here))


def trunk(saved: Arrays, shape: Shape, x: Tensor) -> Tensor:
    """What the layers before the last give, of a collapsed network."""
    kept: dict[int, Tensor] = {}
    for i in range(shape.convs - 1):
        weight, bias, slope = (
            torch.from_numpy(saved[f"conv{i}.{k}"]) for k in ("weight", "bias", "slope")
        )
        x = F.conv2d(x, weight, bias)
        for a, _ in (s for s in shape.skip if s[1] == i):
            m = i - a
            x = x + kept[a][:, :, m:-m, m:-m]
        x = kept[i] = F.prelu(x, slope)
    return x


def plain_forward(saved: Arrays, shape: Shape, x: Tensor) -> Tensor:
    """The collapsed network by itself: what the engine computes, to check the training form."""
    last = f"conv{shape.convs - 1}"
    weight, bias = (torch.from_numpy(saved[f"{last}.{k}"]) for k in ("weight", "bias"))
    m = shape.convs - BASE_TAPS // 2
    near = x[:, :1, m : x.shape[2] - m, m : x.shape[3] - m]
    plain = F.conv2d(near, torch.from_numpy(saved["base"])[:, None])
    return F.pixel_shuffle(F.conv2d(trunk(saved, shape, x), weight, bias) + plain, shape.scale)
