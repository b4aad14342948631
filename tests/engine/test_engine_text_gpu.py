# SPDX-License-Identifier: Apache-2.0
"""Tiny models on a Vulkan device: every weight format, chunks, shards of the head, a resumed
answer.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.backends.base import Backend
from engine.text.generate import Generation
from engine.text.model import TextModel
from engine.text.request import Request, Token
from tests.engine.conftest import off_by

pytestmark = pytest.mark.gpu
IDS = [5, 17, 260, 299, 3, 44, 44, 150, 1, 280, 99]


@pytest.fixture(scope="module")
def gpu() -> Any:
    # Imported here: collecting the tests needs no Vulkan.
    from engine.backends.vulkan import VulkanBackend

    backend = VulkanBackend(allow_software=True)
    yield backend
    backend.close()


@pytest.mark.parametrize("kind", ["F16", "Q8_0", "Q4_0", "Q4_1"])
def test_logits(tmp_path: Path, tiny: Any, gpu: Backend, kind: str) -> None:
    shape = tiny.shape(vocab=1500)
    path = tiny.write(tmp_path / "m.gguf", kind, shape)
    truth = tiny.truth(path, shape).logits(IDS)[-1]
    model = TextModel.load(path, "", gpu)
    for chunk in (len(IDS), 1, 4):
        state = model.state()
        for i in range(0, len(IDS), chunk):
            state.run(IDS[i : i + chunk], head=i + chunk >= len(IDS))
        assert np.abs(state.logits() - truth).max() < off_by(gpu)
        state.close()
    model.close()


def test_resumed_and_read_back(tiny_q8: Path, gpu: Backend) -> None:
    model = TextModel.load(tiny_q8, "", gpu)
    request = Request("generate", "tell me", settings={"temperature": 0, "max_tokens": 12})

    def answer(delivered: list[int]) -> list[int]:
        state = model.state()
        g = Generation(state, request, delivered)
        ids = []
        while not g.finished:
            ids += [e.id for e in g.step() if isinstance(e, Token)]
        state.close()
        return ids

    before = gpu.counters()["bytes_read_back"]
    whole = answer([])
    # 520 bytes for each token, and nothing else, come back from the device.
    assert gpu.counters()["bytes_read_back"] - before == 12 * 520
    assert answer(whole[:5]) == whole[5:]
    model.close()
