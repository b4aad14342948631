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
from tests.kernels import emulated
from tests.kernels.harness import Runner


@pytest.fixture(scope="session")
def place() -> Iterator[Callable[[str], Backend]]:
    """The backend `cpu`, `gpu` or of a foreign processor (emulated.CPUS), opened once; what cannot
    be opened, such as kernels that do not build, is not tried again for each test.
    """
    opened: dict[str, Backend] = {}
    failed: dict[str, str] = {}

    def get(kind: str) -> Backend:
        if kind in emulated.CPUS and (tool := emulated.missing(kind)):
            pytest.skip(f"{tool} is not installed")
        assert kind not in failed, failed[kind]
        if kind not in opened:
            failed[kind] = f"{kind} could not be opened for an earlier test"
            opened[kind] = _open(kind)
            del failed[kind]
        return opened[kind]

    yield get
    for backend in opened.values():
        backend.close()


BUILDS = pytest.mark.timeout(1800)
_PLACES = [pytest.param(("cpu", isa), id=f"cpu-{isa}") for isa in cpu.isas()]
_PLACES.append(pytest.param(("gpu", ""), id="gpu", marks=pytest.mark.gpu))
# The first one builds all kernels: minutes, if the machine is busy.
_PLACES += [
    pytest.param((arch, isa), id=f"{arch}-{isa}", marks=[pytest.mark.long, BUILDS])
    for arch, cpus in emulated.CPUS.items()
    for isa in cpus
]


def _open(kind: str) -> Any:
    if kind == "cpu":
        return cpu.CpuBackend(threads=2)
    if kind == "gpu":
        from engine.backends.vulkan import VulkanBackend

        return VulkanBackend(allow_software=True)
    return emulated.Emulated(kind)


@pytest.fixture(params=_PLACES)
def runner(request: pytest.FixtureRequest, place: Callable[[str], Backend]) -> Iterator[Runner]:
    """A Runner for each instruction set of this CPU, for the GPU and, marked `long`, for the CPUs
    of boards under qemu.
    """
    kind, isa = request.param
    backend = place(kind)
    before = cpu.isa()
    yield Runner(backend, isa)
    cpu.set_isa(before)


@pytest.fixture
def gpu(place: Callable[[str], Backend]) -> Runner:
    """The Runner of the GPU alone, for tests of what its variants do and the CPU has not."""
    return Runner(place("gpu"))


@pytest.fixture
def check_op(runner: Runner) -> Callable[..., dict[str, Any]]:
    """tests.kernels.harness.Runner.check_op, on each backend in turn."""
    return runner.check_op
