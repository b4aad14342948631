# SPDX-License-Identifier: Apache-2.0
"""What a lossy codec does to small pictures: noise, then 8x8 transform coding at a random quality.

The tables lie between JPEG's luminance table and the flat one that video codecs use, the rounding
between the nearest level and a dead zone. No picture is sharpened in the target: the network learns
to undo, not to exaggerate.
"""

from __future__ import annotations

import math
from functools import cache

import torch
from torch import Tensor

BLOCK = 8
# ITU-T T.81, table K.1.
JPEG = (
    (16, 11, 10, 16, 24, 40, 51, 61),
    (12, 12, 14, 19, 26, 58, 60, 55),
    (14, 13, 16, 24, 40, 57, 69, 56),
    (14, 17, 22, 29, 51, 87, 80, 62),
    (18, 22, 37, 56, 68, 109, 103, 77),
    (24, 35, 55, 64, 81, 104, 113, 92),
    (49, 64, 78, 87, 103, 121, 120, 101),
    (72, 92, 95, 98, 112, 100, 103, 99),
)
FLAT = 20  # the flat table's step in levels of 8 bits
CLEAN = 0.15  # this share of the crops stays as it is
STRENGTH = (0.12, 1.6)  # factors of the table, spread evenly in the logarithm
NOISE = 3.0  # at most, standard deviation in levels of 8 bits; half of the crops have none


@cache
def _jpeg(device: torch.device) -> Tensor:
    return torch.tensor(JPEG, device=device, dtype=torch.float32)


def noise(seed: Tensor, height: int, width: int) -> Tensor:
    """[n, 1, height, width] of about normal numbers, from a hash of seed [n] and the position."""
    at = torch.arange(height * width, device=seed.device).view(1, 1, height, width)
    h = seed.view(-1, 1, 1, 1) * 1099087573 + at * 2654435761
    for shift, factor in ((15, 739982445), (12, 695872825), (15, 668265263)):
        h = (h ^ (h >> shift)) * factor & (2**48 - 1)
    parts = sum(((h >> k) & 0xFFFF).float() for k in (0, 16, 32))
    return (parts / 65535 - 1.5) * 2.0


def codec(low: Tensor, draw: Tensor) -> Tensor:
    """[n, 1, H, W] in 0..1, H and W multiples of 8, with draw [6, n] uniform in 0..1."""
    n, _, height, width = low.shape
    d = low.device
    k = torch.arange(BLOCK, device=d, dtype=torch.float32)
    dct = torch.cos((2 * k[None] + 1) * k[:, None] * math.pi / (2 * BLOCK)) * 0.5
    dct = torch.where(k[:, None] == 0, math.sqrt(1 / BLOCK), dct)
    dirty, _, mix, strength, rounding, clean = draw.float()

    seed = (draw[1] * 2**30).long()
    sigma = (dirty * 2 - 1).clamp(min=0).view(n, 1, 1, 1) * NOISE / 255
    x = low + sigma * noise(seed, height, width)

    blocks = x.view(n, height // BLOCK, BLOCK, width // BLOCK, BLOCK).transpose(2, 3)
    coefficients = dct @ blocks @ dct.T
    least, most = (math.log(s) for s in STRENGTH)
    jpeg = _jpeg(d)
    table = torch.lerp(jpeg.new_full(jpeg.shape, FLAT), jpeg, mix.view(n, 1, 1, 1, 1))
    step = table * torch.exp(least + (most - least) * strength.view(n, 1, 1, 1, 1)) / 255
    levels = torch.floor(coefficients.abs() / step + 1 / 3 + rounding.view(n, 1, 1, 1, 1) / 6)
    blocks = dct.T @ (levels * step * coefficients.sign()) @ dct
    coded = blocks.transpose(2, 3).reshape(n, 1, height, width)
    out = torch.where(clean.view(n, 1, 1, 1) < CLEAN, low, coded)
    return (out.clamp(0, 1) * 255).round() / 255
