# SPDX-License-Identifier: Apache-2.0
"""The real compiler under qemu, on shaders that are known to be trouble."""

from __future__ import annotations

import resource
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from kernels.build_spirv import tool
from tools.powervr import probe, profile, sysroot

pytestmark = pytest.mark.long

INT8 = "#extension GL_EXT_shader_explicit_arithmetic_types_int8 : require"
# OpSDot of four int8 in a word, for which glslang 13 has no name.
DOT = """#extension GL_EXT_spirv_intrinsics : require
spirv_instruction (
    extensions = ["SPV_KHR_integer_dot_product"], capabilities = [6019, 6018], id = 4450
) int sdot(int x, int y, spirv_literal int packed4x8);"""
SUBGROUPS = """#extension GL_KHR_shader_subgroup_arithmetic : require
#extension GL_KHR_shader_subgroup_shuffle_relative : require
#extension GL_KHR_shader_subgroup_clustered : require"""


def shader(threads: int, body: str, extensions: str = "") -> str:
    """GLSL with a buffer `a`, shared memory `t` and the invocation's number `o`."""
    return f"""#version 450
{extensions}
layout(local_size_x = {threads}) in;
layout(set = 0, binding = 0) uniform P {{ uint n; }};
layout(set = 0, binding = 1) buffer A {{ float a[]; }};
shared float t[128];
void main() {{
    uint o = gl_GlobalInvocationID.x;
    {body}
}}
"""


def many_values(threads: int, count: int) -> str:
    """A shader with `count` values alive over a barrier."""
    lines = [f"float v{i} = a[o + {i}u * n];" for i in range(count)]
    lines += ["t[gl_LocalInvocationID.x] = v0;", "barrier();", "v1 += t[0];"]
    lines += [f"a[o + {count + i}u * n] = v{i} * v{(i + 1) % count};" for i in range(count)]
    return shader(threads, "\n    ".join(lines))


@pytest.fixture(scope="module")
def root() -> Path:
    for program in ("qemu-aarch64-static", "aarch64-linux-gnu-gcc"):
        if shutil.which(program) is None:
            pytest.skip(f"{program} is not installed")
    try:
        return sysroot.prepare()[0]
    except sysroot.SysrootError as e:
        pytest.skip(f"the driver cannot be had here: {e}")


@pytest.fixture(autouse=True)
def no_core_files() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (0, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_CORE, before)


def compile_glsl(source: str, folder: Path) -> Path:
    program, env = tool("glslangValidator")
    (folder / "x.comp").write_text(source)
    args = ["--target-env", "vulkan1.2", "--quiet", "-S", "comp", "-o", "x.spv", "x.comp"]
    subprocess.run([program, *args], env=env, cwd=folder, check=True)
    return folder / "x.spv"


@pytest.mark.parametrize("core", list(probe.CORES))
def test_driver_says_what_the_profile_says(root: Path, core: str) -> None:
    made = profile.make(core, probe.info(root, core))
    assert profile.differences(profile.kept(core), made) == []


def test_registers_are_fewer_in_large_workgroups(root: Path, tmp_path: Path) -> None:
    small = compile_glsl(many_values(32, 24), tmp_path)
    got = probe.pipeline(root, "axe-1-16m", small, 1, 0)
    assert got.statistics["Spill count"] == 0
    large = compile_glsl(many_values(128, 24), tmp_path)
    got = probe.pipeline(root, "axe-1-16m", large, 1, 0)
    assert got.statistics["Temp count"] == 24
    assert got.statistics["Spill count"] > 0
    assert probe.pipeline(root, "bxm-4-64", large, 1, 0).statistics["Spill count"] == 0


def test_compiler_that_never_returns(root: Path, tmp_path: Path) -> None:
    body = "int8_t x = int8_t(a[o]); a[o] = float(int(x * int8_t(3)));"
    spirv = compile_glsl(shader(32, body, INT8), tmp_path)
    assert probe.pipeline(root, "bxs-4-64", spirv, 1, 0, deadline=15).state == "hung"


@pytest.mark.parametrize(
    ("extensions", "body"),
    [
        (DOT, "a[o] = float(sdot(floatBitsToInt(a[o]), floatBitsToInt(a[o + n]), 0));"),
        (SUBGROUPS, "float s = subgroupAdd(a[o]); a[o] = s + subgroupClusteredMax(s, 8u);"),
    ],
)
def test_features_beyond_the_baseline_compile(
    root: Path, tmp_path: Path, extensions: str, body: str
) -> None:
    spirv = compile_glsl(shader(32, body, extensions), tmp_path)
    got = probe.pipeline(root, "axe-1-16m", spirv, 1, 0)
    assert got.state == "ok", got.detail
    assert got.statistics["Spill count"] == 0


def test_compiler_that_aborts(root: Path, tmp_path: Path) -> None:
    # One burst of loads is wider than the registers that 128 invocations leave to each.
    body = "\n    ".join(f"float v{i} = a[o + {i}u];" for i in range(30))
    body += "\n    t[gl_LocalInvocationID.x] = v0; barrier(); v1 += t[0];\n    "
    body += "\n    ".join(f"a[o + {30 + i}u] = v{i} * v{(i + 1) % 30};" for i in range(30))
    spirv = compile_glsl(shader(128, body), tmp_path)
    got = probe.pipeline(root, "axe-1-16m", spirv, 1, 0)
    assert got.state == "aborted"
    assert "spill" in got.detail


def test_what_is_no_spirv_does_not_get_through(root: Path, tmp_path: Path) -> None:
    (tmp_path / "x.spv").write_bytes(b"no SPIR-V at all")
    got = probe.pipeline(root, "bxs-4-64", tmp_path / "x.spv", 1, 0)
    assert got.state in ("refused", "aborted")
