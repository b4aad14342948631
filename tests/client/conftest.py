# SPDX-License-Identifier: Apache-2.0
"""A bus that outlives its daemon: the real one, stopped and started again."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.daemons import Restartable


@pytest.fixture(scope="session")
def pvrd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Restartable]:
    """One daemon for the tests of a folder; a test that stops it starts it again."""
    with Restartable(tmp_path_factory.mktemp("pvrd")) as started:
        yield started
