# SPDX-License-Identifier: Apache-2.0
"""`check_op` and `runner`: a kernel test that takes one runs once on each instruction set and on
the GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from engine.backends import cpu
from engine.backends.base import Backend
from tests.kernels.harness import Runner


@pytest.fixture(scope="session")
def _opened() -> Iterator[dict[str, Backend]]:
    opened: dict[str, Backend] = {}
    yield opened
    for backend in opened.values():
        backend.close()


_PLACES = [pytest.param(f"cpu-{isa}", id=f"cpu-{isa}") for isa in cpu.isas()]
_PLACES.append(pytest.param("gpu", id="gpu", marks=pytest.mark.gpu))


@pytest.fixture(params=_PLACES)
def runner(request: pytest.FixtureRequest, _opened: dict[str, Backend]) -> Iterator[Runner]:
    """A Runner for each instruction set of this CPU and for the GPU."""
    kind, _, isa = request.param.partition("-")
    if kind not in _opened:
        if kind == "gpu":
            from engine.backends.vulkan import VulkanBackend

            _opened[kind] = VulkanBackend(allow_software=True)
        else:
            _opened[kind] = cpu.CpuBackend(threads=2)
    before = cpu.isa()
    yield Runner(_opened[kind], isa)
    cpu.set_isa(before)


@pytest.fixture
def check_op(runner: Runner) -> Callable[..., dict[str, Any]]:
    """tests.kernels.harness.Runner.check_op, on each backend in turn."""
    return runner.check_op
