# SPDX-License-Identifier: Apache-2.0
"""Puts pvrd on a system and takes it away again; `make install` and `make uninstall` call it.

    system.py install --wheels DIR [--prefix DIR] [--destdir DIR] [--python FILE] [--site 0|1]
    system.py uninstall [--prefix DIR] [--destdir DIR] [--purge 0|1]

Everything that is put down is written into PREFIX/lib/pvrd/installed.json, folders that were not
there before included, so that uninstall leaves nothing of it. Wheels are unpacked, not installed by
pip: no path of the build gets into the installation, and the target needs nothing but Python.
"""

from __future__ import annotations

import argparse
import configparser
import filecmp
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[2]
STATE = ("/var/lib/pvrd", "/var/cache/pvrd")
UNITS = (
    "pvrd.service",
    "pvrd-worker-gpu.socket",
    "pvrd-worker-cpu.socket",
    "pvrd-worker-gpu@.service",
    "pvrd-worker-cpu@.service",
)
AGENT = "pvr-agent.service"  # a unit of users
HTTP = "pvr-http.service"  # the same, but nobody's before it is enabled
LAUNCHERS = {
    "pvrd": "bin",
    "pvrctl": "bin",
    "pvrd-worker": "libexec",
    "pvr-agent": "bin",
    "pvr-http": "bin",
}


def die(message: str) -> None:
    raise SystemExit(f"pvrd: {message}")


class Target:
    """The system under `destdir`; all paths given to it are as they will be seen there."""

    def __init__(self, prefix: str, destdir: str) -> None:
        self.prefix = Path("/") / prefix
        self.destdir = Path(destdir).resolve() if destdir else Path("/")
        # systemd reads units and the like below /usr and /usr/local, else only out of /etc.
        self.system = str(self.prefix) in ("/usr", "/usr/local")
        self.files: list[str] = []
        self.folders: list[str] = []

    def at(self, path: Path | str) -> Path:
        """Where a path of the target lies on this machine."""
        return self.destdir / str(path).lstrip("/")

    @property
    def site(self) -> Path:
        return self.prefix / "lib/pvrd"

    @property
    def manifest(self) -> Path:
        return self.site / "installed.json"

    def folder(self, path: Path) -> None:
        missing = [p for p in (path, *path.parents) if not self.at(p).exists()]
        for p in reversed(missing):
            self.at(p).mkdir(mode=0o755)
            self.at(p).chmod(0o755)
            self.folders.append(str(p))

    def put(self, path: Path, data: bytes, mode: int = 0o644) -> None:
        self.folder(path.parent)
        self.at(path).unlink(missing_ok=True)  # never through a link, never into a file that runs
        self.at(path).write_bytes(data)
        self.at(path).chmod(mode)
        self.files.append(str(path))

    def copy(self, source: Path, path: Path) -> None:
        """A text file of the project, with its placeholders filled in."""
        text = source.read_text()
        for name, where in {"bindir": "bin", "libexecdir": "libexec"}.items():
            text = text.replace(f"@{name}@", str(self.prefix / where))
        self.put(path, text.encode())

    def under(self, kind: str) -> Path:
        """The folder that its reader looks into for files of this kind."""
        lib = self.prefix / "lib" if self.system else Path("/etc")
        share = self.prefix / "share" if self.system else Path("/usr/share")
        # The bus reads activation files of /usr/local too, policies below /usr and /etc alone.
        policies = share if str(self.prefix) == "/usr" else Path("/etc")
        return {
            "units": lib / "systemd/system",
            "presets": lib / "systemd/system-preset",
            "user-units": lib / "systemd/user",
            "user-presets": lib / "systemd/user-preset",
            "sysusers": lib / "sysusers.d",
            "tmpfiles": lib / "tmpfiles.d",
            "activation": share / "dbus-1/system-services",
            "policy": policies / "dbus-1/system.d",
            # polkit looks nowhere else
            "polkit": Path("/usr/share/polkit-1/actions"),
        }[kind]


