# SPDX-License-Identifier: Apache-2.0
"""Milliseconds a frame of other people's networks against ncnn.

    python -m benchmarks.convnet_speed [--quick] [--json] [--threads N] [--device cpu|gpu]

Rows are named NETWORK SIZE PEER; the ratio says how many times faster ours is. Both run the same
weights. Ours takes 8-bit red, green and blue planes from host memory to host memory; ncnn floats,
without the way from and to bytes. On the CPU both compute in float32; with `--device gpu` by
Vulkan, ncnn in 16 bits, which is its faster way. Outputs are compared first, runs interleaved.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks import common, convnet_peers, peers
from engine.backends.base import Backend
from engine.importers import convnets
from engine.video import convnet, frames
from engine.video.convnet import ConvModel
from engine.video.convnet_run import ConvPipeline
from engine.video.frames import FrameFormat

Array = npt.NDArray[Any]
ROWS = {  # network: sizes
    "animevideov3-x2": [(480, 270), (960, 540)],
    "span-x2": [(480, 270)],
    "x4plus": [(160, 120)],
}
GPU_SIZES = [(960, 540), (1920, 1080)]


class Ours:
    """A network on frames of one size."""

    def __init__(self, backend: Backend, model: ConvModel, image: Array) -> None:
        fmt = FrameFormat(image.shape[2], image.shape[1], "i444", 8, "centre", True, "rgb")
        self.pipeline = ConvPipeline(backend, model, fmt)
        self._src, self._dst = frames.empty(fmt), frames.empty(self.pipeline.out_format)
        self._width = self.pipeline.out_format.width
        for plane, channel in zip(self._src, image, strict=True):
            frames.samples(plane, fmt.width, 8)[:] = channel

    def frame(self) -> Array:
        self.pipeline.begin(self._src, self._dst)
        while not self.pipeline.step():
            pass
        return np.stack([p[:, : self._width] for p in self._dst])


def milliseconds(run: Any, times: int) -> float:
    """Median of some frames in a row."""
    found = []
    for _ in range(times):
        begin = time.perf_counter()
        run()
        found.append(1e3 * (time.perf_counter() - begin))
    return statistics.median(found)


def measure(args: argparse.Namespace) -> list[common.Row]:
    peers.wheel("ncnn")
    gpu = args.device == "gpu"
    backend = common.backend(args)
    rows = []
    for name, sizes in list(ROWS.items())[: 1 if args.quick else None]:
        param = convnet_peers.network(name)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "model.pvrm")
            convnet.write(path, convnets.load(param), "f16", {"name": name})
            model = ConvModel.load(str(path), backend)
        run = convnet_peers.runner(param, args.threads, gpu, gpu)
        for width, height in (GPU_SIZES if gpu else sizes)[: 1 if args.quick else None]:
            image = np.random.default_rng(1).integers(0, 256, (3, height, width), np.uint8)
            ours, floats = Ours(backend, model, image), image.astype(np.float32) / 255
            wanted = np.clip(run(floats), 0, 1) * 255
            worst = float(np.abs(ours.frame() - wanted).mean())
            if worst > 1:
                raise SystemExit(f"ncnn differs from ours by {worst:.2f} steps in the mean")
            a, b = common.interleaved(
                lambda o=ours: milliseconds(o.frame, 1),  # type: ignore[misc]
                lambda r=run, f=floats: milliseconds(lambda: r(f), 1),  # type: ignore[misc]
                3 if args.quick else 9,
            )
            middle = statistics.median(a), statistics.median(b)
            title = f"{name} {width}x{height} ncnn"
            rows.append(common.row(title, "ms a frame", *middle, "ncnn"))
            ours.pipeline.close()
        model.close()
    backend.close()
    return rows


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", choices=("cpu", "gpu"), default="cpu")


def facts() -> dict[str, str]:
    """The peer's version and the networks' packages."""
    packages = ", ".join(f"{k} {v}" for k, v in convnet_peers.PACKAGES.items())
    return {"peers": f"ncnn {peers.wheel('ncnn')}", "networks": packages}


if __name__ == "__main__":
    sys.exit(common.main(__doc__.splitlines()[0], measure, options, facts))
