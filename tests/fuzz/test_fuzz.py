# SPDX-License-Identifier: Apache-2.0
"""Readers of what strangers write: seeds are accepted, what was found stays mended, and (long) all
are fuzzed for a while.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fuzz import judge
from tests.fuzz.mutate import mutated
from tests.fuzz.targets import TARGETS

ROOT = Path(__file__).resolve().parents[2]
FOUND = sorted(Path(__file__).with_name("found").glob("*-*"))
SECONDS = 300  # of all targets together


@pytest.mark.parametrize("name", TARGETS)
def test_seeds_are_accepted_and_some_damage_is_survived(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seeds = TARGETS[name].seeds()
    with monkeypatch.context() as patch:
        patch.setattr(judge, "strict", True)
        for data in seeds if name != "pvrm" else []:  # each is for one of two readers
            TARGETS[name].run(data)
    for number in range(12):
        TARGETS[name].run(mutated(seeds[number % len(seeds)], number, seeds))


def test_what_was_found_stays_mended() -> None:
    for path in FOUND:
        TARGETS[path.name.partition("-")[0]].run(path.read_bytes())


@pytest.mark.long
@pytest.mark.parametrize("name", TARGETS)
def test_fuzzing_finds_nothing(name: str) -> None:
    """Guided by coverage where atheris has wheels; there it has to be installed. The seed stays, so
    that a change is judged by what it did; by hand `python -m tests.fuzz` draws others.
    """
    wheels = platform.machine() == "x86_64" and sys.version_info < (3, 14)
    assert importlib.util.find_spec("atheris") is not None or not wheels
    done = subprocess.run(
        [sys.executable, "-m", "tests.fuzz", name, "--seconds", str(-(-SECONDS // len(TARGETS))),
         "--seed", "1"],
        cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=240,
        check=False, env={k: v for k, v in os.environ.items() if k != "PYTHONWARNINGS"},
    )  # fmt: skip
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