def usable(wheels: Path) -> list[Path]:
    """The wheels of the folder; ends the program when they do not make an installation."""
    found = sorted(wheels.glob("*.whl"))
    names = [w.name.split("-")[0].lower() for w in found]
    if "pvrd" not in names:
        die(f"{wheels} has no wheel of pvrd.")
    if twice := {n for n in names if names.count(n) > 1}:
        die(f"{wheels} has more than one wheel of {', '.join(sorted(twice))}.")
    return found


def unpack(target: Target, wheels: list[Path]) -> None:
    """The contents of every wheel into the site folder."""
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            for info in archive.infolist():
                parts = Path(info.filename).parts
                if info.is_dir() or ".." in parts or info.filename.startswith("/"):
                    continue
                if parts[0].endswith(".data"):  # NAME.data/purelib/…; scripts serve nobody
                    if parts[1] not in ("purelib", "platlib"):
                        continue
                    parts = parts[2:]
                target.put(target.site.joinpath(*parts), archive.read(info))


def launchers(target: Target, python: str, site: bool) -> None:
    """The programs named in the wheel's entry points, isolated from the caller's environment."""
    entries = next(target.at(target.site).glob("pvrd-*.dist-info/entry_points.txt"))
    parser = configparser.ConfigParser()
    parser.read_string(entries.read_text())
    # -S: the private folder has everything, so the system's packages stay out.
    flags = "-IS" if site else "-I"
    for name, where in LAUNCHERS.items():
        module, function = parser["console_scripts"][name].split(":")
        text = (
            f"#!{python} {flags}\nimport sys\n\nsys.path.insert(0, {str(target.site)!r})\n"
            f"from {module} import {function}\n\nsys.exit({function}())\n"
        )
        target.put(target.prefix / where / name, text.encode(), 0o755)


def user(target: Target) -> None:
    """The user pvrd; before the bus policy comes, which names it and is read at once."""
    path = target.under("sysusers") / "pvrd.conf"
    target.copy(SOURCE / "systemd/pvrd.sysusers.conf", path)
    if target.destdir == Path("/"):
        run("systemd-sysusers", str(path))


def data(target: Target) -> None:
    """Units, policies, interfaces, man pages, completion, documents."""
    for name in UNITS:
        target.copy(SOURCE / "systemd" / name, target.under("units") / name)
    target.copy(SOURCE / "systemd/80-pvrd.preset", target.under("presets") / "80-pvrd.preset")
    for unit in (AGENT, HTTP):
        target.copy(SOURCE / "systemd" / unit, target.under("user-units") / unit)
        preset = f"80-{unit.removesuffix('.service')}.preset"
        target.copy(SOURCE / "systemd" / preset, target.under("user-presets") / preset)
    target.copy(SOURCE / "systemd/pvrd.tmpfiles.conf", target.under("tmpfiles") / "pvrd.conf")
    dbus = SOURCE / "dbus"
    for kind, suffix in {"policy": "conf", "activation": "service", "polkit": "policy"}.items():
        name = f"org.pvrd.Pvrd1.{suffix}"
        target.copy(dbus / name, target.under(kind) / name)
    share = target.prefix / "share"
    for xml in sorted(dbus.glob("*.xml")):
        target.copy(xml, share / "dbus-1/interfaces" / xml.name)
    for page in sorted((SOURCE / "docs").glob("*.[1-8]")):
        target.copy(page, share / f"man/man{page.suffix[1:]}" / page.name)
    for file in sorted((SOURCE / "tools/completion").glob("*pvrctl*")):
        if file.name.startswith("_"):
            target.copy(file, share / "zsh/site-functions" / file.name)
        else:
            name = file.name.removesuffix(".bash")
            target.copy(file, share / "bash-completion/completions" / name)
    texts = [SOURCE / name for name in ("README.md", "NEWS.md", "LICENSE")]
    for text in texts + sorted((SOURCE / "docs").glob("*.md")):
        target.copy(text, share / "doc/pvrd" / text.name)
    target.folder(share / "pvrd/models")
    target.copy(SOURCE / "systemd/pvrd.toml", share / "pvrd/pvrd.toml")


