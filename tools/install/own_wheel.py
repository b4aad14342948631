# SPDX-License-Identifier: Apache-2.0
"""Builds the project's own wheel with this Python's meson and the system's tools, without network.

    own_wheel.py OUT [--jobs N] [--verbose]

Run in the project's folder; OUT is emptied and gets the wheel. With --verbose each command is
shown, as builds of packages want it; else only those of a build that fails are.

For `make install VENV=0` and packages: distributions have meson long before they have a new
meson-python.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
import tomllib
import zipfile
from pathlib import Path

SITE = "/site"  # where meson installs to, below a staging folder


def meson(*arguments: str | Path, shown: bool = False) -> None:
    """Runs meson; `shown`: its output goes where this program's does.

    Raises:
        SystemExit: it is not there or fails; its output says why.
    """
    command = [sys.executable, "-m", "mesonbuild.mesonmain", *map(str, arguments)]
    done = subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        stdout=None if shown else subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(
            f"{done.stdout or ''}\npvrd: the build with {sys.executable} failed. "
            "VENV=0 needs of the system, by Debian's names: "
            "meson, ninja-build, gcc, python3-numpy, glslang-tools, spirv-tools."
        )


def member(name: str) -> zipfile.ZipInfo:
    """A file of the wheel; its time is SOURCE_DATE_EPOCH, else 1980, in every build."""
    epoch = max(int(os.environ.get("SOURCE_DATE_EPOCH", "0")), 315532800)
    info = zipfile.ZipInfo(name, time.gmtime(epoch)[:6])
    info.external_attr = 0o644 << 16
    return info


def main() -> int:
    parser = argparse.ArgumentParser(description="Builds the project's own wheel.")
    parser.add_argument("out", type=Path)
    parser.add_argument("--jobs", type=int, default=0, help="at a time; 0: one for each CPU")
    parser.add_argument("--verbose", action="store_true", help="show each command")
    args = parser.parse_args()
    out = args.out.resolve()
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    build, stage = out / "build", out / "stage"
    native = out / "native.ini"
    # The Python that builds is the one that will run it, whatever comes first in PATH.
    native.write_text(f"[binaries]\npython = {sys.executable!r}\npython3 = {sys.executable!r}\n")
    meson(
        "setup",
        "--native-file",
        native,
        "--prefix",
        "/usr",
        f"-Dpython.purelibdir={SITE}",
        f"-Dpython.platlibdir={SITE}",
        build,
        shown=args.verbose,
    )
    more = ["--verbose"] if args.verbose else []
    meson("compile", "-C", build, "--jobs", str(args.jobs), *more, shown=args.verbose)
    meson("install", "-C", build, "--no-rebuild", "--destdir", stage)

    project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
    name, version = project["name"], project["version"]
    info = f"{name}-{version}.dist-info"
    scripts = "".join(f"{key} = {value}\n" for key, value in project["scripts"].items())
    with zipfile.ZipFile(out / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        for path in sorted((stage / SITE.lstrip("/")).rglob("*")):
            if path.is_file() and "__pycache__" not in path.parts:
                where = path.relative_to(stage / SITE.lstrip("/")).as_posix()
                wheel.writestr(member(where), path.read_bytes())
        metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        wheel.writestr(member(f"{info}/METADATA"), metadata)
        wheel.writestr(member(f"{info}/entry_points.txt"), f"[console_scripts]\n{scripts}")
    for folder in (build, stage):
        shutil.rmtree(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
