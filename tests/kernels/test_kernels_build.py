# SPDX-License-Identifier: Apache-2.0
"""What the build knows of operations and SPIR-V, and what it refuses."""

from __future__ import annotations

import hashlib
import struct
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import kernels
from kernels import build_spirv, discover, spirv
from kernels.contract import Bind, Contract, Variant

ROOT = Path(__file__).resolve().parent.parent.parent

SHADER = """#version 450
#include "pvr.glsl"
layout(push_constant) uniform Push { uint n; float a; } push;
layout(std430, set = 0, binding = 1) readonly buffer X { float x[]; };
layout(std430, set = 0, binding = 2) writeonly buffer Y { float y[]; };
#ifdef SUM
struct Pair { vec2 v; uint n[3]; };
shared Pair part[8];
shared float one;
#endif
void main() {
    uint i = gl_GlobalInvocationID.x;
#ifdef SUM
    if (i < 8u) part[i].v.x = x[i];
    one = 1.0;
    barrier();
#endif
#ifdef WIDE
    double d = double(x[i]);
    if (i < push.n) y[i] = float(d);
#else
    if (i < push.n && i < pvr_n_tokens()) y[i] = x[i] * push.a;
#endif
}
"""

TOY = Contract(
    name="toy",
    bindings=(Bind("x", "r"), Bind("y", "w")),
    push=(("n", "u32"), ("a", "f32")),
    variants=(
        Variant("base", (64, 1, 1)),
        Variant("sum", (8, 2, 2), {"SUM": "1"}, shared=164),
        Variant("wide", (64, 1, 1), {"WIDE": "1"}),
    ),
    groups=lambda push, variant: (push["n"], 1, 1),
    reference=lambda params, buffers, push: None,
)


@pytest.fixture
def toy(tmp_path: Path) -> Path:
    """A project of one operation."""
    folder = tmp_path / "kernels" / "toy"
    folder.mkdir(parents=True)
    (folder / "op.comp").write_text(SHADER)
    (tmp_path / "kernels" / "include").symlink_to(ROOT / "kernels" / "include")
    return tmp_path


def compiled(root: Path, variant: str) -> spirv.Module:
    out = root / f"toy.{variant}.spv"
    build_spirv.compile_variant(root, TOY, TOY.variant(variant), out)
    return spirv.read(out.read_bytes())


def test_what_a_module_asks_for(toy: Path) -> None:
    base = compiled(toy, "base")
    assert base.capabilities == ["Shader"]
    assert base.workgroup == (64, 1, 1)
    assert (base.storage, base.uniform) == ([1, 2], [0])
    assert (base.push_bytes, base.shared_bytes, base.barrier) == (8, 0, False)
    summing = compiled(toy, "sum")
    assert summing.workgroup == (8, 2, 2)
    assert summing.shared_bytes == 8 * (8 + 12) + 4
    assert summing.barrier
    assert compiled(toy, "wide").capabilities == ["Shader", "Float64"]


def test_a_variant_that_the_compiler_is_too_old_for(
    toy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = toy / "kernels" / "toy" / "op.comp"
    newer = "#version 450\n#ifdef SUM\n#extension GL_KHR_magic : require\n#endif\n"
    source.write_text(SHADER.replace("#version 450\n", newer))
    base, summing, _ = TOY.variants
    extra = replace(summing, baseline=False)
    made = build_spirv.build_op(toy, toy, replace(TOY, variants=(base, extra)))
    assert list(made) == ["base"]
    assert (toy / "toy.sum.spv").read_bytes() == b""
    assert "toy.sum is left out" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="GL_KHR_magic"):
        build_spirv.build_op(toy, toy, replace(TOY, variants=(summing,)))


def test_good_variants_pass(toy: Path) -> None:
    for name in ("base", "sum"):
        build_spirv.check(TOY, TOY.variant(name), compiled(toy, name))


