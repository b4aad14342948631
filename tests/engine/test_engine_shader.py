# SPDX-License-Identifier: Apache-2.0
"""`engine.shader` and `pvrctl shader check`: each thing that would not run, in words."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from engine import shader, shader_flow
from engine.backends import profiles
from engine.shader import BadShader, NoCompiler, Report, check
from pvrd.ctl.main import main

ROOT = Path(__file__).resolve().parent.parent.parent

HEAD = """#version 450
// A comment, so that lines are counted behind it.
layout(local_size_x = {x}, local_size_y = {y}, local_size_z = {z}) in;
{extra}
layout(push_constant) uniform Push {{ uint n; uint more[{push}]; }} push;
layout(std430, binding = 1) buffer A {{ uint a[]; }};
"""
BODY = """void main() {{
    uint i = gl_GlobalInvocationID.x;
    uint sum = 0u;
    {code}
    a[i] = sum;
}}
"""
CODE_LINE = HEAD.count("\n") + 4  # of the first line of `code`, where `extra` has one line


def write(path: Path, code: str = "", extra: str = "", push: int = 1, **size: int) -> Path:
    text = HEAD.format(**{"x": 32, "y": 1, "z": 1, **size}, extra=extra, push=push)
    path.write_text(text + BODY.format(code=code))
    return path


@pytest.fixture
def report(tmp_path: Path) -> Any:
    """Checks a shader made of parts against a profile."""

    def made(code: str = "", extra: str = "", profile: str = "bxs-4-64", **more: int) -> Report:
        return check(write(tmp_path / "t.comp", code, extra, **more), profiles.load(profile))

    return made


def problems(report: Report) -> list[tuple[str, int]]:
    return [(r.what, r.line) for r in report.problems]


def test_a_plain_shader_would_run(report: Any) -> None:
    found = report("for (uint k = 0u; k < 8u; k++) sum += a[k];")
    assert found.ok
    assert not found.notes
    assert found.asks["workgroup"] == [32, 1, 1]
    assert found.asks["bindings"] == 1
    assert found.asks["push_bytes"] == 8
    assert found.asks["capabilities"] == ["Shader"]
    assert "t.comp: would run on bxs-4-64 (PowerVR" in shader.text(found, profiles.load("bxs-4-64"))


TYPES = "#extension GL_EXT_shader_explicit_arithmetic_types : require"
COOPERATIVE = (
    "#extension GL_NV_cooperative_matrix : require\n"
    "#extension GL_KHR_memory_scope_semantics : require\n" + TYPES
)


@pytest.mark.parametrize(
    ("code", "extra", "feature"),
    [
        ("int8_t b = int8_t(i); sum += uint(b * b);", TYPES, "int8"),
        ("int16_t b = int16_t(i); sum += uint(b * b);", TYPES, "int16"),
        ("uint64_t b = uint64_t(i); sum += uint(b * b);", TYPES, "int64"),
        ("float16_t b = float16_t(i); sum += uint(b * b);", TYPES, "fp16"),
        ("double b = double(i); sum += uint(b * b);", "", "fp64"),
        (
            "sum = subgroupQuadSwapHorizontal(i);",
            "#extension GL_KHR_shader_subgroup_quad : require",
            "subgroup_quad",
        ),
    ],
)
def test_capabilities(report: Any, code: str, extra: str, feature: str) -> None:
    found = report(code, extra)
    assert ("capability", 0) in problems(found)
    assert any(r.why.endswith(f": the feature {feature}") for r in found.problems)


def test_subgroups_are_a_matter_of_the_profile(report: Any) -> None:
    code, extra = "sum = subgroupAdd(i);", "#extension GL_KHR_shader_subgroup_arithmetic : require"
    assert report(code, extra).ok
    found = report(code, extra, profile="old")
    assert problems(found) == [("capability", 0)]
    assert "reductions over a subgroup (shared memory does" in found.problems[0].why


def test_a_vendors_cooperative_matrix(report: Any) -> None:
    code = "fcoopmatNV<16, gl_ScopeSubgroup, 8, 8> m = fcoopmatNV<16, gl_ScopeSubgroup, 8, 8>(1.0);"
    found = report(code + " sum = uint(m[0]);", COOPERATIVE)
    assert ("cooperative_matrix", 0) in problems(found)
    assert "vendor's matrix unit, which no PowerVR has" in str(found.problems)


def test_khronos_cooperative_matrix(report: Any) -> None:
    code = (
        "coopmat<float, gl_ScopeSubgroup, 8, 8, gl_MatrixUseA> m;"
        "m = coopmat<float, gl_ScopeSubgroup, 8, 8, gl_MatrixUseA>(1.0); sum = uint(m[0]);"
    )
    found = report(code, COOPERATIVE.replace("_NV_", "_KHR_"))
    (why,) = [r.why for r in found.problems if r.what == "cooperative_matrix"]
    assert "no PowerVR has: the feature coopmat" in why


@pytest.mark.parametrize(
    ("size", "profile", "why"),
    [
        ({"x": 256}, "bxs-4-64", "256 invocations a workgroup, 128 allowed"),
        ({"x": 1, "z": 128}, "bxs-4-64", "a workgroup of 1x1x128, 128x128x64 allowed"),
        ({"x": 2048}, "phone", "2048 invocations a workgroup, 1024 allowed"),
        ({"push": 40}, "bxs-4-64", "164 bytes of push constants, 128 allowed"),
    ],
)
def test_sizes(report: Any, size: dict[str, int], profile: str, why: str) -> None:
    found = report(profile=profile, **size)
    assert why in [r.why for r in found.problems]
    if "x" in size:
        assert "workgroup" in [r.what for r in found.problems]


def test_shared_memory_and_barriers(report: Any) -> None:
    code = "s[gl_LocalInvocationID.x] = i; barrier(); sum = s[0];"
    assert "16388 bytes shared, 16384 allowed" in str(report(code, "shared uint s[4097];").problems)
    assert report(code, "shared uint s[4097];", profile="phone").ok
    found = report(code, "shared uint s[64];", x=64)
    assert found.ok
    assert "a barrier in a workgroup of 64" in found.notes[0].why


def test_storage_buffers(report: Any) -> None:
    one = "layout(std430, binding = {0}) buffer B{0} {{ uint b{0}; }};"
    five = " ".join(one.format(i) for i in range(2, 6))
    code = "sum = b2 + b3 + b4 + b5;"
    found = report(code, five)
    assert found.ok
    assert "older PowerVR drivers have four" in found.notes[0].why
    found = report(code, five, profile="old")
    assert [r.why for r in found.problems] == ["5 storage buffers, 4 allowed"]
    array = "layout(std430, binding = 2) buffer B { uint b; } bs[12];"
    assert "13 storage buffers, 12 allowed" in str(report("sum = bs[3].b;", array).problems)
    found = report("sum = bs[i % 3].b;", array.replace("12", "3"))
    assert problems(found) == [("bindings", CODE_LINE)]
    assert "not known at compile time" in found.problems[0].why


FUNCTIONS = "uint limit(uint of) { return of / 2u + 1u; } void step(inout uint k) { k += 2u; }"
DATA, LAUNCH, CONSTANT = shader_flow.DATA, shader_flow.LAUNCH, shader_flow.CONSTANT


@pytest.mark.parametrize(
    ("code", "rank"),
    [
        ("for (uint k = 0u; k < 8u; k++) sum += k;", CONSTANT),
        ("for (uint k = i; k < 8u; k += 32u) sum += k;", CONSTANT),
        ("for (int k = 7; k >= 0; k--) sum += uint(k);", CONSTANT),
        ("for (uint k = 8u; k != 0u; k >>= 1) sum += k;", CONSTANT),
        ("for (uint k = 0u; k < uint(SPEC); k++) sum += k;", CONSTANT),
        ("for (float f = 0.0; f < 1.0; f += 0.25) sum += uint(f);", CONSTANT),
        ("uint k = 0u; do { sum += a[k]; k++; } while (k < 9u && a[k] != 0u);", CONSTANT),
        ("uint k = 0u; for (;;) { if (k++ > 10u) break; if (a[k] == 1u) continue; }", CONSTANT),
        ("uint k = 0u; while (!(k >= 9u)) { k++; }", CONSTANT),
        ("for (uint k = 0u; k < min(a[0], 64u); k++) sum += k;", CONSTANT),
        ("for (uint k = 0u; k < clamp(a[0], 1u, push.n); k++) sum += k;", LAUNCH),
        ("for (uint k = a[0] & 63u; k > 0u; k--) sum += k;", CONSTANT),
        ("for (uint k = 0u; k < max(a[0], 64u); k++) sum += k;", DATA),
        ("for (uint k = 0u; k < push.n; k++) sum += k;", LAUNCH),
        ("for (uint k = 0u; k < limit(push.n); k++) sum += k;", LAUNCH),
        ("for (uint k = push.n; k > 0u; k--) sum += k;", LAUNCH),
        ("for (uint k = 0u; k < push.n; step(k)) sum += k;", LAUNCH),
        ("uint lo = 0u, hi = push.n; while (lo < hi) { uint m = (lo + hi) / 2u;"
         " if (a[m] < 5u) lo = m + 1u; else hi = m; }", LAUNCH),
        ("for (uint k = 0u; k < a[0]; k++) sum += k;", DATA),
        ("for (uint k = a[1]; k > 0u; k--) sum += k;", DATA),
        ("for (uint k = 0u; k < limit(a[2]); k++) sum += k;", DATA),
        ("uint k = 0u; while (k < 9u) { k = a[k]; }", DATA),
        ("uint k = 0u; while (k < 9u || a[k] != 0u) { k++; }", DATA),
        ("while (a[i] != 0u) { sum++; }", DATA),
        ("while (push.n > 0u) { sum++; }", DATA),
        ("for (;;) { sum++; if (atomicAdd(a[0], 1u) > 5u) break; }", DATA),
    ],
)  # fmt: skip
def test_loops(report: Any, code: str, rank: int) -> None:
    found = report(code, "layout(constant_id = 0) const int SPEC = 3; " + FUNCTIONS)
    assert [loop["rank"] for loop in found.asks["loops"]] == [rank]
    loops = [(r.what, r.line) for r in (found.problems if rank == DATA else found.notes)]
    assert loops == ([] if rank == CONSTANT else [("loop", CODE_LINE)])
    assert found.ok == (rank < DATA)


def test_an_inner_loop_with_a_bound_needs_no_remark(report: Any) -> None:
    inner = "for (uint j = 0u; j < 4u; j++) sum += a[k + j];"
    found = report(f"for (uint k = 0u; k < push.n; k++) {inner}")
    assert found.ok
    assert not found.notes


@pytest.mark.parametrize(
    ("op", "macro"), [("matvec", "FMT_Q4"), ("topk", "_"), ("conv3x3", "OC=8"), ("rmsnorm", "_")]
)
def test_the_kernels_would_run(op: str, macro: str) -> None:
    code = shader.compile_glsl(ROOT / "kernels" / op / "op.comp", [macro])
    for name in profiles.names():
        found = Report(op, name)
        shader.examine(code, profiles.load(name), found)
        assert found.ok, found.problems


def test_no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [])
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(NoCompiler, match="glslangValidator is missing"):
        check(write(tmp_path / "t.comp"), profiles.load("old"))
    assert shader.main([str(tmp_path / "t.comp")]) == 1


def test_what_is_no_shader(tmp_path: Path) -> None:
    for text in (b"", b"no shader", b"\xff\xfe", b"#version 450\nvoid main() { x = 1; }\n"):
        (tmp_path / "t.comp").write_bytes(text)
        with pytest.raises(BadShader):
            check(tmp_path / "t.comp", profiles.load("old"))
    with pytest.raises(BadShader, match=r"t\.comp:2: 'x' : undeclared"):
        check(tmp_path / "t.comp", profiles.load("old"))
    with pytest.raises(BadShader, match="more than 16 MiB"):
        check(Path("/dev/zero"), profiles.load("old"))
    with pytest.raises(ValueError, match="SPIR-V"):
        shader_flow.read(b"abc")


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "engine.shader", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def test_the_program(tmp_path: Path) -> None:
    good, bad = write(tmp_path / "good.comp"), write(tmp_path / "bad.comp", x=512)
    done = run(str(good))
    assert (done.returncode, done.stderr) == (0, "")
    done = run(str(bad), "--json", "--profile", "phone")
    assert done.returncode == 0
    assert json.loads(done.stdout)["ok"] is True
    done = run(str(bad), "--json")
    assert done.returncode == 5
    made = json.loads(done.stdout)
    assert made["profile"] == "bxs-4-64"
    assert made["problems"][0]["what"] == "workgroup"
    assert run(str(tmp_path / "none.comp")).returncode == 5
    assert run(str(good), "--profile", "voodoo").returncode == 2


def test_pvrctl(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    good, bad = write(tmp_path / "good.comp"), write(tmp_path / "bad.comp", x=512)
    assert main(["shader", "check", str(good), "--profile", "axe-1-16m"]) == 0
    assert "would run on axe-1-16m" in capfd.readouterr().out
    assert main(["shader", "check", str(bad)]) == 5
    out, err = capfd.readouterr()
    assert "bad.comp: would not run on bxs-4-64" in out
    assert "512 invocations a workgroup, 128 allowed." in out
    assert err == ""
    assert main(["--json", "shader", "check", str(bad), "-D", "X=1", "-I", str(tmp_path)]) == 5
    assert json.loads(capfd.readouterr().out)["ok"] is False
    assert main(["shader", "check", str(tmp_path / "none.comp"), "--json"]) == 5
    out, err = capfd.readouterr()
    assert json.loads(out)["exit_code"] == 5
    assert "none.comp cannot be read" in err
    assert main(["shader", "check", str(good), "--profile", "voodoo"]) == 2
    assert "invalid choice: 'voodoo'" in capfd.readouterr().err
    assert main(["shader"]) == 2


def test_pvrctl_imports_nothing_of_the_engine() -> None:
    code = (
        "import sys, pvrd.ctl.shader\n"
        "print([m for m in sys.modules if m.partition('.')[0] in ('engine', 'kernels', 'numpy')])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == "[]\n"
