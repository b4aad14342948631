# SPDX-License-Identifier: Apache-2.0
"""What may never answer is waited for beside the loop, and only so long."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest

from pvrd import beside
from pvrd.errors import OutOfMemory, Timeout
from tests.buses import until
from tests.pvrd.conftest import LONG


class Stuck:
    """Something that hangs until `wake`."""

    def __init__(self) -> None:
        self.wake = threading.Event()
        self.begun: list[threading.Thread] = []
        self.returned: list[str] = []

    def __call__(self) -> str:
        self.begun.append(threading.current_thread())
        assert self.wake.wait(LONG)
        return "late"


def test_answers_and_errors_come_through() -> None:
    async def main() -> None:
        assert await beside.ask("a", "it", lambda: 7) == 7
        with pytest.raises(ZeroDivisionError):
            await beside.ask("a", "it", lambda: 1 / 0)

    asyncio.run(main())


def test_one_thread_hangs_and_holds_up_its_own_lane_alone() -> None:
    stuck = Stuck()
    ran: list[int] = []

    async def main() -> None:
        asked = 0
        while asked < 3 or not stuck.begun:
            asked += 1
            with pytest.raises(Timeout, match=r"^it does not answer within 0\.05 s$"):
                await beside.ask("dead", "it", stuck, stuck.returned.append, 0.05)
        with pytest.raises(Timeout):
            await beside.ask("dead", "it", lambda: ran.append(1), seconds=0.05)
        assert await beside.ask("sound", "it", lambda: "sound") == "sound"
        stuck.wake.set()
        await beside.done("dead", lambda: None)
        await beside.done("dead", lambda: None)  # behind what came late

    asyncio.run(main())
    assert len(stuck.begun) == 1, "who waits no more is not served later"
    assert not ran
    assert stuck.returned == ["late"]
    until(lambda: "dead" not in beside._lanes, "the end of the thread")


@pytest.mark.parametrize("when", ["before", "after"])
def test_what_comes_for_one_that_was_cancelled_is_given_back(when: str) -> None:
    """Be it there already, or not yet."""
    stuck = Stuck()

    async def main() -> None:
        loop = asyncio.get_running_loop()
        task = loop.create_task(beside.ask("x", "it", stuck, stuck.returned.append))
        while not stuck.begun:
            await asyncio.sleep(0)
        if when == "after":
            stuck.wake.set()
            stuck.begun[0].join(LONG)  # its answer waits for the loop now
            loop.call_soon(loop.call_soon, task.cancel)
        else:
            task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        stuck.wake.set()
        for _ in range(2):
            await beside.done("x", lambda: None)

    asyncio.run(main())
    assert stuck.returned == ["late"]


def test_without_a_thread_it_is_a_shortage(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: Any, **__: Any) -> None:
        raise RuntimeError("can't start new thread")

    ran: list[str] = []
    work: Callable[[], None] = lambda: ran.append("here")  # noqa: E731
    monkeypatch.setattr(threading.Thread, "start", none)
    with pytest.raises(OutOfMemory, match="can't start new thread"):
        asyncio.run(beside.ask("a", "it", work))
    beside.sure("a", work)
    assert ran == ["here"]
