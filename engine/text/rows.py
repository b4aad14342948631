# SPDX-License-Identifier: Apache-2.0
"""Several tokens of one session in a slice, with the logits after each: what guesses are checked
with (engine/text/guess.py).

Recorded over the session's own caches. On a CPU the logits are those of single tokens to the last
digit where no matrix holds halves, whose products add in another order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from engine.errors import ContextFull
from engine.lower_batch import RECORD_STRIDE, lower_rows, params_at
from engine.record import recorded
from engine.text.guess import SIZES, size_of
from engine.text.sampler import RECORD_BYTES
from engine.variants import allowed

if TYPE_CHECKING:
    from engine.text.model import State


class Rows:
    """What a state has for it."""

    def __init__(self, state: State) -> None:
        """Records.

        Raises:
            NoBatch: this model's activations cannot be bound a row at a time.
            OutOfMemory, BadModel
        """
        model = state.model
        backend = model.backend
        lent = {name: (state.executable, name) for name in state.caches}
        program, self.executable = recorded(
            backend,
            lambda: lower_rows(
                model.graph, backend.info, state.context, SIZES, allowed(backend), state.kv
            ),
            model.weights,
            lent,
        )
        self._state = state
        self._vocab = model.vocab
        self._stride = program.buffers["logits"].nbytes // SIZES[-1]
        self._params = np.zeros(program.buffers["params"].nbytes // 4, np.uint32)

    def run(self, ids: list[int]) -> None:
        """One slice: feeds 2 to SIZES[-1] tokens after those in the cache.

        Raises:
            ContextFull: they do not fit.
        """
        tokens = self._state.tokens
        if not 2 <= len(ids) <= SIZES[-1]:
            raise ValueError(f"{len(ids)} tokens in a slice of 2 to {SIZES[-1]}")
        if len(tokens) + len(ids) > self._state.context:
            raise ContextFull(f"The context of {self._state.context} tokens is full.")
        self._params[:3] = len(ids), len(tokens), len(ids) - 1
        for row in range(SIZES[-1]):  # those that are not there attend to what the last does
            at = params_at(row) // 4
            self._params[at : at + 3] = 1, len(tokens) + min(row, len(ids) - 1), 0
        self.executable.write("params", self._params)
        self.executable.write("ids", np.asarray(ids, np.uint32))
        self.executable.run(f"rows{size_of(len(ids))}")
        tokens.extend(ids)

    def best(self, row: int) -> npt.NDArray[np.uint8]:
        """The record of `topk` after a token of the slice."""
        return self.executable.read("topk", RECORD_BYTES, row * RECORD_STRIDE)

    def logits(self, row: int) -> npt.NDArray[np.float32]:
        """All logits after a token of the slice."""
        raw = self.executable.read("logits", 4 * self._vocab, row * self._stride)
        return np.ascontiguousarray(raw).view(np.float32)

    def close(self) -> None:
        """Gives its recording back, before the state's."""
        self.executable.close()
