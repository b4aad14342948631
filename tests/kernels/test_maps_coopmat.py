# SPDX-License-Identifier: Apache-2.0
"""conv2d by cooperative matrices, emulated as in test_text_coopmat.py."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import kernels
from engine.backends.vulkan import VulkanBackend
from kernels import build_spirv, maps
from kernels.contract import FORMATS
from kernels.conv2d import op as conv2d
from kernels.maps import THIN, WIDE, Geometry
from kernels.maps_samples import random_maps
from kernels.samples import samples
from tests.kernels.harness import Runner
from tests.kernels.test_text_coopmat import EMULATED, ROOT


@pytest.fixture
def emulated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Runner]:
    """The GPU with kernels whose matrices are emulated."""
    for folder in ("include", "conv2d"):
        shutil.copytree(ROOT / "kernels" / folder, tmp_path / "kernels" / folder)
    (tmp_path / "kernels" / "include" / "coopmat.glsl").write_text(EMULATED)
    contract = replace(conv2d.OP, variants=(conv2d.coopmat("f16"), conv2d.coopmat("q8")))
    entries = build_spirv.build_op(tmp_path, tmp_path, contract)
    samples()  # kept from now on: of the kernels as they are
    monkeypatch.setattr(kernels, "artifacts", lambda: tmp_path)
    monkeypatch.setattr(kernels, "manifest", lambda: {"conv2d": entries})
    monkeypatch.setattr(kernels, "op", lambda name: contract)
    backend = VulkanBackend(allow_software=True)
    backend.info = replace(backend.info, features=backend.info.features | {"coopmat"})
    yield Runner(backend)
    backend.close()


@pytest.mark.gpu
@pytest.mark.long
@pytest.mark.parametrize(
    ("cin", "cout", "k", "w", "h", "residual"),
    [(16, 64, 3, 17, 9, 0), (20, 72, 3, 33, 7, 1), (4, 3, 5, 8, 12, 0), (48, 40, 1, 5, 3, 1)],
)
def test_windows(
    emulated: Runner, cin: int, cout: int, k: int, w: int, h: int, residual: int
) -> None:
    g, rng = Geometry(w, h, max(1, k // 2)), np.random.default_rng(cin)
    xl, yl = (THIN if n <= THIN else WIDE for n in (cin, cout))
    x = random_maps(rng, g, -(-cin // xl), xl)
    r = random_maps(rng, g, -(-cout // yl), yl)
    weights = rng.standard_normal((cout, cin, k, k)) / (k * cin**0.5)
    front = rng.standard_normal((2, cout)).astype(np.float32)
    for fmt in ("f16", "q8"):
        push = {"fmt": FORMATS[fmt], "cin": cin, "cout": cout, "k": k, "act": maps.SLOPE}
        push |= {"residual": residual, "xl": xl, "yl": yl, **g.push()}
        packed = conv2d.pack(fmt, weights, *front)
        arrays = {"x": x, "w": packed, "r": r, "y": np.zeros_like(r)}
        emulated.check_op("conv2d", f"{fmt}_coopmat", push, arrays, (), 1, (5e-3, 5e-3))


def test_what_they_ask_for() -> None:
    wanted = {"Shader", "Float16", "GroupNonUniform", "VulkanMemoryModel", "CooperativeMatrixKHR"}
    for fmt in ("f16", "q8"):
        entry = kernels.manifest()["conv2d"][f"{fmt}_coopmat"]
        assert set(entry["capabilities"]) == wanted
        assert entry["shared_bytes"] <= 32 << 10
