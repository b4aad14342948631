# SPDX-License-Identifier: Apache-2.0
"""Lays an installation below /usr into a folder and divides it into packages.

    stage.py DEST --wheels DIR --lists DIR [--vendor DIR] [--lacking NAME,…] [--python FILE]
             [--site-packages PATH] [--units PATH] [--zsh PATH] [--gstreamer PATH] [--split DIR]

DEST gets what `make install PREFIX=/usr VENV=0` puts down, without byte code, and beside it the
Python client and the GStreamer element where the system's Python and GStreamer look.
LISTS/PACKAGE.txt names each package's files, a path of the target a line, PACKAGE.dirs its folders
that are nobody else's. With --split they are moved to SPLIT/PACKAGE/…, as debhelper wants them.

Of the wheels in --vendor those that --lacking names (Python packages that the distribution lacks)
go into /usr/lib/pvrd as pvrd-wheels.
"""

from __future__ import annotations

import argparse
import ast
import os
import platform
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[2]
PRIVATE = "/usr/lib/pvrd"
CLIENT = ("pvrd", "pvrd.client", "pvrd.client_async")
PACKAGES = (
    "pvrd",
    "pvrd-agent",
    "pvrd-http",
    "pvrd-hooks",
    "pvrd-models",
    "pvrd-wheels",
    "python3-pvrd",
)
# What belongs to another package than the daemon's, by the beginning of its path.
PLACES = (
    (f"{PRIVATE}/pvrd/agent/", "pvrd-agent"),
    (f"{PRIVATE}/pvrd/http/", "pvrd-http"),
    (f"{PRIVATE}/pvrd/hooks/gst/", ""),  # the element is the public one of pvrd-hooks
    (f"{PRIVATE}/engine/video/models/", "pvrd-models"),
    (f"{PRIVATE}/installed.json", ""),
    ("/usr/share/doc/pvrd/LICENSE", ""),
)


def source_of(tree: Path, module: str) -> Path | None:
    """The file of a module below `tree`, or None."""
    base = tree / module.replace(".", "/")
    for path in (base.with_suffix(".py"), base / "__init__.py"):
        if path.is_file():
            return path
    return None


def closure(tree: Path, modules: tuple[str, ...]) -> set[Path]:
    """The files of the modules and of all modules of pvrd that they import, wherever in them."""
    found: set[Path] = set()
    todo = list(modules)
    while todo:
        module = todo.pop()
        path = source_of(tree, module)
        if path is None or path in found:
            continue
        found.add(path)
        if "." in module:
            todo.append(module.rpartition(".")[0])
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
            else:
                continue
            todo += [name for name in names if name.split(".")[0] == "pvrd"]
    return found


def fits(name: str, python: str) -> bool:
    """Do a wheel's tags fit this machine and the interpreter? (Packages of other machines may lie
    beside it in a source package.)"""
    interpreters, abi, machine = name.split("-")[-3:]
    program = "import sys; print('cp%d%d' % sys.version_info[:2])"
    own = subprocess.run([python, "-Ic", program], capture_output=True, text=True, check=True)
    if abi != "abi3" and not {"py3", own.stdout.strip()} & set(interpreters.split(".")):
        return False
    return machine == "any" or machine.endswith(f"_{platform.machine()}")


class Stage:
    """The folder that stands for the target's root, and whose each file is."""

    def __init__(self, dest: Path) -> None:
        self.dest = dest
        self.owner: dict[str, str] = {}

    def at(self, path: str) -> Path:
        return self.dest / path.lstrip("/")

    def copy(self, source: Path, path: str, package: str) -> None:
        self.at(path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, self.at(path))
        self.owner[path] = package

    def link(self, path: str, to: str, package: str) -> None:
        self.at(path).parent.mkdir(parents=True, exist_ok=True)
        self.at(path).symlink_to(os.path.relpath(to, Path(path).parent))
        self.owner[path] = package

    def move(self, path: str, to: str) -> None:
        self.at(to).parent.mkdir(parents=True, exist_ok=True)
        self.at(path).rename(self.at(to))
        self.owner[to] = self.owner.pop(path)

    def divide(self) -> None:
        """Takes stock of what the installation put down; files of no package are removed."""
        for file in sorted(self.dest.rglob("*")):
            if file.is_dir() and not file.is_symlink():
                continue
            path = f"/{file.relative_to(self.dest)}"
            package = "pvrd"
            if file.name.startswith(("pvr-agent", "80-pvr-agent")):
                package = "pvrd-agent"
            elif file.name.startswith(("pvr-http", "80-pvr-http")):
                package = "pvrd-http"
            for start, name in PLACES:
                package = name if path.startswith(start) else package
            # The build leaves an empty file of a variant that its compiler is too old for.
            empty = file.suffix == ".spv" and not file.stat().st_size
            if package and not empty and "__pycache__" not in file.parts:
                self.owner[path] = package
            else:
                file.unlink()

    def vendored(self, wheels: list[Path]) -> None:
        """The wheels' contents; their scripts serve nobody."""
        for wheel in wheels:
            with zipfile.ZipFile(wheel) as archive:
                for info in archive.infolist():
                    parts = Path(info.filename).parts
                    if info.is_dir() or ".." in parts or info.filename.startswith("/"):
                        continue
                    if parts[0].endswith(".data"):
                        if parts[1] not in ("purelib", "platlib"):
                            continue
                        parts = parts[2:]
                    path = str(Path(PRIVATE, *parts))
                    self.at(path).parent.mkdir(parents=True, exist_ok=True)
                    self.at(path).write_bytes(archive.read(info))
                    self.owner[path] = "pvrd-wheels"

    def tidy(self) -> None:
        """Modes as packages have them, and no empty folder but those that the daemon reads."""
        kept = {self.at("/etc/pvrd/pvrd.toml.d"), self.at("/usr/share/pvrd/models")}
        for path in sorted(self.dest.rglob("*"), reverse=True):
            if path.is_symlink():
                continue
            if path.is_dir():
                path.chmod(0o755)
                if not any(path.iterdir()) and path not in kept:
                    path.rmdir()
            else:
                programs = path.parent.name in ("bin", "libexec")
                path.chmod(0o755 if programs else 0o644)


