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
from kernels.matmul.op import CoopmatTile, coopmat
from kernels.samples import samples
from tests.kernels.harness import Runner
from tests.kernels.test_text_matrix import FMTS, product

ROOT = Path(__file__).resolve().parent.parent.parent
# In place of kernels/include/coopmat.glsl: an invocation has the elements of a sum that are its own
# in a subgroup of 32, of one column and every other row, and what it needs of A and B for them.
EMULATED = """
#extension GL_EXT_shader_explicit_arithmetic_types_float16 : require
struct Rows { float v[128]; };
struct Column { float v[16]; };
struct Sum { float v[8]; };
#define COOPMAT_A Rows
#define COOPMAT_B Column
#define COOPMAT_SUM Sum
#define COOPMAT_ZERO Sum(float[8](0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0))
uint coopmat_subgroup() { return gl_LocalInvocationID.x / 32u; }
uint coopmat_lane() { return gl_LocalInvocationID.x % 32u; }
uint own_row(uint e) { return coopmat_lane() / 16u + 2u * e; }
uint own_column() { return coopmat_lane() % 16u; }
void coopmat_barrier() { barrier(); }
uint size(f16vec4 v) { return 4u; }
uint size(uvec4 v) { return 8u; }
float element(f16vec4 v, uint i) { return float(v[i & 3u]); }
float element(uvec4 v, uint i) { return float(unpackFloat2x16(v[i >> 1 & 3u])[i & 1u]); }
// Loops whose ends a compiler does not know, so that it leaves them loops: it is quicker with them.
#define END(n) (n + pvr_param(15u))
#define coopmat_load_a(m, from, at, stride) \\
    for (uint e_ = 0u; e_ < END(128u); e_++) \\
        m.v[e_] = element(from[(at) + own_row(e_ / 16u) * (stride) + e_ % 16u / size(from[0])], \\
                          e_ % 16u)
#define coopmat_load_b(m, from, at, stride) \\
    for (uint k_ = 0u; k_ < END(16u); k_++) \\
        m.v[k_] = element(from[(at) + own_column() * (stride) + k_ / size(from[0])], k_)
#define coopmat_load_b_rows(m, from, at, stride) \\
    for (uint k_ = 0u; k_ < 16u; k_++) \\
        m.v[k_] = float(from[(at) + k_ * (stride) + own_column() / 4u][own_column() & 3u])
#define coopmat_multiply(a, b, sum) \\
    for (uint e_ = 0u; e_ < END(8u); e_++) \\
        for (uint k_ = 0u; k_ < 16u; k_++) \\
            sum.v[e_] += a.v[e_ * 16u + k_] * b.v[k_]
#define coopmat_load_sum(m, from, at, stride) \\
    for (uint e_ = 0u; e_ < 8u; e_++) \\
        m.v[e_] = from[(at) + own_row(e_) * (stride) + own_column()]
#define coopmat_add(a, sum) \\
    for (uint e_ = 0u; e_ < 8u; e_++) \\
        sum.v[e_] += a.v[e_]
#define coopmat_store(m, to, at, stride) \\
    for (uint e_ = 0u; e_ < 8u; e_++) \\
        to[(at) + own_row(e_) * (stride) + own_column()] = m.v[e_]
"""
# Less than the kernels take: the emulation of 64 x 64 a subgroup takes a compiler minutes.
TILES = [
    CoopmatTile(64, 32, 32, 32, 32, 2),
    CoopmatTile(32, 64, 32, 64, 32, 1),
    CoopmatTile(64, 64, 32, 32, 64, 1),
    CoopmatTile(128, 32, 64, 32, 32, 2),
    CoopmatTile(32, 64, 32, 32, 32, 1),
]


@pytest.fixture
def emulated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Runner]:
    """The GPU with kernels whose matrices are emulated."""
    for folder in ("include", "matmul"):
        shutil.copytree(ROOT / "kernels" / folder, tmp_path / "kernels" / folder)
    (tmp_path / "kernels" / "include" / "coopmat.glsl").write_text(EMULATED)
    variants = tuple(
        coopmat(fmt, tile) for fmt in FMTS for tile in (TILES if fmt == "q4" else TILES[2:])
    )
    contract = replace(kernels.op("matmul"), variants=variants)
    entries = build_spirv.build_op(tmp_path, tmp_path, contract)
    samples()  # kept from now on: of the kernels as they are
    monkeypatch.setattr(kernels, "artifacts", lambda: tmp_path)
    monkeypatch.setattr(kernels, "manifest", lambda: {"matmul": entries})
    monkeypatch.setattr(kernels, "op", lambda name: contract)
    backend = VulkanBackend(allow_software=True, deadline_s=300.0)  # it compiles as it submits
    backend.info = replace(backend.info, features=backend.info.features | {"coopmat"})
    yield Runner(backend)
    backend.close()


@pytest.mark.gpu
@pytest.mark.long
def test_tiles(emulated: Runner) -> None:
    for variant in kernels.op("matmul").variants:
        fmt = variant.name.partition("_")[0]
        product(emulated, "matmul", fmt, 100, 96, 70, variant=variant.name)
        more = {"chunk": 50, "accumulate": 1, "y0": 64, "ldy": 160}
        product(emulated, "matmul", fmt, 70, 32, 40, variant=variant.name, **more)


def test_what_they_ask_for() -> None:
    wanted = {"Shader", "Float16", "GroupNonUniform", "VulkanMemoryModel", "CooperativeMatrixKHR"}
    for variant in kernels.op("matmul").variants:
        if "coopmat" in variant.needs:
            entry = kernels.manifest()["matmul"][variant.name]
            assert set(entry["capabilities"]) == wanted
            assert entry["extensions"] == ["SPV_KHR_cooperative_matrix"]
            assert entry["shared_bytes"] <= 48 << 10
