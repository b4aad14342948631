# SPDX-License-Identifier: Apache-2.0
"""Milliseconds until a network can be run: our compiled file against its source in ncnn.

    python -m benchmarks.model_load [--quick] [--json]

Rows are named NETWORK WEIGHTS; the ratio says how many times faster ours loads. Ours: open, check
every byte's checksum and lay the network out; ncnn: load_param and load_model. Files are in the
page cache on both sides, runs interleaved. Rows `... size` are bytes a weight of the FP32
checkpoint: our file against 4 bytes each, so 0.28 is a ratio of 3.57.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path

from benchmarks import common, convnet_peers, peers
from engine.backends.base import Backend
from engine.importers import convnets
from engine.video import convnet
from engine.video.convnet import ConvModel

NETWORKS = ("animevideov3-x2", "span-x4", "x4plus")


def _ours(path: Path, backend: Backend) -> float:
    begin = time.perf_counter()
    ConvModel.load(str(path), backend).close()
    return 1e3 * (time.perf_counter() - begin)


def _ncnn(param: Path, threads: int) -> float:
    begin = time.perf_counter()
    convnet_peers.runner(param, threads)
    return 1e3 * (time.perf_counter() - begin)


def measure(args: argparse.Namespace) -> list[common.Row]:
    peers.wheel("ncnn")
    backend = common.backend(args)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for name in NETWORKS[:2] if args.quick else NETWORKS:
            param = convnet_peers.network(name)
            net = convnets.load(param)
            # ncnn has no slopes where there is no PReLU; ours are made up there.
            weights = sum(a.size for k, a in net.arrays.items() if not k.endswith("slope"))
            for fmt in ("f16", "q8"):
                path = Path(folder, f"{name}-{fmt}.pvrm")
                convnet.write(path, net, fmt, {"name": name})
                a, b = common.interleaved(
                    lambda p=path: _ours(p, backend),  # type: ignore[misc]
                    lambda p=param: _ncnn(p, args.threads),  # type: ignore[misc]
                    3 if args.quick else 9,
                )
                middle = statistics.median(a), statistics.median(b)
                rows.append(common.row(f"{name} {fmt}", "ms to load", *middle, "ncnn"))
                each = path.stat().st_size / weights
                title = f"{name} {fmt} size"
                rows.append(common.Row(title, "bytes a weight", each, 4.0, "FP32", 4 / each))
    backend.close()
    return rows


def _options(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(device="cpu")


def facts() -> dict[str, str]:
    """The peer's version and the networks' packages."""
    packages = ", ".join(f"{k} {v}" for k, v in convnet_peers.PACKAGES.items())
    return {"peers": f"ncnn {peers.wheel('ncnn')}", "networks": packages}


if __name__ == "__main__":
    sys.exit(common.main(__doc__.splitlines()[0], measure, _options, facts))
