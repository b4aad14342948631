# SPDX-License-Identifier: Apache-2.0
"""Would a compute shader run on a device? Says in words what would not, and why.

    python -m engine.shader FILE.comp [--profile NAME] [--json] [-D NAME[=VALUE]]… [-I FOLDER]…

Compiles GLSL as the build does and holds the SPIR-V against a profile (engine.backends.profiles)
with the same gate that guards pipelines. Exit status 0: it would run; 5: it would not, or is no
shader; 2: wrong usage; 1: there is no compiler. Nothing is run, so no Vulkan is needed.
"""

from __future__ import annotations

import argparse
import functools
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import kernels
from engine import shader_flow
from engine.backends import gate, profiles
from engine.backends.profiles import Profile
from kernels import build_spirv, spirv

DEFAULT_PROFILE = "bxs-4-64"
OK, FAILED, USAGE, WOULD_NOT_RUN = 0, 1, 2, 5
_COMPILER_S = 60  # a shader takes milliseconds
# What kernels/include/pvr.glsl wants to be told; other shaders do not look at it.
_WORKGROUP = {"PVR_WG_X": "32", "PVR_WG_Y": "1", "PVR_WG_Z": "1"}
_INCLUDES = Path(kernels.__file__).with_name("include")

_WORDS = {
    "fp16": "16-bit floats in arithmetic",
    "fp64": "64-bit floats",
    "int8": "8-bit integers (a driver that lacks them may never return from compiling them)",
    "int16": "16-bit integers",
    "int64": "64-bit integers",
    "storage8": "8-bit values in storage buffers",
    "storage16": "16-bit values in storage buffers",
    "memory_model": "the Vulkan memory model",
    "int_dot": "integer dot products",
    "coopmat": "matrices that a subgroup multiplies together, which no PowerVR has",
    "buffer_address": "addresses of buffers",
    "subgroup_basic": "subgroups",
    "subgroup_vote": "subgroup votes",
    "subgroup_arithmetic": "reductions over a subgroup (shared memory does them everywhere)",
    "subgroup_ballot": "subgroup ballots",
    "subgroup_shuffle": "subgroup shuffles",
    "subgroup_shuffle_relative": "relative subgroup shuffles",
    "subgroup_clustered": "reductions over clusters of a subgroup",
    "subgroup_quad": "subgroup quads",
}
MAX_SOURCE = 16 << 20  # bytes
_VENDOR = {"CooperativeMatrixNV", "CooperativeVectorNV"}


class NoCompiler(Exception):
    """glslangValidator is not installed; the text says how to get it."""


class BadShader(Exception):
    """The file is no compute shader; the text is the compiler's."""


@dataclass(frozen=True)
class Remark:
    """`what` is one word for programs, `why` a sentence for people; `line` 0: unknown."""

    what: str
    why: str
    line: int = 0


@dataclass
class Report:
    """What a shader asks for, what of it the profile lacks, and what to look at."""

    file: str
    profile: str
    problems: list[Remark] = field(default_factory=list)
    notes: list[Remark] = field(default_factory=list)
    asks: dict[str, Any] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        return not self.problems


