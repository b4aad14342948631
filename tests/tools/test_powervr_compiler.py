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

HEAD = """#version 450
#extension GL_EXT_shader_explicit_arithmetic_types_int8 : require
layout(local_size_x = {threads}) in;
layout(set = 0, binding = 0) uniform P {{ uint n; }};
layout(set = 0, binding = 1) buffer A {{ float a[]; }};
shared float t[128];
void main() {{
    uint o = gl_GlobalInvocationID.x;
"""
INT8 = HEAD + "    int8_t x = int8_t(a[o]);\n    a[o] = float(int(x * int8_t(3)));\n}}\n"


def many_values(count: int) -> str:
    """A shader with `count` values alive over a barrier."""
    lines = [f"    float v{i} = a[o + {i}u * n];" for i in range(count)]
    lines += ["    t[gl_LocalInvocationID.x] = v0;", "    barrier();", "    v1 += t[0];"]
    lines += [f"    a[o + {count + i}u * n] = v{i} * v{(i + 1) % count};" for i in range(count)]
    return HEAD + "\n".join(lines) + "\n}}\n"


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


def compile_glsl(source: str, threads: int, folder: Path) -> Path:
    program, env = tool("glslangValidator")
    (folder / "x.comp").write_text(source.format(threads=threads))
    args = ["--target-env", "vulkan1.2", "--quiet", "-S", "comp", "-o", "x.spv", "x.comp"]
    subprocess.run([program, *args], env=env, cwd=folder, check=True)
    return folder / "x.spv"


@pytest.mark.parametrize("core", list(probe.CORES))
def test_driver_says_what_the_profile_says(root: Path, core: str) -> None:
    made = profile.make(core, probe.info(root, core))
    assert profile.differences(profile.kept(core), made) == []


def test_registers_are_fewer_in_large_workgroups(root: Path, tmp_path: Path) -> None:
    small = compile_glsl(many_values(24), 32, tmp_path)
    got = probe.pipeline(root, "axe-1-16m", small, 1, 0)
    assert got.statistics["Spill count"] == 0
    large = compile_glsl(many_values(24), 128, tmp_path)
    got = probe.pipeline(root, "axe-1-16m", large, 1, 0)
    assert got.statistics["Temp count"] == 24
    assert got.statistics["Spill count"] > 0
    assert probe.pipeline(root, "bxm-4-64", large, 1, 0).statistics["Spill count"] == 0


def test_compiler_that_never_returns(root: Path, tmp_path: Path) -> None:
    spirv = compile_glsl(INT8, 32, tmp_path)
    assert probe.pipeline(root, "bxs-4-64", spirv, 1, 0, deadline=15).state == "hung"


def test_what_is_no_spirv_does_not_get_through(root: Path, tmp_path: Path) -> None:
    (tmp_path / "x.spv").write_bytes(b"no SPIR-V at all")
    got = probe.pipeline(root, "bxs-4-64", tmp_path / "x.spv", 1, 0)
    assert got.state in ("refused", "aborted")
