# SPDX-License-Identifier: Apache-2.0
"""When a stream's next frame is expected, and what that lets go together."""

from __future__ import annotations

import pytest

from engine.backends.vulkan.segments import Part
from engine.pace import LIMIT
from pvrd.workers.arrivals import EARLY_S, KNOWN, Arrivals
from pvrd.workers.paced import Cut
from pvrd.workers.timings import Meter


def stream(arrivals: Arrivals, name: str, *times: float) -> None:
    arrivals.opened(name)
    for at in times:
        arrivals.came(name, at)


def test_a_steady_stream_is_calm_until_its_next_frame() -> None:
    arrivals = Arrivals()
    stream(arrivals, "a", *(0.04 * i for i in range(KNOWN)))
    last = 0.04 * KNOWN
    assert arrivals.calm(last) == 0.0  # too few are known
    arrivals.came("a", last)
    assert arrivals.calm(last) == pytest.approx(0.04 - EARLY_S)
    assert arrivals.calm(last + 0.01) == pytest.approx(0.03 - EARLY_S)
    assert arrivals.calm(last + 0.04) == arrivals.calm(last + 5.0) == 0.0  # it is late, or gone


def test_the_shortest_time_between_frames_counts_and_uneven_ones_tell_nothing() -> None:
    arrivals = Arrivals()
    stream(arrivals, "a", 0.0, 0.04, 0.08, 0.117, 0.157)
    assert arrivals.calm(0.157) == pytest.approx(0.037 - EARLY_S)
    arrivals.came("a", 0.23)
    assert arrivals.calm(0.23) == 0.0


def test_of_several_streams_the_next_frame_counts() -> None:
    arrivals = Arrivals()
    stream(arrivals, "a", *(0.04 * i for i in range(6)))
    stream(arrivals, "b", *(0.01 + 0.04 * i for i in range(5)))
    assert arrivals.calm(0.2) == pytest.approx(0.01 - EARLY_S)  # b's
    assert arrivals.calm(0.209) == 0.0
    arrivals.came("b", 0.21)
    assert arrivals.calm(0.21) == pytest.approx(0.03 - EARLY_S)  # a's
    stream(arrivals, "c")
    assert arrivals.calm(0.21) == 0.0  # nobody knows when c's come
    arrivals.closed("c")
    arrivals.closed("c")
    assert arrivals.calm(0.21) > 0.0
    assert Arrivals().calm(0.0) == 0.0


def test_where_no_frame_is_expected_as_much_goes_together_as_without_streams() -> None:
    gate = Meter().gate
    cut, rhythm = Cut(gate, None), gate.rhythm
    token = [Part(("ahead",), 2, number, 2) for number in range(2)]
    runs = [(token[0],), tuple(token), (*token, *token), (*token, *token, *token)]
    calm = [0.0]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LIMIT, "streams", 1)
        patch.setattr(rhythm, "alone", lambda kind: 1.5e-3 if kind[-1][3] == 1 else 0.0)
        patch.setattr(rhythm, "room", lambda now: 9.5e-3)
        patch.setattr(gate.arrivals, "calm", lambda now: calm[0])
        found = []
        for calm[0] in (0.0, 3e-3, 6.5e-3, 0.03):
            found.append(len(cut._longest((), runs)))
    assert found == [2, 2, 4, 6]