@pytest.mark.parametrize(
    ("variant", "module", "why"),
    [
        ({}, {"workgroup": (32, 1, 1)}, "is not op.py's"),
        ({"workgroup": (256, 1, 1)}, {"workgroup": (256, 1, 1)}, "256 invocations"),
        ({}, {"barrier": True}, "64 invocations in a baseline variant, at most 32"),
        ({}, {"storage": [1, 3]}, "contract has bindings 1..2"),
        ({}, {"uniform": [5]}, "only binding 0"),
        ({}, {"push_bytes": 12}, "12 bytes of push constants"),
        ({}, {"shared_bytes": 4}, "4 bytes shared, op.py says 0"),
        ({"shared": 20000}, {"shared_bytes": 20000}, "16 KiB"),
        ({}, {"capabilities": ["Shader", "Int8"]}, "must not need \\['Int8'\\]"),
        ({"needs": frozenset({"fp16"})}, {}, "must not need \\['fp16'\\]"),
    ],
)
def test_what_breaks_the_contract_is_refused(
    variant: dict[str, object], module: dict[str, object], why: str
) -> None:
    good = spirv.Module(["Shader"], [], (64, 1, 1), [1, 2], [0], 8, 0, False)
    build_spirv.check(TOY, TOY.variant("base"), good)
    with pytest.raises(SystemExit, match=why):
        build_spirv.check(
            TOY,
            replace(TOY.variant("base"), **variant),  # type: ignore[arg-type]
            replace(good, **module),  # type: ignore[arg-type]
        )


def test_a_shader_that_does_not_compile_is_named(toy: Path) -> None:
    (toy / "kernels" / "toy" / "op.comp").write_text(SHADER.replace("push.n", "push.m"))
    with pytest.raises(SystemExit, match=r"(?s)glslangValidator .*op\.comp.*push"):
        compiled(toy, "base")


def test_a_missing_tool_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [])
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(SystemExit, match="apt-get install glslang-tools"):
        build_spirv.tool("glslangValidator")


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"not spirv, but long enough",
        struct.pack("<5I", 1, 0, 0, 0, 0),
        struct.pack("<6I", spirv.MAGIC, 0, 0, 0, 0, 9 << 16 | 17),
        struct.pack("<6I", spirv.MAGIC, 0, 0, 0, 0, 0),
    ],
)
def test_what_is_no_spirv(data: bytes) -> None:
    with pytest.raises(ValueError, match="not SPIR-V"):
        spirv.read(data)


def test_the_manifest_is_true_and_every_operation_has_a_baseline() -> None:
    manifest = kernels.manifest()
    assert manifest
    for name, variants in manifest.items():
        contract = kernels.op(name)
        assert list(variants) == [v.name for v in contract.variants]
        assert any(entry["baseline"] for entry in variants.values())
        for variant, entry in variants.items():
            data = (kernels.artifacts() / entry["file"]).read_bytes()
            assert hashlib.sha256(data).hexdigest() == entry["sha256"]
            assert entry["push_bytes"] == contract.push_bytes(contract.variant(variant))


def test_operations_are_found_by_their_folders(tmp_path: Path) -> None:
    found = {line.split()[0]: line.split()[1:] for line in discover.ops(ROOT, [])}
    assert set(kernels.manifest()) <= set(found)
    for name in kernels.manifest():
        has_c, variants = found[name]
        assert has_c == "c"
        assert variants.split(",") == [v.name for v in kernels.op(name).variants]
    assert [line.split()[0] for line in discover.ops(ROOT, ["topk"])] == ["topk"]
    with pytest.raises(SystemExit, match="nonsense"):
        discover.ops(ROOT, ["nonsense"])


def test_only_what_runs_is_installed(tmp_path: Path) -> None:
    for name in ("a.py", "op.c", "pvr.h", "data.pvrm", "__pycache__/a.pyc", ".hidden", "op.comp"):
        path = tmp_path / "kernels" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    assert discover.files(tmp_path, ["kernels"]) == ["kernels/a.py", "kernels/data.pvrm"]


def test_push_constants_by_name() -> None:
    packed = TOY.pack(n=7, a=0.5)
    assert packed == struct.pack("<If", 7, 0.5)
    assert TOY.unpack(packed) == {"n": 7, "a": 0.5}
    with pytest.raises(TypeError, match="takes push constants"):
        TOY.pack(n=7)
    with pytest.raises(KeyError, match="no variant"):
        TOY.variant("none")
