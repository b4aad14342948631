# SPDX-License-Identifier: Apache-2.0
"""Asks pvrd beside a toolkit's own loop: what gtk_summary.py and qt_summary.py share.

An event loop in a thread of its own runs the asyncio client, so that nothing blocks the window and
a job can be cancelled at any time, while its model is still being loaded, too.
"""

from __future__ import annotations

import argparse
import asyncio
import threading
from collections.abc import Callable

from pvrd.client_async import AsyncClient
from pvrd.errors import PvrdError

TEXT = "pvrd owns the GPU of a machine and serves language models and video to desktop programs."
ASK = "Summarize this text in at most 20 words:\n\n"
END_S = 2.0  # the window's thread waits so long for a job to let go


def arguments(doc: str) -> argparse.Namespace:
    """The command line of a window whose module says this of itself."""
    parser = argparse.ArgumentParser(description=doc.partition("\n")[0])
    parser.add_argument("--model", help="the text model (the default one)")
    parser.add_argument("--tokens", type=int, default=64, help="of the summary (64)")
    parser.add_argument("--press", action="store_true", help="press the button, print the answer")
    parser.add_argument("--cancel-at", type=int, metavar="N", help="press Cancel at piece N")
    parser.add_argument("--close-at", type=int, metavar="N", help="close the window at piece N")
    parser.add_argument("text", nargs="?", default=TEXT)
    return parser.parse_args()


class Writer:
    """Writes one summary at a time.

    Args:
        piece: is given each piece of the answer.
        ended: is told when the answer has ended: what went wrong, or nothing.
        Both are called in the thread of the loop; they have to hand over to the window's.
    """

    def __init__(self, piece: Callable[[str], object], ended: Callable[[str], object]) -> None:
        self._piece, self._ended = piece, ended
        self._task: asyncio.Task[None] | None = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    def start(self, text: str, model: str | None, tokens: int) -> None:
        """Begins; the one before has to have ended."""
        self._loop.call_soon_threadsafe(self._begin, text, model, tokens)

    def _begin(self, text: str, model: str | None, tokens: int) -> None:
        self._task = self._loop.create_task(self._work(text, model, tokens))

    def cancel(self) -> None:
        """Ends the job; `ended` is told as soon as pvrd has let go of it."""
        self._loop.call_soon_threadsafe(self._cancel)

    def _cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()

    def close(self) -> None:
        """Cancels, waits for that and ends the thread: for the end of the window."""
        asyncio.run_coroutine_threadsafe(self._close(), self._loop)
        self._thread.join(END_S)

    async def _close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})
        self._loop.stop()

    async def _work(self, text: str, model: str | None, tokens: int) -> None:
        problem = ""
        try:
            async with (
                await AsyncClient.connect() as client,
                await client.open_text({"model": model}) as session,
            ):
                talk = [{"role": "user", "content": ASK + text}]
                async for piece in session.chat(talk, {"max_tokens": tokens}).tokens():
                    self._piece(piece)
        except asyncio.CancelledError:
            problem = "Cancelled."
        except PvrdError as error:
            problem = str(error)
        self._task = None
        self._ended(problem)