def stage(args: argparse.Namespace) -> dict[str, str]:
    """Fills DEST; the package of each path.

    Raises:
        SystemExit: the installation fails, or a file would be two packages'.
    """
    dest: Path = args.dest.resolve()
    shutil.rmtree(dest, ignore_errors=True)
    dest.mkdir(parents=True)
    tool = [sys.executable, "-I", str(SOURCE / "tools/install/system.py"), "install"]
    tool += ["--prefix", "/usr", "--destdir", str(dest), "--wheels", str(args.wheels)]
    tool += ["--python", args.python, "--site", "0"]
    done = subprocess.run(tool, stdout=subprocess.DEVNULL, check=False)
    if done.returncode:
        raise SystemExit("stage: the installation failed; it said why above.")
    out = Stage(dest)
    out.divide()
    site = args.site_packages
    client = closure(SOURCE, CLIENT)
    hooks = set((SOURCE / "pvrd/hooks").rglob("*.py"))
    names = [".".join(p.relative_to(SOURCE).with_suffix("").parts) for p in hooks]
    hooks |= closure(SOURCE, tuple(names)) - client
    for files, package in ((client, "python3-pvrd"), (hooks, "pvrd-hooks")):
        for file in sorted(files):
            out.copy(file, f"{site}/{file.relative_to(SOURCE)}", package)
    element = "pvrd/hooks/gst/python/pvrupscale.py"
    if (SOURCE / element).is_file():
        out.link(f"{args.gstreamer}/python/pvrupscale.py", f"{site}/{element}", "pvrd-hooks")
    weights = f"{PRIVATE}/engine/video/models"
    for path in [p for p, package in out.owner.items() if package == "pvrd-models"]:
        out.move(path, path.replace(weights, "/usr/share/pvrd/nsr"))
    out.at(weights).rmdir()
    out.link(weights, "/usr/share/pvrd/nsr", "pvrd")
    metainfo = "org.pvrd.Pvrd.metainfo.xml"
    out.copy(SOURCE / "packaging" / metainfo, f"/usr/share/metainfo/{metainfo}", "pvrd")
    if args.units != "/usr/lib/systemd/system":
        for path in [p for p in out.owner if p.startswith("/usr/lib/systemd/system/")]:
            out.move(path, f"{args.units}/{Path(path).name}")
    if args.zsh != "/usr/share/zsh/site-functions":
        out.move("/usr/share/zsh/site-functions/_pvrctl", f"{args.zsh}/_pvrctl")
    if args.vendor:
        wheels = [w for w in sorted(args.vendor.glob("*.whl")) if fits(w.stem, args.python)]
        found = {w.name.split("-")[0].lower(): w for w in wheels}
        if missing := [name for name in args.lacking.split(",") if name not in found]:
            raise SystemExit(
                f"stage: {args.vendor} has no wheel of {', '.join(missing)} for {args.python} "
                f"on {platform.machine()}."
            )
        out.vendored([found[name] for name in args.lacking.split(",")])
    out.tidy()
    return out.owner


def main() -> int:
    parser = argparse.ArgumentParser(description="Stages an installation, divided into packages.")
    parser.add_argument("dest", type=Path)
    parser.add_argument("--wheels", type=Path, required=True, help="folder with pvrd's own wheel")
    parser.add_argument("--vendor", type=Path, help="folder of wheels of other projects")
    parser.add_argument("--lacking", default="llguidance,tokenizers,vulkan")
    parser.add_argument("--lists", type=Path, required=True)
    parser.add_argument("--split", type=Path)
    parser.add_argument("--python", default="/usr/bin/python3")
    parser.add_argument("--site-packages", default="/usr/lib/python3/dist-packages")
    parser.add_argument("--units", default="/usr/lib/systemd/system")
    parser.add_argument("--zsh", default="/usr/share/zsh/site-functions")
    parser.add_argument("--gstreamer", default="/usr/lib/gstreamer-1.0")
    args = parser.parse_args()
    os.umask(0o022)
    owner = stage(args)
    args.lists.mkdir(parents=True, exist_ok=True)
    for package in PACKAGES:
        paths = sorted(path for path, name in owner.items() if name == package)
        (args.lists / f"{package}.txt").write_text("".join(f"{path}\n" for path in paths))
        dirs = sorted({str(p) for path in paths for p in Path(path).parents if "pvrd" in p.parts})
        (args.lists / f"{package}.dirs").write_text("".join(f"{path}\n" for path in dirs))
        for path in paths if args.split else ():
            to = args.split / package / path.lstrip("/")
            to.parent.mkdir(parents=True, exist_ok=True)
            shutil.move(args.dest / path.lstrip("/"), to)
    return 0


if __name__ == "__main__":
    sys.exit(main())
