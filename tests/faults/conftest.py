# SPDX-License-Identifier: Apache-2.0
"""What all cells share: models, references of an undisturbed CPU, caches that are warm."""

from __future__ import annotations

import functools
import json
import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from tests.daemons import write_tiny
from tests.faults.cells import Result
from tests.faults.daemon import compiled_preload
from tests.faults.place import Place, references, warmed
from tests.faults.plant import CONV, LATE_SWIGLU, SWIGLU, planted


@pytest.fixture(scope="session")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    """Everything is done once undisturbed: compiled models, verdicts and shaders are there then."""
    folder = tmp_path_factory.mktemp("faults")
    models = folder / "models"
    models.mkdir()
    write_tiny(models)
    (folder / "reference").mkdir()
    reference = references(folder / "reference", models)
    home = warmed(folder / "warm", models, reference)

    def warm(target: Path) -> None:
        shutil.copytree(home, target)

    @functools.cache
    def kernels(kind: str) -> Path:
        changes = {"now": [SWIGLU, CONV], "later": [LATE_SWIGLU]}[kind]
        return planted(folder / f"planted-{kind}", *changes)

    return Place(
        folder, models, reference, warm, compiled_preload(folder),
        lambda state: kernels("later" if state == "decode" else "now"),
    )  # fmt: skip


@pytest.fixture(scope="session")
def results() -> Iterator[list[Result]]:
    """What each cell came to; $PVRD_FAULT_REPORT gets it as JSON."""
    found: list[Result] = []
    yield found
    if target := os.environ.get("PVRD_FAULT_REPORT"):
        Path(target).write_text(json.dumps([asdict(r) for r in found], indent=1))


def names(values: Any) -> list[str]:
    """Ids of parameters."""
    return [re.sub(r"\W+", "-", value.name) for value in values]
