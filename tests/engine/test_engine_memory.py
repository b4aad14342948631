# SPDX-License-Identifier: Apache-2.0
"""Large copies by several threads."""

from __future__ import annotations

import os
from collections.abc import Iterator

import numpy as np
import pytest

from engine import memory


@pytest.fixture
def cores(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A machine with cores to spare, and small copies that are large there."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)))
    monkeypatch.setattr(memory, "COPY_BYTES", 64)
    memory._copiers.cache_clear()
    yield
    pool, _ = memory._copiers()
    assert pool is not None
    pool.shutdown()
    memory._copiers.cache_clear()


@pytest.mark.usefixtures("cores")
@pytest.mark.parametrize("rows", [0, 1, 2, 7, 100, 1001])
def test_every_row_is_copied_and_nothing_else(rows: int) -> None:
    source = np.random.default_rng(rows).integers(1, 256, (rows, 50), np.uint8)
    target = np.zeros((rows + 2, 64), np.uint8)
    memory.copy(target[1:-1, :50], source)
    np.testing.assert_array_equal(target[1:-1, :50], source)
    assert not target[0].any()
    assert not target[-1].any()
    assert not target[:, 50:].any()
    assert memory._copiers()[1] == memory.COPIERS


@pytest.mark.usefixtures("cores")
def test_a_part_that_fails_is_told() -> None:
    with pytest.raises(ValueError, match="broadcast"):
        memory.copy(np.zeros((100, 8), np.uint8), np.zeros((100, 9), np.uint8))


def test_a_small_machine_copies_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    memory._copiers.cache_clear()
    target = np.zeros(8 << 20, np.uint8)
    memory.copy(target, np.ones_like(target))
    assert target.all()
    assert memory._copiers() == (None, 1)
    memory._copiers.cache_clear()
