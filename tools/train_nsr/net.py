# SPDX-License-Identifier: Apache-2.0
"""The luma network in its training form: wide linear blocks that collapse to plain 3x3
convolutions.

Each convolution is trained as (3x3 to `wide` channels, then 1x1 back) plus a direct 3x3 plus an
identity. All of that is linear, so the product is formed on the weights in every step and one 3x3
runs on the pixels (collapsible linear blocks: Bhardwaj et al., SESR, MLSys 2022). No padding: every
layer loses a ring of one pixel, the caller gives context, which is how the engine runs it, too.
"""

from __future__ import annotations

import math
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F

BASE_TAPS = 5


def cubic(x: float, a: float = -0.5) -> float:
    """Keys' cubic kernel."""
    x = abs(x)
    if x <= 1:
        return (a + 2) * x**3 - (a + 3) * x**2 + 1
    if x < 2:
        return a * x**3 - 5 * a * x**2 + 8 * a * x - 4 * a
    return 0.0


def bicubic_phases() -> Tensor:
    """Plain bicubic x2 as four 5x5 filters [4, 5, 5]; phase = 2 * (row parity) + column parity."""
    lines = [[cubic(t - 2 - o) for t in range(BASE_TAPS)] for o in (-0.25, 0.25)]
    rows = torch.tensor(lines)
    rows = rows / rows.sum(1, keepdim=True)
    return torch.stack([torch.outer(rows[p // 2], rows[p % 2]) for p in range(4)])


class Collapsible(nn.Module):
    """A 3x3 convolution of cin to cout channels, trained wide."""

    def __init__(self, cin: int, cout: int, wide: int) -> None:
        super().__init__()
        self.w1 = nn.Parameter(torch.randn(wide, cin, 3, 3) * math.sqrt(1 / (9 * cin)))
        self.w2 = nn.Parameter(torch.randn(cout, wide) * math.sqrt(1 / wide))
        self.direct = nn.Parameter(torch.zeros(cout, cin, 3, 3))
        self.bias = nn.Parameter(torch.zeros(cout))
        eye = torch.zeros(cout, cin, 3, 3)
        if cin == cout:
            eye[range(cin), range(cin), 1, 1] = 1.0
        self.register_buffer("eye", eye)

    def kernel(self) -> Tensor:
        """The collapsed weights [cout, cin, 3, 3]."""
        k = (self.w2 @ self.w1.flatten(1)).view_as(self.direct)
        return k + self.direct + self.eye  # type: ignore[operator]

    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(x, self.kernel(), self.bias)


class Nsr(nn.Module):
    """x2 on luma: [N, 1, H, W] in 0..1 -> [N, 1, 2(H-2r), 2(W-2r)] with r = blocks + 2."""

    def __init__(self, channels: int, blocks: int, wide: int = 128) -> None:
        super().__init__()
        self.channels, self.blocks = channels, blocks
        sizes = [1] + [channels] * (blocks + 1) + [4]
        self.convs = nn.ModuleList(Collapsible(a, b, wide) for a, b in pairwise(sizes))
        self.slopes = nn.ParameterList(
            nn.Parameter(torch.full((channels,), 0.25)) for _ in range(blocks + 1)
        )
        self.base = nn.Parameter(bicubic_phases())
        with torch.no_grad():
            self.convs[-1].w2 *= 0.1  # type: ignore[operator]

    @property
    def radius(self) -> int:
        return self.blocks + 2

    def forward(self, x: Tensor) -> Tensor:
        f = x
        for conv, slope in zip(self.convs, self.slopes, strict=False):
            f = F.prelu(conv(f), slope)
        f = self.convs[-1](f)
        crop = self.radius - BASE_TAPS // 2
        inner = x[:, :, crop : x.shape[2] - crop, crop : x.shape[3] - crop]
        return F.pixel_shuffle(f + F.conv2d(inner, self.base[:, None]), 2)

    def folded(self) -> dict[str, Tensor]:
        """What is shipped: conv<i>.weight [cout, cin, 3, 3], conv<i>.bias, conv<i>.slope, base [4,
        5, 5].
        """
        out: dict[str, Tensor] = {"base": self.base.detach()}
        for i, conv in enumerate(self.convs):
            out[f"conv{i}.weight"] = conv.kernel().detach()  # type: ignore[operator]
            out[f"conv{i}.bias"] = conv.bias.detach()  # type: ignore[union-attr]
            last = i == len(self.convs) - 1
            out[f"conv{i}.slope"] = torch.ones(4) if last else self.slopes[i].detach()
        return out
