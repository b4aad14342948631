# SPDX-License-Identifier: Apache-2.0
"""What follows training: the mean of two runs, and a last layer by least squares.

    python finish.py mean A.npz B.npz OUT.npz [--share OF_B]
    python finish.py solve NAME IN.npz OUT.npz --data FOLDER
    python finish.py chroma LEFT.npz CENTRE.npz OUT.npz

`mean` takes the middle (or the point at `share` of the way) of two runs of a network of which the
second went on from the first (so that both lie in one valley). `solve` leaves the layers of network
NAME (family.py) as they are but for the last and the linear filter: the output is linear in these,
and they get their best values for the pictures of FOLDER, each place as likely as any other.
`chroma` joins both sitings in the file that export.py reads.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from data import Crops, Photographs, Planes
from family import NETWORKS
from net import BASE_TAPS, Arrays, Shape, trunk
from torch import Tensor
from torch.nn import functional as F

BATCHES, COUNT, PATCH = 16, 64, 40
RIDGE = 3e-6  # of the mean square of a feature


def mean(a: Arrays, b: Arrays, share: float = 0.5) -> dict[str, Any]:
    """Weights between a and b, `share` of the way to b; minutes and steps add up."""
    out: dict[str, Any] = {}
    for key, value in b.items():
        weights = key.startswith("conv") or key == "base"
        out[key] = a[key] + np.float32(share) * (value - a[key]) if weights else value
    first, second = json.loads(str(a["meta"])), json.loads(str(b["meta"]))
    for key in ("minutes", "steps"):
        second[key] = round(first[key] + second[key], 2)
    return out | {"meta": json.dumps(second)}


def features(saved: Arrays, shape: Shape, x: Tensor) -> Tensor:
    """What the output is linear in, a row for each input sample: [n, 9 channels + 25 + 1]."""
    m = shape.convs - BASE_TAPS // 2
    near = x[:, :1, m : x.shape[2] - m, m : x.shape[3] - m]
    known = torch.cat([F.unfold(trunk(saved, shape, x), 3), F.unfold(near, BASE_TAPS)], 1)
    known = torch.cat([known, torch.ones_like(known[:, :1])], 1)
    return known.transpose(1, 2).flatten(0, 1)


def solve(name: str, saved: Arrays, photographs: Photographs) -> dict[str, Any]:
    """The network with the last layer that the photographs want; prints what it gained."""
    shape = NETWORKS[name].shape
    planes = Planes(photographs, shape.scale, shape.siting, PATCH, even=True)
    crops = Crops(planes, PATCH, shape.convs, COUNT, seed=9)
    last, phases = f"conv{shape.convs - 1}", shape.scale**2
    start = np.concatenate(
        [
            saved[f"{last}.weight"].reshape(phases, -1),
            saved["base"].reshape(phases, -1),
            saved[f"{last}.bias"][:, None],
        ],
        1,
    )
    before = torch.from_numpy(start.T).double()
    size = len(before)
    gram, target = torch.zeros(size, size).double(), torch.zeros(size, phases).double()
    power, count = 0.0, 0
    for _ in range(BATCHES):
        low, high = crops.batch()
        x = features(saved, shape, low)
        y = F.pixel_unshuffle(high, shape.scale).flatten(2).transpose(1, 2).flatten(0, 1)
        gram += (x.T @ x).double()
        target += (x.T @ y).double()
        power, count = power + float(y.double().square().sum()), count + y.numel()
    ridge = RIDGE * gram.diagonal().mean() * torch.eye(size).double()
    after = before + torch.linalg.solve(gram + ridge, target - gram @ before)

    def decibels(w: Tensor) -> float:
        error = power - 2 * (w * target).sum() + (w * (gram @ w)).sum()
        return float(-10 * torch.log10(error / count))

    print(f"{name}: {decibels(before):.3f} dB before, {decibels(after):.3f} after")
    w = after.T.float().numpy()
    taps = BASE_TAPS**2
    out = dict(saved)
    out[f"{last}.weight"] = w[:, : -taps - 1].reshape(saved[f"{last}.weight"].shape).copy()
    out["base"] = w[:, -taps - 1 : -1].reshape(saved["base"].shape).copy()
    out[f"{last}.bias"] = w[:, -1].copy()
    return out


def joined(left: Arrays, centre: Arrays) -> dict[str, Any]:
    """Both sitings of a chroma network in one file."""
    out: dict[str, Any] = {"scale": left["scale"]}
    for siting, saved in (("left", left), ("centre", centre)):
        out |= {f"{siting}.{k}": v for k, v in saved.items() if k.startswith("conv") or k == "base"}
    return out


def main() -> None:
    p = argparse.ArgumentParser()
    p.add_argument("what", choices=("mean", "solve", "chroma"))
    p.add_argument("first", help="a file, or for solve a name of family.py")
    p.add_argument("second", type=Path)
    p.add_argument("out", type=Path)
    p.add_argument("--data", type=Path)
    p.add_argument("--share", type=float, default=0.5)
    args = p.parse_args()
    second = dict(np.load(args.second))
    if args.what == "solve":
        paths = sorted(q for q in args.data.iterdir() if q.suffix in (".jpg", ".png"))
        photographs = Photographs(paths, torch.device("cpu"))
        result = solve(args.first, second, photographs)
    else:
        first = dict(np.load(args.first))
        many = args.what == "mean"
        result = mean(first, second, args.share) if many else joined(first, second)
    np.savez(args.out, **result)


if __name__ == "__main__":
    main()