def configuration(target: Target) -> None:
    """/etc/pvrd with the sample, unless there is one. Not in the manifest: the administrator's."""
    target.folder(Path("/etc"))
    folder = target.at("/etc/pvrd")
    (folder / "pvrd.toml.d").mkdir(parents=True, exist_ok=True)
    if not (folder / "pvrd.toml").exists():
        shutil.copyfile(SOURCE / "systemd/pvrd.toml", folder / "pvrd.toml")
        (folder / "pvrd.toml").chmod(0o644)


def run(*command: str) -> bool:
    """Runs a command where it exists; true if it went well."""
    if shutil.which(command[0]) is None:
        return False
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    if done.returncode and done.stderr.strip():
        print(f"{' '.join(command)}: {done.stderr.strip()}", file=sys.stderr)
    return done.returncode == 0


def booted(target: Target) -> bool:
    """Is the target the system that runs here, and under systemd?"""
    return target.destdir == Path("/") and Path("/run/systemd/system").is_dir()


def reload() -> None:
    run("systemctl", "daemon-reload")
    if run("systemctl", "is-active", "--quiet", "dbus.service"):
        run("systemctl", "reload", "dbus.service")


def remove(target: Target) -> bool:
    """Takes away what the manifest names; false where there is none."""
    if not target.at(target.manifest).is_file():
        return False
    listed = json.loads(target.at(target.manifest).read_text())
    for name in [*listed["files"], str(target.manifest)]:
        target.at(name).unlink(missing_ok=True)
    for cache in sorted(target.at(target.site).rglob("__pycache__"), reverse=True):
        shutil.rmtree(cache)
    for name in reversed(listed["folders"]):
        if target.at(name).is_dir() and not any(target.at(name).iterdir()):
            target.at(name).rmdir()
    # What is still in use stays ours to remove: a new installation takes the list over.
    target.folders = [name for name in listed["folders"] if target.at(name).is_dir()]
    return True


def lacking(python: str) -> list[str]:
    """What pyproject.toml asks for and this Python does not have."""
    import tomllib  # not above: an older Python can uninstall, and say that it is too old

    project = tomllib.loads((SOURCE / "pyproject.toml").read_text())["project"]
    names = [re.split(r"[^A-Za-z0-9._-]", line)[0] for line in project["dependencies"]]
    program = (
        "import importlib.metadata as m, re, sys\n"
        "plain = lambda name: re.sub('[-_.]+', '-', name).lower()\n"
        "has = {plain(d.metadata['Name'] or '') for d in m.distributions()}\n"
        "print(*(n for n in sys.argv[1:] if plain(n) not in has))"
    )
    done = subprocess.run(
        [python, "-Ic", program, *names], capture_output=True, text=True, check=False
    )
    return done.stdout.split()


