# SPDX-License-Identifier: Apache-2.0
"""How much memory there is, and large copies by several threads."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from engine import memory
from engine.errors import OutOfMemory


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


def test_available_memory(tmp_path: Path) -> None:
    assert memory.available(tmp_path) == 1 << 62
    assert 0 < memory.available() < 1 << 50
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text("MemTotal: 9 kB\nMemAvailable:  2048 kB\n")
    assert memory.available(tmp_path) == 2 << 20
    (tmp_path / "proc/self/cgroup").write_text("0::/a.slice/b\n")
    group = tmp_path / "sys/fs/cgroup/a.slice/b"
    group.mkdir(parents=True)
    (group / "memory.max").write_text("max\n")
    assert memory.available(tmp_path) == 2 << 20
    (group / "memory.max").write_text(f"{3 << 20}\n")
    (group / "memory.current").write_text(f"{2 << 20}\n")
    (group / "memory.stat").write_text(f"anon 5\ninactive_file {1 << 19}\n")
    assert memory.available(tmp_path) == (3 << 20) - (3 << 19)
    memory.admit({"x": 5}, (64 << 20) + 5)
    with pytest.raises(OutOfMemory, match=r"needs 200 MiB \(a 150 MiB, b 50 MiB\); 100 MiB"):
        memory.admit({"a": 150 << 20, "b": 50 << 20}, 100 << 20)
