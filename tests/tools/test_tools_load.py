# SPDX-License-Identifier: Apache-2.0
"""Many clients at once: figures of the benchmark, and a small crowd on a real bus."""

from __future__ import annotations

from argparse import Namespace

import pytest

from benchmarks.load import jain, measure, p99


def test_jain_is_one_for_equal_shares_and_one_nth_for_one_winner() -> None:
    assert jain([3.0] * 7) == pytest.approx(1.0)
    assert jain([5.0, 0.0, 0.0, 0.0]) == pytest.approx(0.25)
    assert jain([0.0, 0.0]) == 1.0


def test_p99_is_the_99th_of_100() -> None:
    assert p99([i / 1000 for i in range(100)]) == pytest.approx(99.0)
    assert p99([]) == 0.0


@pytest.mark.bus
def test_a_crowd_is_served_whole_and_the_rest_is_told_to_wait() -> None:
    """More clients than quotas let in: measure() itself fails over a wrong or lost answer."""
    crowd = Namespace(quick=True, seconds=1.0, threads=1, sessions=3, clients=12, model="tiny")
    rows = {row.name: row.ours for row in measure(crowd)}
    assert rows["12 clients at once: refused"] > 0
    assert rows["12 clients at once: Jain's index"] == pytest.approx(1.0)
    assert rows["3 sessions: tokens"] > 0
    assert all(value < 16 for name, value in rows.items() if name.endswith("pvrd grows"))
