# SPDX-License-Identifier: Apache-2.0
"""`engine.bench` and `pvrctl bench kernels`: what is counted, measured and said."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

import kernels
from engine import bench, bench_cases, bench_probe, bench_shaders
from engine.backends.base import Backend
from engine.backends.cpu import CpuBackend
from engine.bench_probe import Rates
from kernels import build_spirv, spirv, weights
from pvrd.ctl.main import main

RATES = Rates(1e10, 1e10, "a guess", 1e-6, 1e-5, "wall")
BOUNDS = {"memory", "arithmetic", "launch", "latency"}


@pytest.fixture
def cpu() -> Iterator[Backend]:
    backend = CpuBackend(threads=1)
    yield backend
    backend.close()


@pytest.fixture
def gpu() -> Iterator[Backend]:
    from engine.backends.vulkan.backend import VulkanBackend

    backend = VulkanBackend(allow_software=True)
    yield backend
    backend.close()


@pytest.mark.parametrize(
    ("seconds", "copy", "arithmetic", "word"),
    [
        (1e-6, 0.9, 0.9, "launch"),
        (1e-3, 0.9, 0.3, "memory"),
        (1e-3, 0.3, 0.9, "arithmetic"),
        (1e-3, 0.1, 0.1, "latency"),
        (1e-3, 0.5, 0.5, "memory"),
    ],
)
def test_what_bounds_is_said_from_both_shares(
    seconds: float, copy: float, arithmetic: float, word: str
) -> None:
    assert bench.bound(seconds, copy, arithmetic, 1e-6) == word


def test_counters_have_the_last_word_when_both_sides_are_counted(cpu: Backend) -> None:
    busy = bench.Reading("ALU busy", "arithmetic", "percent", 70.0)
    reads = bench.Reading("reads", "memory", "bytes", 4096.0)
    dram = bench.Reading("DRAM", "memory", "percent", 30.0)
    assert bench.levels([busy, reads]) is None
    assert bench.levels([busy, reads, dram]) == (0.3, 0.7)
    (case, *_) = bench_cases.cases(cpu, "swiglu")
    row = bench.time_case(cpu, case, RATES, quick=True)
    assert row.counters == []
    assert "bound" in row.estimates
    counted = bench._line(replace(row, counters=[busy, reads]))
    assert "\n  ALU busy (arithmetic): 70 percent\n  reads (memory): 4096 bytes" in counted


def test_cases_cover_every_operation_and_every_format(cpu: Backend) -> None:
    found = list(bench_cases.cases(cpu))
    assert {c.op for c in found} == set(kernels.manifest())
    for op in ("matvec", "matmul", "embed"):
        assert {c.name for c in found if c.op == op} == {"q4", "q8", "f16"}
    quick = list(bench_cases.cases(cpu, quick=True))
    assert {c.op for c in quick} == {c.op for c in found}
    assert len(quick) < len(found)
    for case in found:
        contract = kernels.op(case.op)
        assert set(case.sizes) == {b.name for b in contract.bindings}
        assert set(case.push) == {n for n, _ in contract.push}
        most = sum(case.sizes[b.name] * len(b.access) for b in contract.bindings)  # rw: twice
        assert 0 < case.nbytes <= most
        assert case.operations > 0


def test_bytes_and_operations_of_a_matrix_and_a_vector(cpu: Backend) -> None:
    (case,) = (c for c in bench_cases.cases(cpu, "matvec") if c.name == "q4" and "head" in c.shape)
    n, k = 49152, 576
    assert case.operations == 2 * n * k
    assert case.nbytes == weights.nbytes("q4", n, k) + 4 * (n + k)
    assert case.cold == "w"


def test_every_kernel_is_timed_on_the_cpu(cpu: Backend) -> None:
    found = list(bench.rows(cpu, RATES, quick=True))
    for row in found:
        assert not row.error, row
        assert row.seconds > 0
        assert math.isclose(row.copy_share, row.bytes / row.seconds / RATES.copy)
        assert math.isclose(row.arithmetic_share, row.operations / row.seconds / RATES.arithmetic)
        assert row.bound in BOUNDS
        assert "seconds" not in row.estimates
        assert {"bytes", "operations", "copy_share", "arithmetic_share"} <= set(row.estimates)


def test_a_kernel_that_cannot_run_is_a_row_with_the_reason(cpu: Backend) -> None:
    (case, *_) = bench_cases.cases(cpu, "swiglu")
    broken = replace(case, sizes={**case.sizes, "gu": 1 << 60})
    row = bench.time_case(cpu, broken, RATES, quick=True)
    assert "bytes" in row.error
    assert row.seconds == 0
    assert bench._line(row).endswith(row.error)


def test_rates_of_the_cpu(cpu: Backend) -> None:
    rates = bench_probe.measure(cpu, quick=True)
    assert rates.copy > 0
    assert rates.arithmetic > 0
    assert rates.dispatch_s >= 0
    assert rates.submission_s > 0
    assert rates.clock == "wall"


@pytest.mark.parametrize("name", ["fma", "index", "copy", "triangle", "column", "layer"])
def test_the_shaders_of_the_measurement_are_valid(tmp_path: Path, name: str) -> None:
    steps = {"layer": [32]}.get(name, [])
    code = getattr(bench_shaders, f"{name}_shader")(*steps)
    (tmp_path / "a.spv").write_bytes(code)
    build_spirv._run("spirv-val", "--target-env", build_spirv.TARGET, str(tmp_path / "a.spv"))
    if name in ("fma", "index"):
        module = spirv.read(code)
        assert module.workgroup == (32, 1, 1)
        assert module.storage == [1]
        assert not module.barrier


@pytest.mark.gpu
def test_rates_of_a_gpu(gpu: Backend) -> None:
    from engine.backends.vulkan.backend import VulkanBackend

    assert isinstance(gpu, VulkanBackend)
    rate, value = bench_probe.fma(gpu, 0.02)
    assert rate > 0
    assert value == bench_shaders.CHAINS * 4 * 2.0  # x / 2 + 1 ends at 2
    rates = bench_probe.measure(gpu, quick=True)
    assert rates.copy > 0
    assert rates.submission_s > 0
    assert rates.clock == ("timestamps" if gpu._device.timer else "wall")
    # A software device's timestamps leave out dispatches once something was drawn.
    assert not (gpu.info.software and gpu._device.timer)
    assert rates.starts is not None
    assert rates.starts.width == 64
    assert min(rates.starts.dispatch_in_turn_s, rates.starts.draw_in_turn_s) > 0
    said = bench._starts(rates.starts)
    assert "a draw to 64x1 pixels" in said
    assert f"({rates.starts.ratio_in_turn:.2f})" in said


@pytest.mark.gpu
def test_a_queue_that_does_not_draw(gpu: Backend) -> None:
    from engine.backends.vulkan.backend import VulkanBackend

    assert isinstance(gpu, VulkanBackend)
    gpu._device.draws = False
    assert bench_probe.draws(gpu, 0.01) is None
    assert bench._starts(None) == ""


@pytest.mark.gpu
def test_a_slice_is_timed_by_the_device_or_not_at_all(gpu: Backend) -> None:
    from engine.backends.vulkan.backend import VulkanBackend

    assert isinstance(gpu, VulkanBackend)
    (case, *_) = bench_cases.cases(gpu, "swiglu")
    exe, close = bench._record(gpu, case, 4, 0)
    stats = [exe.run("chain") for _ in range(3)]
    close()
    for found in stats:
        if gpu._device.timer is None:
            assert found.device_s is None
        else:
            assert found.device_s is not None
            assert 0 < found.device_s <= found.wall_s
    gpu._device.timer = None  # as on PowerVR
    exe, close = bench._record(gpu, case, 4, 0)
    found = exe.run("chain")
    close()
    assert found.device_s is None
    assert bench_probe.seconds(found) == found.wall_s


@pytest.mark.gpu
def test_kernels_are_timed_on_a_gpu(gpu: Backend) -> None:
    found = [r for op in ("swiglu", "rmsnorm", "topk") for r in bench.rows(gpu, RATES, op, True)]
    assert {r.op for r in found} == {"swiglu", "rmsnorm", "topk"}
    for row in found:
        assert not row.error, row
        assert row.seconds > 0
        assert row.bound in BOUNDS


def test_the_command_prints_words_and_json(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PVRD_KERNELS", str(kernels.artifacts()))
    assert main(["bench", "kernels", "--quick", "--op", "swiglu"]) == 0
    out = capsys.readouterr().out
    assert "swiglu.c" in out
    assert "estimates" in out
    assert any(out.rstrip().endswith(word) for word in BOUNDS)
    assert main(["bench", "kernels", "--quick", "--op", "swiglu", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["device"]["kind"] == "cpu"
    assert found["rates"]["clock"] == "wall"
    assert {k["op"] for k in found["kernels"]} == {"swiglu"}


def test_what_the_command_refuses(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PVRD_KERNELS", str(kernels.artifacts()))
    assert main(["bench"]) == 2
    assert main(["bench", "kernels", "--op", "nothing"]) == 2
    assert "There is no operation 'nothing'" in capsys.readouterr().err
    monkeypatch.setenv("VK_ICD_FILENAMES", "/nonexistent.json")
    monkeypatch.setenv("VK_DRIVER_FILES", "/nonexistent.json")
    assert main(["bench", "kernels", "--device", "gpu"]) == 1
    assert "There is no such device" in capsys.readouterr().err


class FakeCopies:
    """A device whose clock is a fifth of what it can be until it has worked for 40 ms, and whose
    submissions cost 0.1 ms each.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds, self.worked, self.asked = seconds, 0.0, list[int]()

    def __call__(self, times: int) -> float:
        self.asked.append(times)
        slow = 5 if self.worked < 0.04 else 1
        took = 1e-4 + times * self.seconds * slow
        self.worked += took
        return took


