# SPDX-License-Identifier: Apache-2.0
"""The rule that a skip has to be named in allowed_skips.txt."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

CONFTEST = Path(__file__).with_name("conftest.py")


def run(folder: Path, body: str, allowed: str) -> subprocess.CompletedProcess[str]:
    (folder / "conftest.py").write_text(CONFTEST.read_text())
    (folder / "allowed_skips.txt").write_text(allowed)
    (folder / "test_it.py").write_text(f"import pytest\n{body}\n")
    pytest_here = ["pytest", "-q", "-p", "no:cacheprovider", "--rootdir", str(folder), str(folder)]
    return subprocess.run(
        [sys.executable, "-m", *pytest_here],
        capture_output=True,
        text=True,
        check=False,
        cwd=folder,
    )


SKIPS = "def test_a():\n    pytest.skip('no such device')"


def test_unlisted_skip_fails_the_run(tmp_path: Path) -> None:
    done = run(tmp_path, SKIPS, "# nothing\n")
    assert done.returncode == 1, done.stdout
    assert "NOT ALLOWED: test_it.py::test_a: no such device" in done.stdout


def test_listed_skip_passes_and_is_told(tmp_path: Path) -> None:
    done = run(tmp_path, SKIPS + "\ndef test_b():\n    pass", "test_it.py::* | no such*\n")
    assert done.returncode == 0, done.stdout
    assert "allowed: test_it.py::test_a: no such device" in done.stdout


def test_skipped_module_and_other_reason_fail(tmp_path: Path) -> None:
    body = "pytest.skip('whole file', allow_module_level=True)"
    done = run(tmp_path, body, "test_it.py | another reason\n")
    assert done.returncode == 1, done.stdout
    assert "NOT ALLOWED: test_it.py: whole file" in done.stdout


@pytest.mark.parametrize("line", ["tests/x.py", "| reason", "tests/x.py |"])
def test_line_without_its_halves_is_refused(tmp_path: Path, line: str) -> None:
    done = run(tmp_path, SKIPS, line)
    assert done.returncode != 0
    assert "a line is TEST | REASON" in done.stdout + done.stderr
