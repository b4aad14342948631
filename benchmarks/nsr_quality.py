# SPDX-License-Identifier: Apache-2.0
"""PSNR-Y of the shipped networks on standard pictures, through the 8-bit path that frames take.

    python -m benchmarks.nsr_quality [--quick] [--json] [--data FOLDER] [--device cpu|gpu]

FOLDER holds SET/image_SRF_2/*_LR.png and *_HR.png (Set5, Set14: not shipped). Protocol: luma of
BT.601 in limited range, borders of `scale` pixels left out, mean over a set. The peer is bicubic
interpolation. Rows are named SET SCALE TIER; unit dB, so the ratio is no measure: subtract.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import numpy as np
import numpy.typing as npt
from PIL import Image

from benchmarks import common, nsr_export
from engine.backends.base import Backend
from engine.video.frames import FrameFormat
from engine.video.network import VideoModel
from engine.video.upscale import VideoPipeline

Floats = npt.NDArray[np.float64]
SCALE = 2


def luma(picture: Path) -> Floats:
    """BT.601 luma, 16..235, not rounded: [height, width]."""
    rgb = np.asarray(Image.open(picture).convert("RGB"), np.float64)
    return np.asarray(16 + rgb @ np.array([65.481, 128.553, 24.966]) / 255)


def psnr(a: Floats, b: Floats) -> float:
    """dB of 8-bit samples, `SCALE` pixels left out at each border."""
    inner = (slice(SCALE, -SCALE),) * 2
    error = float(np.mean((a[inner] - b[inner]) ** 2))
    return 10 * float(np.log10(255**2 / error))


def enlarge(backend: Backend, model: VideoModel, low: npt.NDArray[np.uint8]) -> Floats:
    """One luma plane through the pipeline of frames."""
    height, width = low.shape
    fmt = FrameFormat(width, height, "gray")
    (plane,), (wide,) = fmt.planes(), fmt.scaled(SCALE).planes()
    source = np.zeros((plane.height, plane.stride), np.uint8)
    source[:, :width] = low
    target = np.zeros((wide.height, wide.stride), np.uint8)
    pipeline = VideoPipeline(backend, model, fmt)
    pipeline.begin([source], [target])
    while not pipeline.step():
        pass
    pipeline.close()
    return target[:, : wide.width].astype(np.float64)


def bicubic(low: npt.NDArray[np.uint8]) -> Floats:
    """The usual cubic (a = -0.5), rounded to 8 bits."""
    height, width = low.shape
    size = (SCALE * width, SCALE * height)
    return np.asarray(Image.fromarray(low).resize(size, Image.Resampling.BICUBIC), np.float64)


def measure(args: argparse.Namespace) -> list[common.Row]:
    backend = common.backend(args)
    rows = []
    for tier in ("fast", "balanced"):
        model = VideoModel.load(str(nsr_export.shipped(tier)), backend)
        for name in ("Set5",) if args.quick else ("Set5", "Set14"):
            folder = args.data / name / f"image_SRF_{SCALE}"
            pictures = sorted(folder.glob("*_HR.png"))
            if not pictures:
                raise SystemExit(f"There are no pictures *_HR.png in {folder}.")
            ours, plain = [], []
            for high in pictures:
                low = luma(high.with_name(high.name.replace("_HR", "_LR")))
                eight = np.clip(np.rint(low), 0, 255).astype(np.uint8)
                truth = luma(high)[: SCALE * eight.shape[0], : SCALE * eight.shape[1]]
                ours.append(psnr(enlarge(backend, model, eight), truth))
                plain.append(psnr(bicubic(eight), truth))
            title = f"{name} x{SCALE} {tier}"
            middle = float(np.mean(ours)), float(np.mean(plain))
            rows.append(common.row(title, "dB", *middle, "bicubic"))
        model.close()
    backend.close()
    return rows


def options(parser: argparse.ArgumentParser) -> None:
    default = os.environ.get("PVRD_TEST_DATA", str(common.ROOT.parent / "shared/data/test"))
    parser.add_argument("--data", type=Path, default=Path(default))
    parser.add_argument("--device", choices=("cpu", "gpu"), default="cpu")


if __name__ == "__main__":
    sys.exit(common.main(__doc__.splitlines()[0], measure, options))
