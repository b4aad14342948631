# SPDX-License-Identifier: Apache-2.0
"""Pictures for training and for measuring: MATLAB's bicubic, BT.601, 4:2:0, random crops on the
device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from net import cubic
from PIL import Image
from torch import Tensor
from torch.nn import functional as F

PART = 128  # side of the area of places in a picture that are drawn alike
SIZES = (1.0, 0.75, 0.55, 0.4)  # a photograph has finer structure per pixel when made smaller


def luma(rgb: Tensor) -> Tensor:
    """BT.601 limited-range luma [.., H, W], rounded, of 8-bit RGB [.., 3, H, W]."""
    r, g, b = rgb.unbind(-3)
    return (16 + (65.481 * r + 128.553 * g + 24.966 * b) / 255).round()


def chroma(rgb: Tensor) -> Tensor:
    """Cb and Cr [2, H, W] of 8-bit RGB, limited range, not rounded."""
    r, g, b = rgb
    cb = 128 + (-37.797 * r - 74.203 * g + 112.0 * b) / 255
    cr = 128 + (112.0 * r - 93.786 * g - 18.214 * b) / 255
    return torch.stack([cb, cr])


def subsample(c: Tensor, siting: str) -> Tensor:
    """4:2:0 of [2, H, W], rounded."""
    c = (c[:, 0::2] + c[:, 1::2]) / 2
    if siting == "centre":
        c = (c[:, :, 0::2] + c[:, :, 1::2]) / 2
    else:
        before = torch.cat([c[:, :, :1], c[:, :, 1:-1:2]], 2)
        c = (before + 2 * c[:, :, 0::2] + c[:, :, 1::2]) / 4
    return c.clamp(0, 255).round()


def shrink(x: Tensor, scale: int) -> Tensor:
    """1/scale of the size by MATLAB's imresize (antialiased cubic, mirrored borders) of [C, H, W],
    H and W multiples of scale; not rounded.
    """
    n = 4 * scale if scale % 2 == 0 else 4 * scale - 1
    taps = torch.tensor([cubic((t - (n - 1) / 2) / scale) for t in range(n)], device=x.device)
    taps = taps / taps.sum()
    before = (n - scale) // 2
    after = n - scale - before
    c = x.shape[0]
    # F.pad's "reflect" leaves the border pixel out, MATLAB's mirror repeats it: take rows by hand.
    for dim in (1, 2):
        size = x.shape[dim]
        i = torch.arange(-before, size + after, device=x.device)
        i = torch.where(i < 0, -1 - i, torch.where(i >= size, 2 * size - 1 - i, i))
        x = x.index_select(dim, i)
    x = F.conv2d(x[:, None], taps.view(1, 1, n, 1), stride=(scale, 1))
    x = F.conv2d(x, taps.view(1, 1, 1, n), stride=(1, scale))
    return x.view(c, x.shape[2], x.shape[3])


def read_rgb(path: Path) -> Tensor:
    """[3, H, W] float 0..255."""
    return torch.from_numpy(np.array(Image.open(path).convert("RGB"), np.float32)).permute(2, 0, 1)


class Photographs:
    """All pictures as 8-bit RGB on the device: photographs (JPEG) in several sizes, drawings and
    text (PNG) in one.
    """

    def __init__(
        self, paths: list[Path], device: torch.device, sizes: tuple[float, ...] = SIZES
    ) -> None:
        self.device = device
        self.pictures: list[Tensor] = []
        for path in paths:
            rgb = read_rgb(path).to(device)
            for size in sizes if path.suffix == ".jpg" else (1.0,):
                x = rgb
                if size != 1.0:
                    small = [int(s * size) for s in rgb.shape[1:]]
                    x = F.interpolate(rgb[None], small, mode="bicubic", antialias=True)[0]
                self.pictures.append(x.clamp(0, 255).round().to(torch.uint8))

    def pairs(self, scale: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Each picture, cut to a multiple of 2 * scale, and the small one, both [3, H, W] float."""
        for picture in self.pictures:
            h, w = (s // (2 * scale) * 2 * scale for s in picture.shape[1:])
            x = picture[:, :h, :w].float()
            yield x, shrink(x, scale).clamp(0, 255).round()


class Source(Protocol):
    """Where pairs of pictures come from."""

    device: torch.device

    def pairs(self, scale: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Large and small pictures, both [3, H, W] float, 0..255."""
        ...


class Planes:
    """Pairs of planes (high, low) in two flat uint8 tensors, for chroma with the low luma in a
    third. A row of `table` is a part of a picture: where high, low and luma begin, first row and
    column, height, width, and the width of the whole low plane. A part is drawn as often as it has
    places for a crop, times the square root of its detail: photographs are mostly blurred ground.
    """

    def __init__(
        self,
        photographs: Source,
        scale: int,
        siting: str,
        least: int,
        even: bool = False,
    ) -> None:
        """`least`: side of the largest crop. `even`: detail does not count."""
        self.scale, self.siting, self.device = scale, siting, photographs.device
        high: list[Tensor] = []
        low: list[Tensor] = []
        guide: list[Tensor] = []
        rows, weights = [], []
        at = [0, 0, 0]
        for big, small in photographs.pairs(scale):
            if siting:
                pairs = list(
                    zip(
                        subsample(chroma(big), siting),
                        subsample(chroma(small), siting),
                        strict=True,
                    )
                )
            else:
                pairs = [(luma(big), luma(small))]
            h, w = pairs[0][1].shape
            if min(h, w) < least:
                continue
            for a, b in pairs:
                detail = torch.zeros_like(b)
                detail[1:] += b.diff(dim=0).abs()
                detail[:, 1:] += b.diff(dim=1).abs()
                for y in range(0, h - least + 1, PART):
                    for x in range(0, w - least + 1, PART):
                        tall, wide = min(PART, h - least + 1 - y), min(PART, w - least + 1 - x)
                        size = (tall + least - 1, wide + least - 1)
                        rows.append((*at, y, x, *size, w))
                        mean = detail[y : y + size[0], x : x + size[1]].mean()
                        weights.append(tall * wide * (mean + 0.1) ** (0.0 if even else 0.5))
                high.append(a.to(torch.uint8).flatten())
                low.append(b.to(torch.uint8).flatten())
                at[0], at[1] = at[0] + a.numel(), at[1] + b.numel()
            if siting:
                guide.append(luma(small).to(torch.uint8).flatten())
                at[2] += guide[-1].numel()
        self.high, self.low = torch.cat(high), torch.cat(low)
        self.guide = torch.cat(guide) if guide else None
        self.table = torch.tensor(rows, device=self.device)
        weight = torch.stack(weights).double()
        self.share = (weight / weight.sum()).cumsum(0)
        self.pixels = at[0]


class Crops:
    """Random aligned crops of planes: luma in all 8 orientations, chroma in those that keep its
    siting. The numbers come from a generator of its own (a congruential one per draw), so that a
    captured step goes on with it and networks that train side by side do not disturb each other.
    """

    def __init__(
        self,
        planes: Planes,
        patch: int,
        radius: int,
        count: int,
        seed: int,
        degrade: Callable[[Tensor, Tensor], Tensor] | None = None,
    ) -> None:
        self.planes, self.patch, self.radius, self.degrade = planes, patch, radius, degrade
        source = torch.Generator().manual_seed(seed)
        lanes = torch.randint(-(2**62), 2**62, (12, count), generator=source)
        self.lanes = lanes.to(planes.device)

    def _draw(self) -> Tensor:
        """[12, count] integers of 30 random bits; changes the state in place."""
        self.lanes.mul_(6364136223846793005).add_(1442695040888963407)
        return (self.lanes >> 33) & (2**30 - 1)

    def batch(self) -> tuple[Tensor, Tensor]:
        """Inputs [n, 1 or 5, patch, patch] and targets [n, 1, s(patch-2r), s(patch-2r)], 0..1."""
        planes, p, r, s = self.planes, self.patch, self.radius, self.planes.scale
        d = planes.device
        bits = self._draw()
        pick = torch.searchsorted(planes.share, bits[0].double() / 2**30)
        pick = pick.clamp(max=len(planes.table) - 1)
        high0, low0, guide0, y0, x0, tall, wide, w = planes.table[pick].unbind(1)
        y = y0 + ((bits[1] * (tall - p + 1)) >> 30)
        x = x0 + ((bits[2] * (wide - p + 1)) >> 30)
        flip = bits[3:6] >= 2**29
        t, fy, fx = (f.view(-1, 1, 1) for f in flip)
        if planes.siting == "left":
            t, fx = t & False, fx & False

        def window(flat: Tensor, at: Tensor, wide: Tensor, factor: int, inset: int) -> Tensor:
            size = factor * (p - 2 * inset)
            k = torch.arange(size, device=d)
            i, j = k.view(1, -1, 1), k.view(1, 1, -1)
            a, b = torch.where(t, j, i), torch.where(t, i, j)
            a, b = torch.where(fy, size - 1 - a, a), torch.where(fx, size - 1 - b, b)
            begin = at + factor * ((y + inset) * wide + x + inset)
            index = begin.view(-1, 1, 1) + a * wide.view(-1, 1, 1) + b
            return flat[index].float().div_(255)[:, None]

        low = window(planes.low, low0, w, 1, 0)
        high = window(planes.high, high0, s * w, s, r)
        if planes.guide is not None:
            guide = window(planes.guide, guide0, 2 * w, 2, 0)
            # Other ranges and matrices: both contrasts vary.
            u = bits.double() / 2**30
            gain, light = (0.7 + 0.6 * u[k].float().view(-1, 1, 1, 1) for k in (6, 7))
            middle = 128 / 255
            low, high = (low - middle) * gain + middle, (high - middle) * gain + middle
            low = torch.cat([low, F.pixel_unshuffle(guide * light, 2)], 1)
        if self.degrade is not None:
            low = self.degrade(low, bits[6:].double() / 2**30)
        return low, high


class Benchmark:
    """Pairs NAME_HR.png, NAME_LR.png of SET/image_SRF_<scale>; PSNR-Y by the usual protocol (8-bit
    luma, border of `scale` left out).
    """

    def __init__(self, folder: Path, scale: int, device: torch.device) -> None:
        self.name, self.scale = folder.name, scale
        self.pairs = []
        for hr in sorted((folder / f"image_SRF_{scale}").glob("*_HR.png")):
            low = luma(read_rgb(hr.with_name(hr.name.replace("_HR", "_LR")))).to(device)
            high = luma(read_rgb(hr)).to(device)
            h, w = low.shape
            self.pairs.append((low, high[: scale * h, : scale * w]))

    @torch.no_grad()
    def psnr(self, net: torch.nn.Module, radius: int) -> float:
        total, s = 0.0, self.scale
        for low, high in self.pairs:
            x = F.pad(low[None, None] / 255, [radius] * 4, mode="replicate")
            y = (net(x)[0, 0] * 255).round().clamp(0, 255)
            e = (y - high)[s:-s, s:-s].double().square().mean()
            total += float(10 * torch.log10(255**2 / e))
        return total / len(self.pairs)
