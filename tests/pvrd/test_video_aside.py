# SPDX-License-Identifier: Apache-2.0
"""A frame that was late since its worker computed samples of its work again is not held against the
level that made it.
"""

from __future__ import annotations

from typing import Any, cast

import pytest

from pvrd.video_seat import Seat
from tests.pvrd.test_video_frames import World


def late(message: dict[str, Any]) -> World:
    """A session whose only frame came 2 ms after its deadline."""
    world = World(0)
    world.gpu.worker.speed = 0.0  # the word comes by hand
    world.now = 1.0
    world.submit()
    world.pump()
    (issued,) = world.gpu.worker.queue
    assert (issued["level"], issued["issued_ns"]) == (0, 1_000_000_000)
    world.now = world.sent[0] + 0.002
    word = {"seq": 0, "level": 0, "ms": 16.0, **message}
    world.line.done(cast("Seat", world.gpu), word, 0.0, world.now)
    return world


def test_a_frame_that_was_late_by_a_check_alone_costs_no_level() -> None:
    assert late({}).ladder.at > 0
    world = late({"aside_ms": 86.0})
    assert world.ladder.at == 0
    assert world.ladder.levels[0].takes == pytest.approx(0.018, abs=0.004)


def test_nor_does_one_that_was_given_up_for_it() -> None:
    gone = {"given_up": True, "part": 0.8}
    assert late(gone).ladder.at > 0
    assert late({**gone, "aside_ms": 86.0}).ladder.at == 0
    assert late({**gone, "aside_ms": 10.0}).ladder.at > 0  # it would have been late anyway


@pytest.mark.parametrize("aside", [-5.0, "much", None, 1])
def test_what_a_worker_says_of_it_is_held_to_what_can_be(aside: Any) -> None:
    assert late({"aside_ms": aside}).ladder.at > 0
    assert late({"aside_ms": 1e9}).ladder.levels[0].takes == pytest.approx(0.0165, abs=0.004)
