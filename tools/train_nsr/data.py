# SPDX-License-Identifier: Apache-2.0
"""Pictures for training and for measuring: MATLAB's bicubic halving, BT.601 luma, random crops on
the device.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from net import cubic
from PIL import Image
from torch import Tensor
from torch.nn import functional as F


def luma(rgb: Tensor) -> Tensor:
    """BT.601 limited-range luma [.., H, W], rounded, of 8-bit RGB [.., 3, H, W]."""
    r, g, b = rgb.unbind(-3)
    return (16 + (65.481 * r + 128.553 * g + 24.966 * b) / 255).round()


def halve(x: Tensor) -> Tensor:
    """Half size by MATLAB's imresize (antialiased cubic, mirrored borders) of [C, H, W], H and W
    even; not rounded.
    """
    taps = torch.tensor([cubic((t - 3.5) / 2) for t in range(8)], device=x.device)
    taps = taps / taps.sum()
    c = x.shape[0]
    # F.pad's "reflect" leaves the border pixel out, MATLAB's mirror repeats it: take rows by hand.
    for dim in (1, 2):
        n = x.shape[dim]
        i = torch.arange(-3, n + 3, device=x.device)
        i = torch.where(i < 0, -1 - i, torch.where(i >= n, 2 * n - 1 - i, i))
        x = x.index_select(dim, i)
    x = F.conv2d(x[:, None], taps.view(1, 1, 8, 1), stride=(2, 1))
    x = F.conv2d(x, taps.view(1, 1, 1, 8), stride=(1, 2))
    return x.view(c, x.shape[2], x.shape[3])


def read_rgb(path: Path) -> Tensor:
    """[3, H, W] float 0..255, cut to even sizes."""
    a = np.asarray(Image.open(path).convert("RGB"), np.float32)
    a = a[: a.shape[0] // 2 * 2, : a.shape[1] // 2 * 2]
    return torch.from_numpy(a.copy()).permute(2, 0, 1)


class Crops:
    """All pictures in two flat uint8 tensors on the device, and random aligned crops of them in all
    8 orientations.
    """

    def __init__(self, paths: list[Path], device: torch.device, patch: int, radius: int) -> None:
        hr_all, lr_all, rows = [], [], []
        hr_at = lr_at = 0
        for p in paths:
            rgb = read_rgb(p).to(device)
            # The picture itself and two smaller ones: finer structure per pixel than a photograph
            # has.
            for scale in (1.0, 0.75, 0.55):
                x = rgb
                if scale != 1.0:
                    size = [int(s * scale) // 2 * 2 for s in rgb.shape[1:]]
                    x = F.interpolate(rgb[None], size, mode="bicubic", antialias=True)[0]
                    x = x.clamp(0, 255).round()
                hr, lr = luma(x), luma(halve(x).clamp(0, 255).round())
                h, w = lr.shape
                if min(h, w) <= patch:
                    continue
                rows.append((hr_at, lr_at, h, w))
                hr_all.append(hr.to(torch.uint8).flatten())
                lr_all.append(lr.to(torch.uint8).flatten())
                hr_at, lr_at = hr_at + hr.numel(), lr_at + lr.numel()
        self.hr, self.lr = torch.cat(hr_all), torch.cat(lr_all)
        self.table = torch.tensor(rows, device=device)
        area = (self.table[:, 2] * self.table[:, 3]).double()
        self.share = (area / area.sum()).cumsum(0).float()
        self.patch, self.radius, self.device = patch, radius, device
        self.pixels = int(hr_at)

    def batch(self, n: int) -> tuple[Tensor, Tensor]:
        """LR [n, 1, patch, patch] and HR [n, 1, 2(patch-2r), 2(patch-2r)], both 0..1."""
        d, p, r = self.device, self.patch, self.radius
        pick = torch.searchsorted(self.share, torch.rand(n, device=d)).clamp(
            max=len(self.table) - 1
        )
        hr0, lr0, h, w = self.table[pick].unbind(1)
        y = (torch.rand(n, device=d) * (h - p + 1)).long()
        x = (torch.rand(n, device=d) * (w - p + 1)).long()
        flip = torch.rand(3, n, device=d) < 0.5

        def window(
            flat: Tensor, at: Tensor, stride: Tensor, y0: Tensor, x0: Tensor, size: int
        ) -> Tensor:
            k = torch.arange(size, device=d)
            i, j = k.view(1, -1, 1), k.view(1, 1, -1)
            t, fy, fx = (f.view(-1, 1, 1) for f in flip)
            a, b = torch.where(t, j, i), torch.where(t, i, j)
            a, b = torch.where(fy, size - 1 - a, a), torch.where(fx, size - 1 - b, b)
            index = (at + y0 * stride + x0).view(-1, 1, 1) + a * stride.view(-1, 1, 1) + b
            return flat[index].float().div_(255)[:, None]

        lr = window(self.lr, lr0, w, y, x, p)
        hr = window(self.hr, hr0, 2 * w, 2 * (y + r), 2 * (x + r), 2 * (p - 2 * r))
        return lr, hr


class Benchmark:
    """Pairs NAME_HR.png, NAME_LR.png of a folder; PSNR-Y by the usual protocol (8-bit luma, border
    of 2 left out).
    """

    def __init__(self, folder: Path, device: torch.device) -> None:
        self.name = folder.name
        self.pairs = []
        for hr in sorted(folder.glob("*_HR.png")):
            lr = hr.with_name(hr.name.replace("_HR", "_LR"))
            low = luma(read_rgb_all(lr)).to(device)
            high = luma(read_rgb_all(hr)).to(device)
            h, w = low.shape
            self.pairs.append((low, high[: 2 * h, : 2 * w]))

    @torch.no_grad()
    def psnr(self, net: torch.nn.Module, radius: int) -> float:
        total = 0.0
        for low, high in self.pairs:
            x = F.pad(low[None, None] / 255, [radius] * 4, mode="replicate")
            with torch.backends.cudnn.flags(enabled=True, benchmark=False, allow_tf32=False):
                y = (net(x)[0, 0] * 255).round().clamp(0, 255)
            e = (y - high)[2:-2, 2:-2].double().square().mean()
            total += float(10 * torch.log10(255**2 / e))
        return total / len(self.pairs)


def read_rgb_all(path: Path) -> Tensor:
    """[3, H, W] float 0..255."""
    return torch.from_numpy(np.array(Image.open(path).convert("RGB"), np.float32)).permute(2, 0, 1)
