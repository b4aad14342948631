# SPDX-License-Identifier: Apache-2.0
"""The C kernels under GCC's sanitizers:

    python -m tools.sanitize address [PYTEST'S OPTIONS]    memory and undefined behaviour
    python -m tools.sanitize thread [PYTEST'S OPTIONS]     races between the threads of a slice
    python -m tools.sanitize address -m MODULE ...         another program of Python with them
                                                           (-m tests.fuzz pvrm_text --plain)

Builds the kernels into build/address or build/thread (--build FOLDER for another) and runs the
kernels' CPU tests (other tests where they are named) with them, the sanitizer's library preloaded.
Whatever it has to say ends the run with exit status 1 or more.

address: what lies behind a binding is poisoned (tests/kernels/harness.py), so that a read of one
byte too many is found, not only a write. thread: libgomp is not compiled with the sanitizer, which
would take each of its hand-overs for a race; tests/kernels/runtime/gomp.c stands in for it, with
plain threads. Python and numpy are not instrumented either: what they do is not looked at.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
GOMP = ROOT / "tests/kernels/runtime/gomp.c"
MESON = [sys.executable, "-m", "mesonbuild.mesonmain"]
CHECKS = {
    "address": ("address,undefined", ("libasan.so", "libubsan.so")),
    "thread": ("thread", ("libtsan.so",)),
}
PYTEST = ["-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-m", "not gpu and not long"]
KERNELS = ["tests/kernels", "-k", "cpu or team or held"]  # no tests of the build and of shaders
# The interpreter frees what it likes when it ends; it is not what is looked for.
OPTIONS = {
    "ASAN_OPTIONS": "detect_leaks=0:abort_on_error=0:exitcode=66:strict_string_checks=1",
    "UBSAN_OPTIONS": "halt_on_error=1:print_stacktrace=1:exitcode=66",
    "TSAN_OPTIONS": "halt_on_error=1:exitcode=66:report_signal_unsafe=0",
}


def compiler() -> str:
    """GCC: its libraries are preloaded by name."""
    return os.environ.get("CC", "gcc").split()[-1]


def library(name: str) -> str:
    """Where the compiler has one of its own libraries.

    Raises:
        SystemExit: it has not.
    """
    asked = [compiler(), f"-print-file-name={name}"]
    found = subprocess.run(asked, check=True, capture_output=True, text=True).stdout.strip()
    if not Path(found).is_absolute():
        raise SystemExit(f"{compiler()} has no {name}: install it, or set CC to a GCC that has it.")
    return found


def build(kind: str, folder: Path, faster: bool = True) -> None:
    """The kernels without SPIR-V, and for `thread` what stands in for libgomp. Not `faster`: for
    the plainest instruction set alone; how a slice is shared out is the same in all.
    """
    checks = CHECKS[kind][0]
    # Sizes of objects: AddressSanitizer knows them better, and GCC takes minutes over a file.
    flags = "-g1" + (" -fno-sanitize=object-size" if kind == "address" else "")
    options = [f"-Db_sanitize={checks}", "-Db_lundef=false", "-Dspirv=false", "-Dlevel=1"]
    options.append(f"-Dfaster={str(faster).lower()}")
    setup = [*MESON, "setup", *options, f"-Dc_args={flags}", str(folder), str(ROOT)]
    commands = [setup, [*MESON, "compile", "-C", str(folder), "pvrkernels"]]
    known = folder / "set-up-by"
    if known.exists() and known.read_text() == " ".join(setup):
        del commands[0]  # ninja sees what has changed in the sources
    elif (folder / "meson-private").exists():
        shutil.rmtree(folder)
    elif folder.exists() and any(folder.iterdir()):
        raise SystemExit(f"{folder} is no build folder.")
    for command in commands:
        done = subprocess.run(
            command, env={"CC": "gcc", **os.environ}, cwd=ROOT, check=False, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        if done.returncode:
            raise SystemExit(f"{done.stdout[-4000:]}\nThe kernels cannot be built.")
    known.write_text(" ".join(setup))
    if kind == "thread":
        shared = ["-O1", "-g", "-fPIC", "-shared", "-fsanitize=thread", "-Wall", "-Wextra"]
        made = [compiler(), *shared, "-o", str(folder / "gomp.so"), str(GOMP), "-lpthread"]
        subprocess.run(made, check=True)


def environment(kind: str, folder: Path) -> dict[str, str]:
    """For a program that loads these kernels."""
    preload = [library(name) for name in CHECKS[kind][1]]
    if kind == "thread":
        preload.append(str(folder / "gomp.so"))
    return {
        **os.environ,
        **OPTIONS,
        "LD_PRELOAD": ":".join(preload),
        "PVRD_KERNELS": str(folder / "kernels"),
        "OPENBLAS_NUM_THREADS": "1",
        "PYTHONMALLOC": "malloc",
        "CFLAGS": f"-fsanitize={CHECKS[kind][0]}",  # of what tests compile by themselves
    }


def command(arguments: list[str]) -> list[str]:
    """Python with these arguments. Where addresses are spread too widely for the sanitizers, they
    are not spread.
    """
    return ["setarch", platform.machine(), "-R", sys.executable, *arguments]


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tools.sanitize", description="The C kernels under GCC's sanitizers."
    )
    parser.add_argument("kind", choices=sorted(CHECKS))
    parser.add_argument("--build", type=Path, help="the build's folder")
    args, rest = parser.parse_known_args()
    folder = (args.build or ROOT / "build" / args.kind).absolute()
    build(args.kind, folder)
    named = any(Path(option.split("::")[0]).exists() for option in rest)
    tests = [*PYTEST, *([] if named else KERNELS), *rest]
    done = subprocess.run(
        command(rest if rest[:1] == ["-m"] else tests),
        env=environment(args.kind, folder), cwd=ROOT, check=False,
    )  # fmt: skip
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
