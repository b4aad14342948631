# SPDX-License-Identifier: Apache-2.0
"""Milliseconds a frame of the luma networks against ncnn and onnxruntime.

    python -m benchmarks.nsr_speed [--quick] [--json] [--threads N] [--device cpu|gpu]

Rows are named TIER SIZE PEER; the ratio says how many times faster ours is. All run the same
network. A frame goes from 8-bit memory to 8-bit memory, luma alone, float32 on all sides, runs
interleaved. The peers' outputs are compared with ours first (one step of 255 at most). Rows
`... i420` are the whole frame with chroma. With `--device gpu` ours and ncnn run by Vulkan, upload
and download included.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks import common, nsr_export, peers
from engine.backends.base import Backend
from engine.video.frames import FrameFormat
from engine.video.network import VideoModel
from engine.video.upscale import VideoPipeline

Bytes = npt.NDArray[np.uint8]
SIZES = [(480, 270), (960, 540)]


def picture(width: int, height: int) -> Bytes:
    """Luma with edges, ramps and noise, the same each time: u8 [height, width]."""
    y, x = np.mgrid[0:height, 0:width]
    rings = 60 * np.sin((x - width / 2) ** 2 / 900 + (y - height / 3) ** 2 / 700)
    noise = np.random.default_rng(1).normal(0, 3, (height, width))
    return np.clip(128 + rings + 40 * (x > y) + noise, 16, 235).astype(np.uint8)


class Ours:
    """A pipeline with its planes."""

    def __init__(self, backend: Backend, model: VideoModel, luma: Bytes, pixel: str) -> None:
        height, width = luma.shape
        fmt = FrameFormat(width, height, pixel)
        self.pipeline = VideoPipeline(backend, model, fmt)
        self.source = [np.full((p.height, p.stride), 128, np.uint8) for p in fmt.planes()]
        self.source[0][:, :width] = luma
        wide = fmt.scaled(2).planes()
        self.target = [np.zeros((p.height, p.stride), np.uint8) for p in wide]
        self.width = 2 * width

    def frame(self) -> Bytes:
        self.pipeline.begin(self.source, self.target)
        while not self.pipeline.step():
            pass
        return self.target[0][:, : self.width]


def onnxruntime_runner(file: Path, luma: Bytes, threads: int) -> Callable[[], Bytes]:
    """A frame by onnxruntime with all of its graph optimisations."""
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_ALL
    providers = ["CPUExecutionProvider"]
    session = ort.InferenceSession(nsr_export.to_onnx(file), options, providers=providers)
    feed = {"input": luma[None, None]}
    return lambda: np.asarray(session.run(None, feed)[0])[0, 0]


def ncnn_runner(
    file: Path, luma: Bytes, threads: int, folder: Path, vulkan: bool
) -> Callable[[], Bytes]:
    """A frame by ncnn: its own conversions from and to 8 bits, float32, packed layouts."""
    import ncnn

    param, binary = nsr_export.to_ncnn(file, folder)
    net = ncnn.Net()
    net.opt.num_threads = threads
    net.opt.use_vulkan_compute = vulkan
    net.opt.use_fp16_storage = net.opt.use_fp16_arithmetic = net.opt.use_bf16_storage = False
    net.load_param(str(param))
    net.load_model(str(binary))
    height, width = luma.shape
    gray = ncnn.Mat.PixelType.PIXEL_GRAY

    def frame() -> Bytes:
        mat = ncnn.Mat.from_pixels(luma, gray, width, height)
        mat.substract_mean_normalize([], [1 / 255.0])
        with net.create_extractor() as run:
            run.input("in", mat)
            _, out = run.extract("out")
        # The wheel has no way back to pixels; numpy's costs well under a millisecond.
        out.substract_mean_normalize([-0.5 / 255.0], [255.0])
        values = np.array(out)[0]
        return np.asarray(np.clip(values, 0, 255, out=values).astype(np.uint8))

    return frame


def milliseconds(run: Callable[[], Any], times: int) -> float:
    """Median of some frames in a row."""
    found = []
    for _ in range(times):
        begin = time.perf_counter()
        run()
        found.append(1e3 * (time.perf_counter() - begin))
    return statistics.median(found)


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", choices=("cpu", "gpu"), default="cpu")


def measure(args: argparse.Namespace) -> list[common.Row]:
    for package in ("onnx", "onnxruntime", "ncnn"):
        peers.wheel(package)
    gpu = args.device == "gpu"
    backend = common.backend(args)
    rows: list[common.Row] = []
    repeats, times = (3, 3) if args.quick else (7, 5)
    for tier in ("fast", "balanced"):
        file = nsr_export.shipped(tier)
        model = VideoModel.load(str(file), backend)
        sizes = [*SIZES, (1920, 1080)] if gpu else SIZES
        for width, height in sizes[: 1 if args.quick else None]:
            luma = picture(width, height)
            gray = Ours(backend, model, luma, "gray")
            with tempfile.TemporaryDirectory() as folder:
                runners = {"ncnn": ncnn_runner(file, luma, args.threads, Path(folder), gpu)}
                if not gpu:
                    runners["onnxruntime"] = onnxruntime_runner(file, luma, args.threads)
                wanted = gray.frame().astype(int)
                for peer, run in runners.items():
                    worst = int(np.abs(run().astype(int) - wanted).max())
                    if worst > 1:
                        raise SystemExit(f"{peer} differs from ours by {worst} steps")
                    a, b = common.interleaved(
                        lambda g=gray: milliseconds(g.frame, times),  # type: ignore[misc]
                        lambda r=run: milliseconds(r, times),  # type: ignore[misc]
                        repeats,
                    )
                    middle = statistics.median(a), statistics.median(b)
                    title = f"{tier} {width}x{height} {peer}"
                    rows.append(common.row(title, "ms a frame", *middle, peer))
            whole = Ours(backend, model, luma, "i420")
            whole.frame()
            ms = milliseconds(whole.frame, 3 * times)
            rows.append(common.row(f"{tier} {width}x{height} i420", "ms a frame", ms, None, "none"))
        model.close()
    backend.close()
    return rows


def facts() -> dict[str, str]:
    """The peers' versions, and what a pixel costs."""
    cost = {t: round(nsr_export.macs(nsr_export.shipped(t))) for t in ("fast", "balanced")}
    return {
        "peers": ", ".join(f"{p} {peers.wheel(p)}" for p in ("onnxruntime", "ncnn")),
        "MAC an output pixel": ", ".join(f"{t} {c}" for t, c in cost.items()),
    }


if __name__ == "__main__":
    sys.exit(common.main(__doc__.splitlines()[0], measure, options, facts))
