# SPDX-License-Identifier: Apache-2.0
"""Figures of the benchmark of good neighbourhood, from frames of the test's own."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.qos_clients import shown
from benchmarks.qos_control import Reading, Times, rows

MS = 1_000_000


def run(*times_ms: float, refresh_ms: float = 10.0) -> dict[str, Any]:
    """Frames presented at these times of a run from 0 to 1000 ms, each committed 4 ms before."""
    frames = [[int((at - 4) * MS), int(at * MS), int(refresh_ms * MS), 0] for at in times_ms]
    return {"begin": 0, "end": 1000 * MS, "frames": frames, "discarded": 0}


def test_a_frame_each_refresh_misses_none() -> None:
    found = shown(run(*(10.0 * i for i in range(1, 101))))
    assert (found.per_s, found.missed_per_s) == (100.0, 0.0)
    assert (found.latency_ms, found.latency_p99_ms, found.longest_ms) == (4.0, 4.0, 10.0)


def test_gaps_are_missed_also_at_the_ends() -> None:
    found = shown(run(*(10.0 * i for i in range(1, 101) if i not in (40, 41, 99, 100))))
    assert (found.per_s, found.missed_per_s, found.longest_ms) == (96.0, 3.0, 30.0)


def test_what_lies_outside_of_the_run_does_not_count() -> None:
    found = shown(run(-5.0, *(10.0 * i for i in range(1, 101)), 1003.0))
    assert found.per_s == 100.0


@pytest.mark.parametrize("result", [run(10.0), run(*range(10, 500, 10), refresh_ms=0.0)])
def test_without_times_there_are_no_figures(result: dict[str, Any]) -> None:
    with pytest.raises(SystemExit, match="presented"):
        shown(result)


def test_reads_are_medians_of_rounds_not_the_best_one() -> None:
    def round_of(p99: float) -> Reading:
        return Reading(Times([1.0] * 98 + [p99, p99]), Times([0.5] * 98 + [2.0, 2.0]), 0.2, 0.1)

    idle, busy = [round_of(2.0)] * 3, [round_of(p99) for p99 in (3.0, 9.0, 8.0)]
    found = rows(idle, busy, "cpu")
    target, against_idle, against_bus = found[:3]
    assert (target.ours, target.peer, target.ratio) == (8.0, 5.0, 5 / 8)
    assert (against_idle.peer, against_bus.peer) == (2.0, 2.0)
    assert {row.ours for row in found if "median" in row.name} == {1.0}