@pytest.mark.parametrize("seconds", [2.5e-4, 5e-2, 1e-6])
def test_a_copy_is_timed_warm_and_many_at_once(seconds: float) -> None:
    device = FakeCopies(seconds)
    found = bench_probe.rate(device, 1 << 30, 0.05)
    assert found == pytest.approx((1 << 30) / seconds, rel=0.11 if seconds < 1e-5 else 0.01)
    assert found <= (1 << 30) / seconds  # never more than there is
    assert len(device.asked) < 100
    assert device.asked[-1] * seconds <= max(seconds, 1.1 * bench_probe.SUBMISSION_S)


@pytest.mark.gpu
def test_a_large_gpu_copies_more_than_its_cache(gpu: Backend) -> None:
    from engine.backends.vulkan.backend import VulkanBackend

    assert isinstance(gpu, VulkanBackend)
    assert bench_probe._copy_nbytes(gpu) == bench_probe.COPY_BYTES
    gpu.info = replace(gpu.info, software=False)
    limits = gpu.info.limits
    most = min(limits.max_storage_range, gpu._plan.device.heap_bytes // 8)
    assert bench_probe._copy_nbytes(gpu) <= most
    gpu.info = replace(gpu.info, limits=replace(limits, max_storage_range=1 << 40))
    heap = gpu._plan.device.heap_bytes // 8
    assert bench_probe._copy_nbytes(gpu) >= min(512 << 20, heap // (64 << 20) * (64 << 20))
