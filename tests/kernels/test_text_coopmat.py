# SPDX-License-Identifier: Apache-2.0
"""The kernels for cooperative matrices on devices that have none: the matrices are emulated, all
else (tiles, borders, rounding, what is written) is the kernels' own.

On a device that has them, test_text_matrix.py runs the kernels as they are.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

import kernels
from engine.backends.vulkan import VulkanBackend
from kernels import build_spirv
from kernels.contract import Variant
from kernels.samples import samples
from tests.kernels.harness import Runner
from tests.kernels.test_text_matrix import FMTS, product

ROOT = Path(__file__).resolve().parent.parent.parent
# In place of kernels/include/coopmat.glsl: an invocation has all of A and B, and of a sum the
# elements that are its own in a subgroup of 32.
EMULATED = """
#extension GL_EXT_shader_explicit_arithmetic_types_float16 : require
struct Factor { float v[256]; };
struct Sum { float v[8]; };
#define COOPMAT_A Factor
#define COOPMAT_B Factor
#define COOPMAT_SUM Sum
#define COOPMAT_ZERO Sum(float[8](0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0))
#define coopmat_load_a(m, from, at, stride) \\
    for (uint e_ = 0u; e_ < 256u; e_++) \\
        m.v[e_] = float(from[(at) + e_ / 16u * (stride) + e_ % 16u / 4u][e_ & 3u])
#define coopmat_load_b coopmat_load_a
uint coopmat_subgroup() { return gl_LocalInvocationID.x / 32u; }
uint coopmat_lane() { return gl_LocalInvocationID.x % 32u; }
#define coopmat_multiply(a, b, sum) \\
    for (uint e_ = 0u; e_ < 8u; e_++) \\
        for (uint k_ = 0u; k_ < 16u; k_++) \\
            sum.v[e_] += a.v[(coopmat_lane() / 16u + 2u * e_) * 16u + k_] \\
                * b.v[coopmat_lane() % 16u * 16u + k_]
#define coopmat_store(m, to, at, stride) \\
    for (uint e_ = 0u; e_ < 8u; e_++) \\
        to[(at) + (coopmat_lane() / 16u + 2u * e_) * (stride) + coopmat_lane() % 16u] = m.v[e_]
"""
# Rows and tokens of a workgroup: less than the kernels take, for shared memory of 32 KiB.
SIZES = [(32, 128), (64, 64)]


def smaller(fmt: str, rows: int, tokens: int) -> Variant:
    known = kernels.op("matmul").variant(f"{fmt}_coopmat")
    return replace(
        known,
        name=f"{fmt}_{rows}x{tokens}",
        workgroup=(rows * tokens // 64, 1, 1),
        defines={**known.defines, "ROWS": str(rows), "TOKENS": str(tokens)},
        shared=160 * (rows + tokens) + rows * tokens // 2,
    )


@pytest.fixture
def emulated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Runner]:
    """The GPU with kernels whose matrices are emulated."""
    for folder in ("include", "matmul"):
        shutil.copytree(ROOT / "kernels" / folder, tmp_path / "kernels" / folder)
    (tmp_path / "kernels" / "include" / "coopmat.glsl").write_text(EMULATED)
    variants = tuple(smaller(fmt, *size) for fmt in FMTS for size in SIZES)
    contract = replace(kernels.op("matmul"), variants=variants)
    entries = build_spirv.build_op(tmp_path, tmp_path, contract)
    samples()  # kept from now on: of the kernels as they are
    monkeypatch.setattr(kernels, "artifacts", lambda: tmp_path)
    monkeypatch.setattr(kernels, "manifest", lambda: {"matmul": entries})
    monkeypatch.setattr(kernels, "op", lambda name: contract)
    backend = VulkanBackend(allow_software=True)
    backend.info = replace(backend.info, features=backend.info.features | {"coopmat"})
    yield Runner(backend)
    backend.close()


@pytest.mark.gpu
@pytest.mark.long
def test_tiles(emulated: Runner) -> None:
    for variant in kernels.op("matmul").variants:
        fmt = variant.name.partition("_")[0]
        product(emulated, "matmul", fmt, 100, 96, 137, variant=variant.name)
        more = {"chunk": 90, "accumulate": 1, "y0": 64, "ldy": 260}
        product(emulated, "matmul", fmt, 130, 32, 70, variant=variant.name, **more)


def test_what_they_ask_for() -> None:
    wanted = {"Shader", "Float16", "GroupNonUniform", "VulkanMemoryModel", "CooperativeMatrixKHR"}
    for variant in kernels.op("matmul").variants:
        if "coopmat" in variant.needs:
            entry = kernels.manifest()["matmul"][variant.name]
            assert set(entry["capabilities"]) == wanted
            assert entry["extensions"] == ["SPV_KHR_cooperative_matrix"]
            assert entry["shared_bytes"] <= 48 << 10
