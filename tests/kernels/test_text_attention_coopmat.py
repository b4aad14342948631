# SPDX-License-Identifier: Apache-2.0
"""Prefill attention by cooperative matrices on devices that have none: see test_text_coopmat.py."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import kernels
from engine.backends.vulkan import VulkanBackend
from kernels import build_spirv
from kernels.samples import samples
from tests.kernels.harness import Runner
from tests.kernels.test_text_attention import attention
from tests.kernels.test_text_coopmat import EMULATED, ROOT

OP = "attention_prefill"


@pytest.fixture
def emulated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Runner]:
    """The GPU with kernels whose matrices are emulated."""
    for folder in ("include", OP):
        shutil.copytree(ROOT / "kernels" / folder, tmp_path / "kernels" / folder)
    (tmp_path / "kernels" / "include" / "coopmat.glsl").write_text(EMULATED)
    contract = kernels.op(OP)
    variants = tuple(v for v in contract.variants if "coopmat" in v.needs)
    contract = replace(contract, variants=variants)
    entries = build_spirv.build_op(tmp_path, tmp_path, contract)
    samples()  # kept from now on: of the kernels as they are
    monkeypatch.setattr(kernels, "artifacts", lambda: tmp_path)
    monkeypatch.setattr(kernels, "manifest", lambda: {OP: entries})
    monkeypatch.setattr(kernels, "op", lambda name: contract)
    backend = VulkanBackend(allow_software=True)
    limits = replace(backend.info.limits, max_shared_bytes=48 << 10)
    features = backend.info.features | {"coopmat"}
    backend.info = replace(backend.info, features=features, limits=limits)
    yield Runner(backend)
    backend.close()


@pytest.mark.gpu
@pytest.mark.long
def test_blocks(emulated: Runner) -> None:
    for variant in kernels.op(OP).variants:
        fmt = variant.name.partition("_")[0]
        for shape, pos0, tokens, window, softcap in (
            ((6, 2, 64), 0, 33, 0, 0.0),
            ((2, 1, 256), 70, 20, 40, 5.0),
            ((3, 3, 36), 5, 3, 0, 0.0),
            ((4, 1, 96), 130, 9, 0, 0.0),
        ):
            push, arrays = attention(fmt, shape, 160, pos0, tokens, 36, window, softcap)
            given = (tokens, pos0, 0)
            got = emulated.check_op(OP, variant.name, push, arrays, given, 36, tolerance=6e-3)
            assert np.isnan(got["out"][tokens:]).all()


def test_what_they_ask_for() -> None:
    for variant in kernels.op(OP).variants:
        if "coopmat" in variant.needs:
            entry = kernels.manifest()[OP][variant.name]
            assert "CooperativeMatrixKHR" in entry["capabilities"]
            assert entry["extensions"] == ["SPV_KHR_cooperative_matrix"]
            assert entry["shared_bytes"] <= 48 << 10
