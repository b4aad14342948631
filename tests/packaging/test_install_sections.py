# SPDX-License-Identifier: Apache-2.0
"""Which Python packages each target of the Makefile brings, before a stand-in of Python and pip."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

TREE = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((TREE / "pyproject.toml").read_text())
EXTRAS = PROJECT["project"]["optional-dependencies"]
# Makes a .venv whose Python is this program again; notes what pip is asked for.
PYTHON = """#!/bin/sh
case "$*" in
    "-m venv"*) mkdir -p .venv/bin && cp "$0" .venv/bin/python ;;
    "-m pip install"*)
        echo "$@" >>"$ASKED"
        for file; do [ ! -f "$file" ] || cat "$file" >>"$ASKED"; done
        exit "${PIP:-0}" ;;
    *) exec REAL "$@" ;;
esac
"""


@pytest.fixture
def make(tmp_path: Path):  # type: ignore[no-untyped-def]
    """Runs make in a copy of what installs; its exit status, its words, and what pip was asked."""
    tree, programs = tmp_path / "tree", tmp_path / "bin"
    shutil.copytree(TREE / "tools/install", tree / "tools/install")
    for folder in ("pvrd", "engine", "kernels"):
        (tree / folder).mkdir()
    for name in ("Makefile", "pyproject.toml"):
        shutil.copy(TREE / name, tree)
    for name in ("meson.build", "meson_options.txt", "README.md"):
        (tree / name).touch()
    programs.mkdir()
    bodies = {"dpkg-query": "#!/bin/sh\necho installed\n", "python3": PYTHON}
    for name, body in bodies.items():
        (programs / name).write_text(body.replace("REAL", sys.executable))
        (programs / name).chmod(0o755)
    asked = tmp_path / "asked"

    def made(*targets: str, **more: str) -> tuple[int, str, str]:
        asked.unlink(missing_ok=True)
        env = {"PATH": f"{programs}:{os.environ['PATH']}", "ASKED": str(asked)} | more
        done = subprocess.run(
            ["make", "--no-print-directory", *targets, f"PYTHON={programs}/python3"],
            cwd=tree, env=env, capture_output=True, text=True, check=False,
        )  # fmt: skip
        words = asked.read_text() if asked.exists() else ""
        return done.returncode, done.stdout + done.stderr, words

    return made


def names(lines: list[str]) -> set[str]:
    return {re.split(r"[^A-Za-z0-9._-]", line)[0] for line in lines}


def test_an_installation_brings_no_tools_of_the_tests(make) -> None:  # type: ignore[no-untyped-def]
    """make install begins with `build`, and collects the wheels of its own sections."""
    code, said, asked = make("build")
    assert code == 0, said
    run = PROJECT["project"]["dependencies"] + EXTRAS["http"]
    got = names(asked.splitlines())
    assert names(run + PROJECT["build-system"]["requires"]) <= got
    others = [each for key, lines in EXTRAS.items() if key != "http" for each in lines]
    assert not (names(others) - names(run)) & got
    assert make("build")[2] == "", "once is enough"


def test_checks_bring_their_own(make) -> None:  # type: ignore[no-untyped-def]
    stamps = [f".venv/.{name}" for name in ("models", "kubernetes", "test", "fuzz", "qt")]
    for targets in (["check"], ["check-long"]):
        listed = re.findall(r"tools/install/venv '.*' (.+)$", make("-n", *targets)[1], re.M)
        assert {"models", "kubernetes", "test"} <= set(listed)
    code, said, asked = make(*stamps)
    assert code == 0, said
    wanted = [line for name in ("kubernetes", "test", "fuzz", "qt") for line in EXTRAS[name]]
    assert names(wanted) <= names(asked.splitlines())
    (weights,) = [line for line in asked.splitlines() if "--no-deps" in line]
    assert asked.partition(weights)[2].split()[0] == EXTRAS["models"][0]


def test_pip_that_fails_is_told(make) -> None:  # type: ignore[no-untyped-def]
    code, said, _ = make("build", PIP="1")
    assert code == 2
    assert "pip could not install what pvrd needs" in said
    assert make("build")[0] == 0, "nothing is taken for done"
