# SPDX-License-Identifier: Apache-2.0
"""KV caches of both forms in whole programs, and those that no binding could hold."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from engine.backends.base import Backend
from engine.backends.cpu import CpuBackend
from engine.errors import OutOfMemory
from engine.lower import lower
from engine.text.model import TextModel
from kernels import kv

IDS = [5, 17, 260, 299, 3, 44, 44, 150, 1, 280, 99, 7, 8]


@pytest.fixture(params=["cpu", pytest.param("gpu", marks=pytest.mark.gpu)])
def backend(request: pytest.FixtureRequest) -> Any:
    opened: Backend
    if request.param == "cpu":
        opened = CpuBackend(threads=2)
    else:
        from engine.backends.vulkan import VulkanBackend

        opened = VulkanBackend(allow_software=True)
    yield opened
    opened.close()


def logits(model: TextModel, fmt: str, split: int) -> npt.NDArray[np.float32]:
    """After IDS, of which those from `split` on are decoded one by one."""
    state = model.state(kv=fmt)
    state.run(IDS[:split], head=True)
    for token in IDS[split:]:
        state.run([token], head=True, decode=True)
    found = state.logits().copy()
    state.close()
    return found


@pytest.mark.parametrize("fmt", kv.FORMATS)
@pytest.mark.parametrize("split", [len(IDS), 1, 6])
def test_logits(tmp_path: Path, tiny: Any, backend: Backend, fmt: str, split: int) -> None:
    shape = tiny.shape(vocab=300)
    path = tiny.write(tmp_path / "m.gguf", "F16", shape)
    model = TextModel.load(path, "", backend)
    truth = tiny.truth(path, shape).logits(IDS)[-1]
    assert np.abs(logits(model, fmt, split) - truth).max() < (0.02 if fmt == "f16" else 0.05)
    model.close()


@pytest.mark.gpu
@pytest.mark.parametrize("fmt", kv.FORMATS)
def test_caches_that_are_larger_than_any_binding(tmp_path: Path, tiny: Any, fmt: str) -> None:
    from engine.backends.vulkan import VulkanBackend

    backend = VulkanBackend(allow_software=True)
    # All else, the rotary table too, is smaller than a cache.
    shape = tiny.shape(context=2000, heads=8, kv_heads=8, dim=16, vocab=300)
    path = tiny.write(tmp_path / "m.gguf", "F16", shape)
    model = TextModel.load(path, "", backend)
    cache = kv.nbytes(fmt, 8, 2000, 16)
    limits = replace(backend.info.limits, max_storage_range=cache - 256)
    backend.info = replace(backend.info, limits=limits)
    without = replace(backend.info, features=backend.info.features - kv.ADDRESS)
    with pytest.raises(OutOfMemory, match=r"kc\.0"):
        lower(model.graph, without, 2000, len(IDS), kv=fmt)
    if without.features == backend.info.features:  # so it is with this device itself
        model.close()
        backend.close()
        return
    program = lower(model.graph, backend.info, 2000, len(IDS), kv=fmt)
    used = {c.variant for calls in program.sequences.values() for c in calls if "kv" in c.op}
    assert used == {f"{fmt}_address"}
    truth = tiny.truth(path, shape).logits(IDS)[-1]
    assert np.abs(logits(model, fmt, 5) - truth).max() < (0.02 if fmt == "f16" else 0.05)
    model.close()
    backend.close()
