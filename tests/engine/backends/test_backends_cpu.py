# SPDX-License-Identifier: Apache-2.0
"""The CPU backend: teams of threads, instruction sets, views of weights."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from engine.backends import cpu
from engine.backends.host import ALIGN, aligned
from engine.errors import InvalidArgument
from tests.engine.backends.conftest import PARAMS, chain, chain_data


@pytest.fixture(autouse=True)
def _same_isa() -> Iterator[None]:
    before = cpu.isa()
    yield
    cpu.set_isa(before)


def result(backend: cpu.CpuBackend, seed: int = 1) -> bytes:
    x, w, want = chain_data(seed)
    exe = backend.executable(chain(), backend.weights({"w": w}))
    exe.write("params", PARAMS)
    exe.write("x", x)
    exe.run("first", "second")
    y = exe.read("y", want.size * 4)
    np.testing.assert_allclose(y.view(np.float32).reshape(want.shape), want, rtol=1e-4, atol=1e-6)
    return bytes(y)


@pytest.mark.parametrize("threads", range(1, 9))
def test_any_number_of_threads_gives_the_same_bits(threads: int) -> None:
    assert result(cpu.CpuBackend(threads)) == result(cpu.CpuBackend(1))


@pytest.mark.parametrize("name", cpu.isas())
def test_each_instruction_set(name: str) -> None:
    cpu.set_isa(name)
    assert cpu.isa() == name
    backend = cpu.CpuBackend(2)
    assert f"isa:{name}" in backend.info.features
    result(backend)


def test_instruction_sets_that_are_not_there() -> None:
    assert cpu.isas()[0] == "base"
    with pytest.raises(InvalidArgument, match="no 'sse17'"):
        cpu.set_isa("sse17")


@pytest.mark.parametrize(("wanted", "got"), [("base", "base"), ("sse17", cpu.isas()[-1])])
def test_the_environment_lowers_the_instruction_set(wanted: str, got: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", "from engine.backends import cpu; print(cpu.isa())"],
        env={**os.environ, "PVRD_ISA": wanted, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == got


def test_kernels_that_are_not_built(tmp_path: Path) -> None:
    (tmp_path / "libpvrkernels.so").write_text("no library")
    code = (
        "from engine.backends.cpu import CpuBackend\nfrom engine.errors import PvrError\n"
        "try:\n    CpuBackend()\nexcept PvrError as e:\n    print(e)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={
            **os.environ,
            "PVRD_KERNELS": str(tmp_path),
            "PYTHONPATH": os.pathsep.join(sys.path),
        },
        capture_output=True,
        text=True,
        check=True,
    )
    assert "kernels cannot be loaded" in done.stdout


def test_weights_are_views_of_the_mapping() -> None:
    mapped = aligned(4096)
    weights = cpu.CpuBackend(1).weights({"w": mapped[:1024]})
    mapped[5] = 7
    assert weights.blobs["w"][5] == 7
    assert weights.blobs["w"].ctypes.data == mapped.ctypes.data


def test_unaligned_weights_are_copied_to_where_kernels_can_read_them() -> None:
    mapped = aligned(4096)
    mapped[:] = np.arange(4096) % 251
    weights = cpu.CpuBackend(1).weights({"w": mapped[4:1028]})
    assert weights.blobs["w"].ctypes.data % ALIGN == 0
    assert (weights.blobs["w"] == mapped[4:1028]).all()


def test_two_threads_run_slices_side_by_side() -> None:
    backend = cpu.CpuBackend(2)
    want = [result(backend, seed) for seed in (1, 2)]
    got: list[list[bytes]] = [[], []]

    def work(i: int) -> None:
        got[i] = [result(backend, i + 1) for _ in range(20)]

    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert got == [[want[0]] * 20, [want[1]] * 20]


def test_an_unknown_operation_is_refused() -> None:
    program = chain()
    call = replace(program.sequences["first"][0], op="no_such_op")
    backend = cpu.CpuBackend(1)
    with pytest.raises(InvalidArgument, match="no operation 'no_such_op'"):
        backend.executable(
            replace(program, sequences={"first": (call,)}),
            backend.weights({"w": chain_data()[1]}),
        )


def test_the_device_names_itself() -> None:
    info = cpu.CpuBackend().info
    assert info.kind == "cpu"
    assert info.software
    assert info.name
    assert info.properties["threads"] == cpu.usable_cpus()
