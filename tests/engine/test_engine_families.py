# SPDX-License-Identifier: Apache-2.0
"""Each family's logits are those of transformers (tests/data/family_logits.json), from a folder and
from GGUF.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from engine.backends.base import Backend
from engine.backends.cpu import CpuBackend
from engine.backends.null import NullBackend
from engine.text.model import TextModel
from tests.engine.family_models import CASES, IDS, write_folder, write_gguf, write_tokenizer_json

WANT = json.loads((Path(__file__).parents[1] / "data/family_logits.json").read_text("utf-8"))
FAMILIES = [pytest.param(name, id=name.replace(" ", "-")) for name in CASES]


@contextmanager
def loaded(source: Path, backend: Backend) -> Iterator[TextModel]:
    model = TextModel.load(source, "", backend)
    yield model
    model.close()


def answer(model: TextModel, context: int, decoded: int = 0) -> np.ndarray:
    """Logits after the last of IDS, of which the last `decoded` come one by one."""
    state = model.state(context)
    first = len(IDS) - decoded
    state.run(IDS[:first], head=not decoded)
    for i in range(first, len(IDS)):
        state.run(IDS[i : i + 1], head=True, decode=True)
    out = state.logits()
    state.close()
    return out


def check(model: TextModel, name: str, tolerance: float) -> None:
    for decoded in (0, 3):
        got = answer(model, CASES[name].context, decoded)
        np.testing.assert_allclose(got, WANT[name], rtol=0, atol=tolerance, err_msg=name)


@pytest.mark.parametrize("name", FAMILIES)
def test_folder(tmp_path: Path, name: str) -> None:
    path = write_tokenizer_json(write_folder(tmp_path / "m", CASES[name]))
    with loaded(path, NullBackend(reference=True)) as model:
        check(model, name, 0.01)


@pytest.mark.parametrize("name", [n for n in FAMILIES if CASES[str(n.values[0])].arch])
def test_gguf_on_the_cpu(tmp_path: Path, name: str) -> None:
    path = write_gguf(tmp_path / "m.gguf", CASES[name])
    with loaded(path, CpuBackend(2)) as model:
        check(model, name, 0.02)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["qwen3_moe", "gemma3", "qwen2", "olmoe", "phi3-long"])
def test_on_the_gpu(tmp_path: Path, name: str) -> None:
    from engine.backends.vulkan import VulkanBackend

    name = name.replace("-", " ")
    path = write_gguf(tmp_path / "m.gguf", CASES[name])
    backend = VulkanBackend(allow_software=True)
    with loaded(path, backend) as model:
        check(model, name, 0.02)
    backend.close()
