# SPDX-License-Identifier: Apache-2.0
"""`pvrctl export --mpv`: the user shader in libplacebo, as ffmpeg runs it, beside the engine."""

from __future__ import annotations

import json
import os
import re
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from engine.backends.base import Backend
from engine.backends.cpu import CpuBackend
from engine.video import plain
from engine.video.frames import FrameFormat
from engine.video.network import VideoModel
from tests.engine.video.conftest import enlarge, psnr, scene

ROOT = Path(__file__).resolve().parents[2]
MODELS = ROOT / "engine/video/models"
Luma = npt.NDArray[np.uint8]
X3 = pytest.param("nsr-fast-x3", marks=pytest.mark.long)
X4 = pytest.param("nsr-fast-x4", marks=pytest.mark.long)
BORDER = 8  # samples at the edge of the input, where players repeat another one


def pvrctl(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "pvrd.ctl.main", *map(str, arguments)],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip


@pytest.fixture(scope="module")
def backend() -> Iterator[Backend]:
    made = CpuBackend()
    yield made
    made.close()


def pictures(scale: int) -> tuple[Luma, Luma]:
    """A scene of 96 x 128, and the same as large as it is to become."""
    truth = scene(96 * scale, 128 * scale, seed=7)
    small = truth.reshape(96, scale, 128, scale).mean((1, 3))
    return np.rint(small).astype(np.uint8), np.rint(truth).astype(np.uint8)


def played(shader: Path, luma: Luma, scale: int) -> Luma:
    """The luma of a grey frame that libplacebo enlarged with the shader, on lavapipe."""
    rows, columns = luma.shape
    chroma = bytes([128]) * (rows * columns)
    chain = (
        "setparams=range=pc:colorspace=bt709:color_primaries=bt709:color_trc=bt709,hwupload,"
        f"libplacebo=w={scale * columns}:h={scale * rows}:custom_shader_path={shader.name}"
        ":dithering=none,hwdownload,format=yuv444p"
    )
    env = {k: v for k, v in os.environ.items() if not k.startswith(("VK_", "PVRD_"))}
    icds = sorted(Path("/usr/share/vulkan/icd.d").glob("lvp*.json"))
    env["VK_ICD_FILENAMES"] = env["VK_DRIVER_FILES"] = str(icds[0])
    done = subprocess.run(
        ["ffmpeg", "-hide_banner", "-loglevel", "error", "-init_hw_device", "vulkan=v",
         "-filter_hw_device", "v", "-f", "rawvideo", "-pix_fmt", "yuv444p",
         "-s", f"{columns}x{rows}", "-i", "-", "-vf", chain, "-frames:v", "1",
         "-f", "rawvideo", "-"],
        input=luma.tobytes() + 2 * chroma, capture_output=True, cwd=shader.parent, env=env,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr.decode()
    size = scale * rows * scale * columns
    assert len(done.stdout) == 3 * size
    return np.frombuffer(done.stdout, np.uint8, size).reshape(scale * rows, scale * columns)


def by_the_engine(backend: Backend, name: str, luma: Luma) -> Luma:
    model = VideoModel.load(str(MODELS / f"{name}.pvrm"), backend)
    try:
        rows, columns = luma.shape
        fmt = FrameFormat(columns, rows, "gray")
        stride = fmt.planes()[0].stride
        src = np.zeros((rows, stride), np.uint8)
        src[:, :columns] = luma
        return enlarge(backend, model, fmt, [src])[0].astype(np.uint8, copy=False)
    finally:
        model.close()


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["nsr-fast", "nsr-balanced", X3, X4])
def test_a_player_makes_of_it_what_the_engine_does(
    backend: Backend, tmp_path: Path, name: str
) -> None:
    scale = int(name[-1]) if name[-2:] in ("x3", "x4") else 2
    shader = tmp_path / "out.glsl"
    said = pvrctl("--json", "export", "--mpv", name.removeprefix("nsr-"), shader)
    assert said.returncode == 0, said.stderr
    assert json.loads(said.stdout)["scale"] == scale
    small, truth = pictures(scale)
    got, want = played(shader, small, scale), by_the_engine(backend, name, small)
    rows, columns = small.shape
    cubic = plain.enlarge(small, 0, 0, rows, columns, 8, scale)
    engine, player = psnr(want, truth), psnr(got, truth)
    assert player == pytest.approx(engine, abs=0.05)
    print(f"{name}: {player:.3f} dB in a player, {engine:.3f} dB by the engine")
    assert player > psnr(cubic, truth) + 1, "it is the network that runs"
    edge = scale * BORDER
    difference = np.abs(got.astype(int) - want)[edge:-edge, edge:-edge]
    assert difference.max() <= 1


def test_the_shader_is_one(tmp_path: Path) -> None:
    """Each texture is saved before it is bound; no more are bound than players take."""
    shader = tmp_path / "quality.glsl"
    done = pvrctl("export", "--mpv", "quality", shader)
    assert done.returncode == 0, done.stderr
    assert re.search(r"nsr-quality, x2 of luma in 98 passes", done.stdout)
    known = {"LUMA"}
    parts = shader.read_text().split("//!DESC ")[1:]
    assert len(parts) == 98
    for part in parts:
        binds = re.findall(r"^//!BIND (\S+)$", part, re.M)
        assert set(binds) <= known
        assert len(binds) == len(set(binds)) <= 16
        assert set(re.findall(r"(\w+)_tex(?:Off)?\(", part)) <= set(binds)
        known |= set(re.findall(r"^//!SAVE (\S+)$", part, re.M))


@pytest.mark.parametrize(
    ("model", "output", "code", "word"),
    [
        ("nothing", "out.glsl", 5, "pvrd comes with balanced"),
        ("README.md", "out.glsl", 5, ""),
        ("fast", "none/out.glsl", 1, "out.glsl cannot be written: No such file or directory."),
        (str(MODELS / "nsr-fast.pvrm"), str(MODELS / "nsr-fast.pvrm"), 5, "model's place"),
    ],
)
def test_what_cannot_be_exported(
    tmp_path: Path, model: str, output: str, code: int, word: str
) -> None:
    done = pvrctl("export", "--mpv", model, tmp_path / output)
    assert done.returncode == code, done.stderr
    assert word in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_pipe_stays_a_pipe(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    read: list[bytes] = []
    reader = threading.Thread(target=lambda: read.append(pipe.read_bytes()), daemon=True)
    reader.start()
    done = pvrctl("export", "--mpv", "fast", pipe)
    assert done.returncode == 0, done.stderr
    reader.join()
    assert stat.S_ISFIFO(pipe.stat().st_mode)
    assert read[0].startswith(b"// nsr-fast: x2")


def test_usage(tmp_path: Path) -> None:
    arguments: list[Any] = ["export", "fast", tmp_path / "out.glsl"]
    assert pvrctl(*arguments).returncode == 2, "the form is not named"
