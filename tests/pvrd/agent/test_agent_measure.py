# SPDX-License-Identifier: Apache-2.0
"""Figures from frames, with a clock of the test's own."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pvrd.agent.measure import MOST_MISSED, Frame, figures, missed_refreshes, together

HZ60 = 16_666_667


def frames(*steps: float, counter: bool = True, late: float = 0.0) -> list[Frame]:
    """Presentations `steps` refreshes apart, each committed 0.95 of a refresh before it; the agent
    waited `late` refreshes for a processor."""
    out = [Frame(0, HZ60, HZ60, 100 if counter else 0)]
    for step in steps:
        before = out[-1]
        out.append(
            Frame(
                int(before.presented + (step - 0.95) * HZ60),
                int(before.presented + step * HZ60),
                HZ60,
                before.seq + int(step) if counter else 0,
                int(late * HZ60),
            )
        )
    return out


def test_frames_in_a_row_miss_nothing() -> None:
    found = figures(frames(1, 1, 1, 1))
    assert (found.frames, found.missed, found.missed_per_s) == (4, 0, 0.0)
    assert found.refresh_hz == pytest.approx(60.0)
    assert found.latency_ms == pytest.approx(0.95 * HZ60 / 1e6)


@pytest.mark.parametrize("counter", [True, False])
def test_gaps_are_missed_refreshes(counter: bool) -> None:
    found = figures(frames(1, 4, 1, 2, counter=counter))
    assert found.missed == 4
    assert found.missed_per_s == pytest.approx(4 * 60 / 8)


def test_without_a_counter_half_a_refresh_is_no_miss() -> None:
    # Weston without a screen shows a frame each one and a half refreshes when it is left as it is.
    assert figures(frames(1.5, 1.5, 1.5, counter=False)).missed == 0
    assert figures(frames(1.8, counter=False)).missed == 1


def test_our_own_delay_is_not_the_compositors() -> None:
    assert figures(frames(3, late=2.1)).missed == 0
    # So late in a refresh it may have begun to draw the next one.
    assert figures(frames(2, late=0.6)).missed == 0
    assert figures(frames(5, late=2.1)).missed == 2


def test_what_the_compositor_does_not_tell_is_unknown() -> None:
    found = figures([Frame(0, 5_000_000, 0, 0), Frame(6_000_000, 9_000_000, 0, 0)])
    assert (found.missed_per_s, found.refresh_hz, found.latency_ms) == (None, None, 3.0)
    nothing = figures(frames())
    assert (nothing.frames, nothing.latency_ms) == (0, None)


def test_a_suspended_machine_is_no_endless_load() -> None:
    found = figures(frames(1e6))
    assert found.missed == MOST_MISSED
    assert found.missed_per_s is not None
    assert found.refresh_hz is not None
    assert found.missed_per_s <= found.refresh_hz


def test_one_miss_counts_over_two_bursts() -> None:
    calm, one = figures(frames(*[1] * 24)), figures(frames(*[1] * 22, 2))
    assert together(None, one).missed_per_s == pytest.approx(60 / 24)
    assert together(calm, one).missed_per_s == pytest.approx(60 / 48)
    assert together(one, calm).missed_per_s == pytest.approx(60 / 48)
    unknown = figures([Frame(0, 5, 0, 0), Frame(6, 9, 0, 0)])
    assert together(one, unknown) == unknown
    assert together(unknown, one) == one


@given(
    st.integers(-(10**12), 10**12), st.integers(-(10**9), 10**12), st.integers(0, 1 << 40),
    st.integers(0, 1 << 40), st.integers(1, 10**9),
)  # fmt: skip
def test_any_times_give_a_number_in_its_bounds(
    presented: int, waited: int, seq: int, later: int, refresh: int
) -> None:
    before = Frame(0, 10**9, refresh, seq)
    after = Frame(0, 10**9 + presented, refresh, later, waited)
    assert 0 <= missed_refreshes(before, after, refresh) <= MOST_MISSED