def compile_glsl(file: Path, defines: Sequence[str] = (), folders: Sequence[Path] = ()) -> bytes:
    """SPIR-V of a compute shader, with the lines of its source.

    Raises:
        NoCompiler, BadShader
    """
    try:
        path, env = build_spirv.tool("glslangValidator")
    except SystemExit as e:
        raise NoCompiler(str(e)) from None
    try:
        with file.open("rb") as f:
            data = f.read(MAX_SOURCE + 1)
        if len(data) > MAX_SOURCE:
            raise BadShader(f"It has more than {MAX_SOURCE >> 20} MiB.")
        source = data.decode("utf-8").replace("\r\n", "\n").replace("\r", "\n")
    except UnicodeDecodeError:
        raise BadShader("It is no text.") from None
    # Includes are an extension that older compilers have no option for.
    directive = "#extension GL_GOOGLE_include_directive : require"
    source = re.sub(
        r"^([ \t]*#[ \t]*version\b.*)$", rf"\1\n{directive}\n#line 2", source, count=1, flags=re.M
    )
    source = _count_lines(source)
    given = {**_WORKGROUP, **dict(d.partition("=")[::2] for d in defines)}
    with tempfile.TemporaryDirectory(prefix="pvrd-shader-") as folder:
        whole, out, limits = (Path(folder, f"shader.{end}") for end in ("comp", "spv", "conf"))
        whole.write_text(source, "utf-8")
        limits.write_text(_limits(path, env), "utf-8")
        command = [
            path,
            "-g",
            "--target-env",
            build_spirv.TARGET,
            "--quiet",
            "-S",
            "comp",
        ]
        command += [f"-I{p}" for p in (file.parent, *folders, _INCLUDES) if p.is_dir()]
        command += [f"-D{k}={v}" if v else f"-D{k}" for k, v in given.items()]
        command += ["-o", str(out), str(whole), str(limits)]
        try:
            done = subprocess.run(
                command,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                timeout=_COMPILER_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise BadShader(f"The compiler did not end within {_COMPILER_S} s.") from None
        if done.returncode or not out.is_file():
            raise BadShader(_said(done.stdout, str(whole), file))
        return out.read_bytes()


@functools.cache
def _own_limits(path: str, libraries: str) -> str:
    env = {"LD_LIBRARY_PATH": libraries} if libraries else {}
    done = subprocess.run([path, "-c"], env=env, capture_output=True, text=True, check=False)
    return re.sub(r"(MaxComputeWorkGroup(?:Size|Count)[XYZ]) \d+", r"\1 1048576", done.stdout)


def _limits(path: str, env: Mapping[str, str]) -> str:
    """The compiler's own limits without those of the workgroup, which are the profile's matter."""
    return _own_limits(path, env.get("LD_LIBRARY_PATH", ""))


def _count_lines(source: str) -> str:
    """Has the lines behind `#version` counted as they are in the file."""
    before, mark, after = source.partition("\n#line 2\n")
    if not mark:
        return source
    lines = before.count("\n")  # those before #version, and the directive
    return f"{before}\n#line {lines + 1}\n{after}"


def _said(text: str, temporary: str, file: Path) -> str:
    """The compiler's own words, with the name of the file that it was given."""
    lines = [line.replace(temporary, file.name) for line in text.splitlines()]
    wanted = [
        line for line in lines if line.startswith("ERROR:") and "compilation terminated" not in line
    ]
    kept = [line for line in wanted if "compilation errors" not in line] or lines
    return "\n".join(kept[:20]).strip() or "The compiler gave no reason."


def examine(code: bytes, profile: Profile, report: Report) -> None:
    """Adds what a SPIR-V module asks for and what a profile lacks to a report.

    Raises:
        BadShader: it cannot be read.
    """
    try:
        module = spirv.read(code)
        loops, indexed = shader_flow.read(code)
    except (ValueError, KeyError, IndexError) as e:
        raise BadShader(f"Its SPIR-V cannot be read ({e}).") from None
    entry = {
        "capabilities": module.capabilities,
        "extensions": module.extensions,
        "needs": (),
        "workgroup": module.workgroup,
        "shared_bytes": module.shared_bytes,
        "bindings": module.storage_count,
        "push_bytes": module.push_bytes,
    }
    report.asks |= {
        **entry,
        "workgroup": list(module.workgroup),
        "barrier": module.barrier,
        "uniform_buffers": len(module.uniform),
        "images": module.images,
        "loops": [asdict(loop) for loop in loops],
    }
    del report.asks["needs"]
    limits = profile.alone()
    for what, why in gate.misfits(entry, limits, profile.features):
        report.problems.append(_in_words(what, why))
    for line in indexed:
        why = (
            "a buffer of an array is chosen by a number that is not known at compile time; Mesa's"
            " PowerVR driver cannot do that"
        )
        report.problems.append(Remark("bindings", why, line))
    for loop in loops:
        if loop.rank == shader_flow.DATA:
            why = (
                "nothing known before the dispatch ends this loop: it may run for as long as what"
                " it reads says, and the GPU is everybody's; bound it by a constant or by a push"
                " constant"
            )
            report.problems.append(Remark("loop", why, loop.line))
        elif loop.rank == shader_flow.LAUNCH and loop.innermost:
            why = (
                "an inner loop without a bound at compile time is not unrolled; the host must see"
                " to it that it ends"
            )
            report.notes.append(Remark("loop", why, loop.line))
    x, y, z = module.workgroup
    if module.barrier and x * y * z > build_spirv.BASELINE_WITH_BARRIER:
        why = (
            f"a barrier in a workgroup of {x * y * z}: PowerVR has fewer registers then, and spills"
            f" sooner; {build_spirv.BASELINE_WITH_BARRIER} invocations have all of them"
        )
        report.notes.append(Remark("workgroup", why))
    if module.images:
        report.notes.append(Remark("images", "images and samplers are not looked at"))
    if max(module.storage, default=0) > 0 and module.storage_count > build_spirv.BASELINE_STORAGE:
        why = f"{module.storage_count} storage buffers; older PowerVR drivers have four a stage"
        report.notes.append(Remark("bindings", why))


def _in_words(what: str, why: str) -> Remark:
    name = why.removeprefix("it needs the SPIR-V capability ").partition(",")[0]
    if name in _VENDOR:
        why = f"{name} is a vendor's matrix unit, which no PowerVR has; use plain loops over tiles"
        return Remark("cooperative_matrix", why)
    feature = why.removeprefix("it needs ")
    if feature in _WORDS:
        what = "cooperative_matrix" if feature == "coopmat" else what
        return Remark(what, f"it needs {_WORDS[feature]}: the feature {feature}")
    return Remark(what, why)


def check(
    file: Path,
    profile: Profile,
    defines: Sequence[str] = (),
    folders: Sequence[Path] = (),
) -> Report:
    """Compiles a shader and holds it against a profile.

    Raises:
        NoCompiler, BadShader
        OSError: the file cannot be read.
    """
    report = Report(str(file), profile.name)
    examine(compile_glsl(file, defines, folders), profile, report)
    return report


def text(report: Report, profile: Profile) -> str:
    """The report for people."""
    verdict = "would run" if report.ok else "would not run"
    lines = [f"{report.file}: {verdict} on {profile.name} ({profile.about})."]
    for title, remarks in (("Why not:", report.problems), ("Worth knowing:", report.notes)):
        if remarks:
            lines.append(title)
        for remark in remarks:
            where = f"line {remark.line}: " if remark.line else ""
            lines.append(f"  {where}{remark.why}.")
    a = report.asks
    x, y, z = a["workgroup"]
    lines.append(
        f"It asks for workgroups of {x}x{y}x{z}, {a['shared_bytes']} bytes of shared memory,"
        f" {a['bindings']} storage buffers, {a['push_bytes']} bytes of push constants."
    )
    return "\n".join(lines) + "\n"


def _arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="engine.shader", allow_abbrev=False)
    parser.add_argument("file", type=Path)
    parser.add_argument("--profile", choices=profiles.names(), default=DEFAULT_PROFILE)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("-D", dest="defines", action="append", default=[])
    parser.add_argument("-I", dest="folders", action="append", type=Path, default=[])
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> int:
    """The command line above."""
    args = _arguments(argv)
    profile = profiles.load(args.profile)
    try:
        report = check(args.file, profile, args.defines, args.folders)
    except NoCompiler as e:
        print(e, file=sys.stderr)
        return FAILED
    except BadShader as e:
        print(f"{args.file} does not compile.\n{e}", file=sys.stderr)
        return WOULD_NOT_RUN
    except OSError as e:
        print(f"{args.file} cannot be read: {e.strerror}.", file=sys.stderr)
        return WOULD_NOT_RUN
    if args.json:
        print(json.dumps({"ok": report.ok, **asdict(report)}, ensure_ascii=False))
    else:
        sys.stdout.write(text(report, profile))
    return OK if report.ok else WOULD_NOT_RUN


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
