# SPDX-License-Identifier: Apache-2.0
"""Real-ESRGAN and SPAN with their published weights, against ncnn on the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from benchmarks import convnet_peers
from engine.backends.base import Backend
from engine.importers import convnets
from engine.video import convnet, frames
from engine.video.convnet import ConvModel
from engine.video.convnet_run import ConvPipeline
from engine.video.frames import FrameFormat, samples
from tests.engine.video.conftest import scene

pytestmark = pytest.mark.long

Array = npt.NDArray[Any]
SMALL, LARGE = (24, 32), (72, 96)
SIZES = {name: SMALL if "x4plus" in name else LARGE for name in convnet_peers.NETWORKS}


def picture(rows: int, columns: int) -> Array:
    """Three channels of a scene, each another one, in 0..1."""
    return np.stack([scene(rows, columns, seed) for seed in range(3)]) / 255


def enlarge(
    backend: Backend, model: ConvModel, image: Array, tile: int = 0, overlap: int = 0
) -> Array:
    fmt = FrameFormat(image.shape[2], image.shape[1], "i444", 16, "centre", True, "rgb")
    src, dst = frames.empty(fmt), frames.empty(fmt.scaled(model.scale))
    for plane, channel in zip(src, image, strict=True):
        samples(plane, fmt.width, 16)[:] = np.round(channel * 65535)
    pipeline = ConvPipeline(backend, model, fmt, tile, overlap)
    pipeline.begin(src, dst)
    while not pipeline.step():
        pass
    pipeline.close()
    width = fmt.width * model.scale
    return np.stack([samples(p, width, 16).astype(np.float64) / 65535 for p in dst])


def psnr(a: Array, b: Array) -> float:
    return float(-10 * np.log10(max(np.square(a - b).mean(), 1e-12)))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("convnets")


def compiled(folder: Path, backend: Backend, name: str, fmt: str) -> ConvModel:
    path = folder / f"{name}-{fmt}.pvrm"
    if not path.exists():
        convnet.write(path, convnets.load(convnet_peers.network(name)), fmt, {"name": name})
    return ConvModel.load(str(path), backend)


@pytest.fixture(scope="module")
def wanted() -> dict[str, Array]:
    """What ncnn makes of each picture."""
    found = {}
    for name, size in SIZES.items():
        run = convnet_peers.runner(convnet_peers.network(name), 2)
        image = np.round(picture(*size) * 65535) / 65535
        found[name] = np.clip(run(image), 0, 1)
    return found


@pytest.mark.parametrize("place", ["cpu", pytest.param("gpu", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("name", SIZES)
def test_ncnn_gives_the_same(
    request: pytest.FixtureRequest, folder: Path, wanted: dict[str, Array], place: str, name: str
) -> None:
    backend = request.getfixturevalue(f"{place}_backend")
    model = compiled(folder, backend, name, "f16")
    assert psnr(enlarge(backend, model, picture(*SIZES[name])), wanted[name]) > 60
    model.close()


@pytest.mark.parametrize(
    ("name", "least"), [("animevideov3-x2", 40), ("span-x4", 35), ("x4plus", 35)]
)
def test_int8_is_small_and_near(
    cpu_backend: Backend, folder: Path, wanted: dict[str, Array], name: str, least: float
) -> None:
    model = compiled(folder, cpu_backend, name, "q8")
    got = enlarge(cpu_backend, model, picture(*SIZES[name]))
    assert psnr(got, wanted[name]) > least
    net = convnets.load(convnet_peers.network(name))
    weights = sum(a.size for k, a in net.arrays.items() if not k.endswith("slope"))
    assert (folder / f"{name}-q8.pvrm").stat().st_size < 0.28 * 4 * weights
    model.close()


@pytest.mark.parametrize("name", ["animevideov3-x2", "span-x4"])
def test_tiles_with_the_radius_around_them(cpu_backend: Backend, folder: Path, name: str) -> None:
    model = compiled(folder, cpu_backend, name, "f16")
    image = picture(*LARGE)
    whole = enlarge(cpu_backend, model, image)
    cut = enlarge(cpu_backend, model, image, tile=32)
    assert np.abs(cut - whole).max() * 255 < 0.01
    model.close()


def test_tiles_of_a_deep_network(cpu_backend: Backend, folder: Path) -> None:
    model = compiled(folder, cpu_backend, "x4plus-anime", "f16")
    image = picture(48, 120)
    whole = enlarge(cpu_backend, model, image)
    near, far = (enlarge(cpu_backend, model, image, 48, overlap) for overlap in (16, 32))
    assert psnr(near, whole) < psnr(far, whole)
    assert psnr(far, whole) > 40
    model.close()