def install(target: Target, wheels: Path, python: str, site: bool) -> None:
    version = subprocess.run(
        [python, "-Ic", "import sys; print(sys.executable, *sys.version_info[:2])"],
        capture_output=True,
        text=True,
        check=False,
    ).stdout.split()
    if len(version) != 3 or (int(version[1]), int(version[2])) < (3, 11):
        die(f"{python} is no Python 3.11 or later; name one with PYTHON=.")
    python = os.path.abspath(version[0])
    if target.system and python.startswith(("/home/", "/root/")):
        print(
            f"pvrd: {python} lies in a home, where the service cannot see it; "
            "name another with PYTHON=.",
            file=sys.stderr,
        )
    found = usable(wheels)
    if remove(target):
        print("Replacing the installation that is there.")
    try:
        unpack(target, found)
        launchers(target, python, site)
        user(target)
        data(target)
        configuration(target)
    finally:  # half an installation can be taken away too
        target.folder(target.site)
        listed = {"files": target.files, "folders": target.folders}
        target.at(target.manifest).write_text(json.dumps(listed, indent=0))
    strip = ["-s", str(target.destdir), "-p", "/"] if target.destdir != Path("/") else []
    subprocess.run(
        [python, "-Im", "compileall", "-q", *strip, str(target.at(target.site))],
        check=False,
        stdout=subprocess.DEVNULL,
    )
    if target.destdir == Path("/"):
        run("systemd-tmpfiles", "--create", str(target.under("tmpfiles") / "pvrd.conf"))
    print(f"Installed into {target.at(target.prefix)}; the configuration is /etc/pvrd/pvrd.toml.")
    if not site and target.destdir == Path("/") and (missing := lacking(python)):
        print(
            f"pvrd: {python} lacks {', '.join(missing)}; pvrd does not run without them. "
            "VENV=1 brings its own.",
            file=sys.stderr,
        )
    if booted(target):
        reload()
        if run("systemctl", "is-active", "--quiet", "pvrd.service"):
            run("systemctl", "restart", "pvrd.service")
            print("pvrd.service was running and has been restarted.")
        else:
            print(
                "Start it now and at every boot: systemctl enable --now pvrd.service "
                "(the first call of pvrctl starts it as well)."
            )
        print(
            "To let it see when the desktop stutters, each user may: systemctl --user enable --now "
            f"{AGENT} (docs/neighbours.md)."
        )
    elif target.destdir == Path("/"):
        print(
            "No systemd runs here, so nothing was started. `pvrd --bus user` serves a user; "
            "where systemd runs: systemctl enable --now pvrd.service."
        )


def uninstall(target: Target, purge: bool) -> None:
    if booted(target) and target.at(target.under("units") / "pvrd.service").exists():
        run("systemctl", "disable", "--now", *UNITS[:3])
        run("systemctl", "--global", "disable", AGENT, HTTP)
    installed = target.at(target.manifest).is_file()
    # What an earlier uninstall left can still be purged.
    left = [n for n in (*STATE, "/etc/pvrd", "/run/pvrd") if target.at(n).exists()] if purge else []
    if not installed:
        print(f"pvrd is not installed in {target.at(target.prefix)}.")
        if not left:
            return
    config = target.at("/etc/pvrd/pvrd.toml")
    sample = target.at(target.prefix / "share/pvrd/pvrd.toml")
    if config.is_file() and sample.is_file() and filecmp.cmp(config, sample, shallow=False):
        config.unlink()
    if purge:
        for name in left:
            shutil.rmtree(target.at(name), ignore_errors=True)
    for folder in ("/etc/pvrd/pvrd.toml.d", "/etc/pvrd"):
        if target.at(folder).is_dir() and not any(target.at(folder).iterdir()):
            target.at(folder).rmdir()
    remove(target)
    if booted(target):
        reload()
    if purge and target.destdir == Path("/") and run("getent", "passwd", "pvrd"):
        run("userdel", "pvrd")
    kept = [name for name in (*STATE, "/etc/pvrd") if target.at(name).exists()]
    if kept:
        print(
            f"Removed pvrd. Left as it is: {', '.join(kept)} and the user pvrd; "
            "make uninstall PURGE=1 removes these too."
        )
    else:
        print("Removed pvrd." if installed else f"Removed {', '.join(left)}.")


def main() -> int:
    parser = argparse.ArgumentParser(description="Installs and removes pvrd.")
    parser.add_argument("what", choices=["install", "uninstall"])
    parser.add_argument("--prefix", default="/usr/local")
    parser.add_argument("--destdir", default="")
    parser.add_argument("--wheels", type=Path)
    parser.add_argument("--python", default="/usr/bin/python3")
    parser.add_argument("--site", type=int, default=1, help="1: the wheels hold all dependencies")
    parser.add_argument("--purge", type=int, default=0)
    args = parser.parse_args()
    target = Target(args.prefix, args.destdir)
    if target.destdir == Path("/") and os.geteuid() != 0:
        die("this changes the system: run it as root, or give DESTDIR=.")
    os.umask(0o022)
    if args.what == "install":
        install(target, args.wheels, args.python, bool(args.site))
    else:
        uninstall(target, bool(args.purge))
    return 0


if __name__ == "__main__":
    sys.exit(main())
