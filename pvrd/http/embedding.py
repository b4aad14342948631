# SPDX-License-Identifier: Apache-2.0
"""Vectors of many texts: a call of pvrd takes several, as many as it can do within its time."""

from __future__ import annotations

import time
from collections.abc import Sequence

from pvrd import client_api as api
from pvrd.client_async import AsyncTextSession
from pvrd.errors import Timeout

A_CALL = 1024  # texts, at most
AIM_S = 3.0  # for a call; others have their turn in between
END_S = 20.0  # in which it has to end
FIRST = 512  # characters of the first call: little enough for any device


class Pace:
    """How many characters go into a call, by how long the last one took."""

    def __init__(self) -> None:
        self._most = FIRST

    def took(self, characters: int, seconds: float) -> None:
        """A call did so much. The next one may be four times as large."""
        fits = int(characters * AIM_S / max(seconds, 1e-3))
        self._most = max(1, min(fits, 4 * self._most))

    def cut(self, texts: Sequence[str]) -> int:
        """How many of these texts the next call takes, at least one."""
        size = 0
        for count, text in enumerate(texts[:A_CALL]):
            size += len(text)
            if count and size > self._most:
                return count
        return min(len(texts), A_CALL)


async def embedded(session: AsyncTextSession, texts: Sequence[str]) -> tuple[list[bytes], int]:
    """A vector (float32, little-endian) for each text, in order, and the tokens of all.

    Raises:
        PvrdError: of the first call that failed; there are no vectors then. A call that took too
            long is none, unless it was of one text: it is made again for fewer.
    """
    pace = Pace()
    rows: list[bytes] = []
    tokens = 0
    while len(rows) < len(texts):
        left = texts[len(rows) :]
        part = left[: pace.cut(left)]
        size, began = sum(map(len, part)), time.monotonic()
        try:
            made, count = await session.ask(api.embed_counted(part))
        except Timeout:
            if len(part) == 1:
                raise
            pace.took(size, END_S)
            continue
        pace.took(size, time.monotonic() - began)
        rows += made
        tokens += count
    return rows, tokens
