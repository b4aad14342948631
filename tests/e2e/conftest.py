# SPDX-License-Identifier: Apache-2.0
"""A private bus with the real daemon and its real workers on it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.daemons import Daemon, write_tiny


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of models of all daemons."""
    folder = tmp_path_factory.mktemp("models")
    write_tiny(folder)
    return folder


@pytest.fixture
def daemon(tmp_path: Path, models: Path) -> Iterator[Callable[..., Daemon]]:
    """Starts a daemon: daemon({"gpu.allow_software": True})."""
    with ExitStack() as stack:

        def start(config: Mapping[str, Any] | None = None) -> Daemon:
            return stack.enter_context(Daemon(tmp_path, models, config or {}))

        yield start
