# SPDX-License-Identifier: Apache-2.0
"""A model store of a test's own: the fixture `store`, and files for it."""

from __future__ import annotations

from pathlib import Path

import pytest

from pvrd import model_files
from pvrd.config import KEYS, Config, Paths
from pvrd.models import ModelStore


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModelStore:
    monkeypatch.setattr(
        model_files, "_package_folders", lambda name: [tmp_path / "packages" / name]
    )
    shared = (tmp_path / "shared",)
    paths = Paths(tmp_path / "config", tmp_path / "state", tmp_path / "cache", shared)
    for folder in (paths.models, paths.shared_models[0]):
        folder.mkdir(parents=True)
    return ModelStore(paths, Config({key: rule.default for key, rule in KEYS.items()}))


def put(folder: Path, name: str, data: bytes = b"GGUF") -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path
