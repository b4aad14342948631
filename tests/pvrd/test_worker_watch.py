# SPDX-License-Identifier: Apache-2.0
"""The watch over a worker ends with it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from pvrd.config import KEYS, Config
from pvrd.worker import Worker
from pvrd.worker_pulse import Pulse


@pytest.mark.parametrize("turns", range(6))
def test_a_watch_that_is_stirred_while_it_is_cancelled_ends(turns: int) -> None:
    """Whatever turn of the loop the cancelling meets: a watch without a worker would look for it a
    thousand times a second.
    """

    async def scene() -> None:
        config = Config({key: rule.default for key, rule in KEYS.items()})
        worker = Worker("cpu", config, "", lambda: None)
        link: Any = object()
        worker._link = link
        worker._pulse = Pulse(asyncio.get_running_loop().time())
        worker._pulse.greeted = True
        watch = asyncio.create_task(worker._watch(link))
        for _ in range(3):
            await asyncio.sleep(0)
        worker._stir.set()
        worker._link = None
        for _ in range(turns):
            await asyncio.sleep(0)
        watch.cancel()
        done, _ = await asyncio.wait({watch}, timeout=5.0)
        assert done == {watch}

    asyncio.run(scene())
