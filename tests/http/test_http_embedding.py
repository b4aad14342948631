# SPDX-License-Identifier: Apache-2.0
"""How many texts go into one call of pvrd."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from pvrd.errors import Timeout
from pvrd.http.embedding import A_CALL, AIM_S, FIRST, Pace, embedded

HUNDRED = ["x" * 100] * 3000


def test_the_first_call_is_little_and_what_goes_fast_grows() -> None:
    pace = Pace()
    calls = []
    for _ in range(6):
        calls.append(pace.cut(HUNDRED))
        pace.took(100 * calls[-1], 0.01)
    assert calls[0] == FIRST // 100
    assert calls == sorted(calls)
    assert calls[1] == 4 * FIRST // 100
    assert calls[-1] == A_CALL, "pvrd takes no more"


def test_a_call_takes_what_the_device_can_do_in_its_time() -> None:
    pace = Pace()
    for _ in range(8):
        count = pace.cut(HUNDRED)
        pace.took(100 * count, count / 50)  # 50 texts a second
    assert count == 50 * AIM_S
    pace.took(100 * count, count / 2)  # and now two
    assert pace.cut(HUNDRED) == 2 * AIM_S


def test_a_text_that_is_too_much_goes_alone() -> None:
    pace = Pace()
    assert pace.cut(["x" * 10 * FIRST, "y"]) == 1
    assert pace.cut(["y", "x" * 10 * FIRST, "y"]) == 1
    pace.took(10, 1e9)
    assert pace.cut(HUNDRED) == 1
    assert pace.cut(["y"]) == 1


class Slow:
    """A session that ends no call of more than `most` texts."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.calls: list[int] = []

    async def ask(self, call: Any) -> tuple[list[bytes], int]:
        texts = call.body[0]
        self.calls.append(len(texts))
        if len(texts) > self.most:
            raise Timeout("the answer takes longer than 20 s; ask for less at a time")
        return [text.encode() for text in texts], len(texts)


def test_what_took_too_long_is_asked_for_in_less() -> None:
    session, texts = Slow(3), [f"text {n}" for n in range(200)]
    rows, tokens = asyncio.run(embedded(cast("Any", session), texts))
    assert [row.decode() for row in rows] == texts
    assert tokens == len(texts)
    assert max(session.calls) > 3
    with pytest.raises(Timeout):
        asyncio.run(embedded(cast("Any", Slow(0)), texts))
