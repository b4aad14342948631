# SPDX-License-Identifier: Apache-2.0
"""Backends to test, and a small Program over `swiglu` that all of them can run."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest

import kernels
from engine.backends.base import Array, Backend
from engine.backends.cpu import CpuBackend
from engine.backends.null import NullBackend
from engine.program import Binding, Buffer, Call, Program

F, TOKENS = 256, 4


def swiglu(gate_up: Binding, out: Binding, f: int = F, tokens: int = TOKENS) -> Call:
    """A call of swiglu."""
    op = kernels.op("swiglu")
    groups = op.groups({"f": f, "each": 1, "tokens": tokens}, op.variant("base"))
    return Call("swiglu", "base", (gate_up, out), op.pack(f=f, act=0, each=1), groups)


def chain() -> Program:
    """`first`: x -> h; `second`: h and the weight beside it -> y. Two sequences of one slice,
    through a scratch.
    """
    row = 4 * TOKENS * F
    buffers = [
        Buffer("params", 64, "params"),
        Buffer("x", 2 * row, "input"),
        Buffer("h", row, "scratch"),
        Buffer("w", 2 * row, "weight"),
        Buffer("g", row, "state"),
        Buffer("y", row // 2, "output"),
    ]
    first = (
        swiglu(Binding("x"), Binding("h")),
        swiglu(Binding("w"), Binding("g")),
    )
    second = (swiglu(Binding("h"), Binding("y"), f=F // 2),)
    return Program({b.name: b for b in buffers}, {"first": first, "second": second})


def chain_data(seed: int = 1) -> tuple[Array, Array, Array]:
    """x, w and the y that comes of them."""
    rng = np.random.default_rng(seed)
    x, w = (rng.standard_normal((TOKENS, 2, F)).astype(np.float32) for _ in range(2))
    h = _swiglu(x.astype(np.float64)).reshape(TOKENS, 2, F // 2)
    return x, w, _swiglu(h)


def _swiglu(gu: Array) -> Array:
    gate, up = gu[:, 0], gu[:, 1]
    return gate / (1 + np.exp(-gate)) * up


PARAMS = np.array([TOKENS, 0, TOKENS - 1] + [0] * 13, np.uint32)


def open_gpu(**options: object) -> Backend:
    """The GPU, or the software device that stands in for one."""
    from engine.backends.vulkan import VulkanBackend

    return VulkanBackend(allow_software=True, **options)  # type: ignore[arg-type]


_OPENERS: dict[str, Callable[[], Backend]] = {
    "null": lambda: NullBackend(reference=True),
    "cpu": lambda: CpuBackend(threads=2),
    "gpu": open_gpu,
    "gpu-staging": lambda: open_gpu(force_staging=True),
}


@pytest.fixture(
    params=[
        pytest.param(name, marks=[pytest.mark.gpu] if name.startswith("gpu") else [])
        for name in _OPENERS
    ]
)
def backend(request: pytest.FixtureRequest) -> Iterator[Backend]:
    """Each backend in turn, freshly opened."""
    opened = _OPENERS[request.param]()
    yield opened
    opened.close()
