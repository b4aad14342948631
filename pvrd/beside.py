# SPDX-License-Identifier: Apache-2.0
"""What may wait for a file system or the kernel, done beside the event loop and waited for only so
long: the server of a file system may be gone, and an open() or stat() there never comes back.

Work is done in lanes, one thing after the other in each: a thread that hangs keeps its own lane
alone, and however often it is asked for, no further thread hangs there. A lane without work has no
thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

from pvrd.errors import OutOfMemory, Timeout

ANSWER_S = 5.0

_T = TypeVar("_T")
_Work = Callable[[], None]

_lock = threading.Lock()
_lanes: dict[str, deque[_Work]] = {}


def put(lane: str, work: _Work) -> None:
    """Has it done in the lane, some time. What it raises is nobody's matter.

    Raises:
        OutOfMemory: there is no thread to be had.
    """
    with _lock:
        if (waiting := _lanes.get(lane)) is not None:
            waiting.append(work)
            return
        _lanes[lane] = deque([work])
        try:
            threading.Thread(target=_run, args=(lane,), name=f"pvrd {lane}", daemon=True).start()
        except RuntimeError as e:
            del _lanes[lane]
            raise OutOfMemory(f"pvrd gets no more from the system: {e}") from None


def sure(lane: str, work: _Work) -> None:
    """As put(), but done here and now where there is no thread to be had."""
    try:
        put(lane, work)
    except OutOfMemory:
        work()


def _run(lane: str) -> None:
    while True:
        with _lock:
            if not _lanes[lane]:
                del _lanes[lane]
                return
            work = _lanes[lane].popleft()
        with contextlib.suppress(Exception):
            work()


async def ask(
    lane: str,
    what: str,
    function: Callable[[], _T],
    late: Callable[[_T], None] | None = None,
    seconds: float | None = None,
) -> _T:
    """What the function returns or raises.

    Args:
        what: for the sentence, "WHAT does not answer within 5 s".
        late: takes back (in the lane) what came when nobody waited any more: an fd is closed.
        seconds: instead of ANSWER_S.

    Raises:
        Timeout: it takes longer. OutOfMemory: there is no thread to be had.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[_T] = loop.create_future()
    limit = ANSWER_S if seconds is None else seconds

    def settle(value: Any, error: BaseException | None) -> None:
        if future.done():
            if error is None:
                give_back(value)
        elif error is not None:
            future.set_exception(error)
        else:
            future.set_result(value)

    def run() -> None:
        if future.done():
            return  # who asked waits no more
        value: Any = None
        error: BaseException | None = None
        try:
            value = function()
        except BaseException as e:
            error = e
        try:
            loop.call_soon_threadsafe(settle, value, error)
        except RuntimeError:  # the loop has ended meanwhile
            if error is None and late is not None:
                late(value)

    def give_back(value: _T) -> None:
        if late is not None:
            sure(lane, functools.partial(late, value))

    put(lane, run)
    taken = False
    try:
        await asyncio.wait([future], timeout=limit)
        if not future.done():
            raise Timeout(f"{what} does not answer within {limit:g} s")
        taken = True
        return future.result()
    finally:
        if not taken and not future.cancel() and future.exception() is None:
            give_back(future.result())


async def done(lane: str, work: _Work) -> None:
    """Has it done, whoever waits for it, and waits for that at most ANSWER_S."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[None] = loop.create_future()

    def run() -> None:
        try:
            work()
        finally:
            with contextlib.suppress(RuntimeError):  # the loop has ended meanwhile
                loop.call_soon_threadsafe(_settled, future)

    sure(lane, run)
    await asyncio.wait([future], timeout=ANSWER_S)


def _settled(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
