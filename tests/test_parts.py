# SPDX-License-Identifier: Apache-2.0
"""The parts of the long tests: each test is in one, and what goes wrong is seen."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from tests import parts


def test_parts_are_of_tests_that_there_are() -> None:
    named = [test for tests in parts.PARTS.values() for test in tests]
    for test in named:
        path, _, name = test.partition("::")
        assert (parts.ROOT / path).exists(), test
        function, _, case = name.rstrip("]").partition("[")
        if name:
            text = (parts.ROOT / path).read_text()
            assert f"def {function}(" in text
            assert re.search(rf"\b{case}\b", text)
        # The rest has no test whose name begins with one of these.
        assert [other for other in named if other.startswith(test)] == [test]
    assert parts.arguments("rest") == [f"--deselect={test}" for test in named]


@pytest.mark.parametrize(("fails", "code"), [(False, 0), (True, 1)])
def test_a_failure_is_shown_and_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str],
    fails: bool, code: int,
) -> None:  # fmt: skip
    head = "import pytest\npytestmark = pytest.mark.long\n"
    (tmp_path / "test_one.py").write_text(f"{head}def test_one():\n    assert not {fails}\n")
    (tmp_path / "test_two.py").write_text(f"{head}def test_two(): pass\n")
    monkeypatch.setattr(parts, "LOGS", tmp_path / "logs")
    found = {name: (str(tmp_path / f"test_{name}.py"),) for name in ("one", "two")}
    monkeypatch.setattr(parts, "PARTS", found)
    monkeypatch.setattr(sys, "argv", ["parts"])
    assert parts.main() == code
    said = capfd.readouterr().out
    assert ("assert not True" in said) == fails
    assert ("failed or not run: one\n" in said) == fails
    assert ("all parts passed" in said) != fails
    assert " two: exit status 0 after " in said


def test_a_part_without_tests_has_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "test_none.py").write_text("")
    monkeypatch.setattr(parts, "LOGS", tmp_path / "logs")
    monkeypatch.setattr(parts, "PARTS", {"none": (str(tmp_path),)})
    monkeypatch.setattr(sys, "argv", ["parts", "--lanes", "1"])
    assert parts.main() == 1
