# SPDX-License-Identifier: Apache-2.0
"""tools/install/packages before stand-ins of dpkg and apt."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

TREE = Path(__file__).resolve().parents[2]
DPKG = """case " $HAVE " in *" $4 "*) echo installed ;; *) exit 1 ;; esac"""
CACHE = """case " $KNOWN " in *" $2 "*) ;; *) exit 100 ;; esac"""
GET = """[ "$2" = update ] || echo "$@" >>"$ASKED"
[ -z "$BROKEN" ] || { echo "no network"; exit 1; }"""


@pytest.fixture
def run(tmp_path: Path):  # type: ignore[no-untyped-def]
    """Runs the script; what it said, and what apt-get was asked to install (None: nothing)."""
    programs = tmp_path / "bin"
    programs.mkdir()
    bodies = {"dpkg-query": DPKG, "apt-cache": CACHE, "apt-get": GET, "id": "echo 0"}
    for name, body in bodies.items():
        (programs / name).write_text(f"#!/bin/sh\n{body}\n")
        (programs / name).chmod(0o755)
    asked = tmp_path / "asked"

    def made(what: str, **more: str) -> tuple[int, str, list[str] | None]:
        asked.unlink(missing_ok=True)
        env = {"PATH": f"{programs}:{os.environ['PATH']}", "ASKED": str(asked)} | more
        done = subprocess.run(
            [TREE / "tools/install/packages", what],
            env={"HAVE": "", "KNOWN": "", "BROKEN": "", **env},
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        names = asked.read_text().split() if asked.exists() else None
        return done.returncode, done.stderr, names

    return made


def test_only_what_is_missing_is_installed(run) -> None:  # type: ignore[no-untyped-def]
    code, said, names = run("demo", HAVE="python3 gcc ffmpeg")
    assert code == 0
    assert {"install", "dbus", "python3-venv"} <= set(names)
    assert not {"python3", "gcc", "ffmpeg"} & set(names)
    assert "Installing with apt-get:" in said
    have = " ".join(names)
    assert run("demo", HAVE=f"python3 gcc ffmpeg {have}") == (0, "", None)


@pytest.mark.parametrize(
    ("known", "taken"),
    [("clang clang-19", "clang-19"), ("clang clang-18 clang-21", "clang-21"), ("clang", "clang")],
)
def test_the_clang_that_a_release_has(run, known: str, taken: str) -> None:  # type: ignore[no-untyped-def]
    code, said, names = run("check", KNOWN=known)
    assert code == 0
    assert [name for name in names if "clang" in name.lower()] == [taken]
    assert "CLANG" not in said
    assert "clang" not in str(run("check", HAVE="clang-22")[2])


def test_apt_that_fails_is_told(run) -> None:  # type: ignore[no-untyped-def]
    code, said, names = run("check", BROKEN="1")
    assert (code, names) == (1, None)
    assert "no network" in said
    assert "By hand, as root:" in said
    assert "CLANG" not in said
