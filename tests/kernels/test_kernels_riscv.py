# SPDX-License-Identifier: Apache-2.0
"""When RISC-V's vectors are used: only when the kernel says that they are those of version 1.0."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from engine.backends.base import Backend
from tests.kernels.conftest import BUILDS
from tests.kernels.emulated import CPUS, Cpu, Emulated

pytestmark = [pytest.mark.long, BUILDS]

WITH_V, WITHOUT = CPUS["riscv64"]["rvv128"].options, CPUS["riscv64"]["base"].options


@pytest.fixture
def board(place: Callable[[str], Backend]) -> Emulated:
    opened = place("riscv64")
    assert isinstance(opened, Emulated)
    return opened


@pytest.mark.parametrize(
    ("hwprobe", "isa"), [("v", "rvv"), ("none", "base"), ("forbidden", "base"), ("unknown", "base")]
)
def test_the_kernel_says_whether_there_are_vectors(board: Emulated, hwprobe: str, isa: str) -> None:
    assert board.chosen(Cpu("", WITH_V, hwprobe)) == isa


def test_vectors_can_be_left_out_and_not_be_forced(board: Emulated) -> None:
    assert board.chosen(Cpu("", WITH_V, "v"), PVRD_ISA="base") == "base"
    assert board.chosen(Cpu("", WITHOUT, "none"), PVRD_ISA="rvv") == "base"
