# SPDX-License-Identifier: Apache-2.0
"""Learns the chroma filters: four 5x5 filters for each siting, by least squares on the chroma
planes of photographs.

    python chroma.py --data FOLDER --out chroma.npz

Forward model: an RGB picture is halved (MATLAB's bicubic); both are taken to BT.601 Cb and Cr and
subsampled to 4:2:0 with the siting in question (left: [1 2 1]/4 across at even columns; centre: the
mean of two; down: the mean of two). The filters take the small 4:2:0 plane to the large one, whose
grid keeps the siting: output pixel 2m + b of the left siting lies at m - 1/8 or m + 3/8 of the
input across, of the centre siting at m -+ 1/4; down always -+ 1/4. Each filter's sum is 1: it is
solved for differences to the middle sample, with a small ridge. Prints the PSNR of both planes
against plain bicubic at the same positions.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
from data import chroma, read_rgb, shrink, subsample
from net import bicubic_phases

SITINGS = ("left", "centre")


def rows_of(low: np.ndarray, high: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Differences to the middle: neighbours [n, 25] of a plane and targets [n, 4]."""
    h, w = low.shape[0] - 4, low.shape[1] - 4
    mid = low[2:-2, 2:-2].reshape(-1, 1)
    near = np.stack([low[i : i + h, j : j + w].ravel() for i in range(5) for j in range(5)], 1)
    out = np.stack(
        [high[4 + a : -4 : 2, 4 + b : -4 : 2][:h, :w].ravel() for a in (0, 1) for b in (0, 1)], 1
    )
    return near - mid, out - mid


def main() -> None:
    p = argparse.ArgumentParser()
    p.add_argument("--data", type=Path, required=True)
    p.add_argument("--out", type=Path, required=True)
    args = p.parse_args()
    paths = sorted(q for q in args.data.iterdir() if q.suffix in (".jpg", ".png"))
    result = {}
    for siting in SITINGS:
        ata, atb = np.zeros((25, 25)), np.zeros((25, 4))
        sums = np.zeros(3)
        count = 0
        planes = []
        for path in paths:
            rgb = read_rgb(path)
            rgb = rgb[:, : rgb.shape[1] // 4 * 4, : rgb.shape[2] // 4 * 4]
            high = subsample(chroma(rgb), siting).numpy().astype(np.float64)
            low = (
                subsample(chroma(shrink(rgb, 2).clamp(0, 255).round()), siting)
                .numpy()
                .astype(np.float64)
            )
            planes.append((low[:, ::1, :256], high[:, :, :512]))
            for a, b in zip(low, high, strict=True):
                x, y = rows_of(a, b)
                ata += x.T @ x
                atb += x.T @ y
        keep = [i for i in range(25) if i != 12]
        ridge = 1e-4 * np.trace(ata) / 25 * np.eye(24)
        solved = np.linalg.solve(ata[np.ix_(keep, keep)] + ridge, atb[keep])
        filters = np.zeros((4, 25))
        filters[:, keep] = solved.T
        filters[:, 12] = 1 - filters.sum(1)
        plain = bicubic_phases(2, siting).double().numpy().reshape(4, 25)
        for low, high in planes:
            for a, b in zip(low, high, strict=True):
                x, y = rows_of(a, b)
                sums += [
                    np.square(x @ f.T - y).sum() for f in (filters, plain, np.eye(25)[[12] * 4])
                ]
                count += y.size
        psnr = 10 * np.log10(255**2 * count / sums)
        print(f"{siting}: learned {psnr[0]:.2f} dB, bicubic {psnr[1]:.2f}, nearest {psnr[2]:.2f}")
        print(np.array2string(filters.sum(1), precision=6), np.abs(filters).sum(1))
        result[siting] = filters.reshape(4, 5, 5).astype(np.float32)
    np.savez(args.out, **result)


if __name__ == "__main__":
    main()
