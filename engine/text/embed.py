# SPDX-License-Identifier: Apache-2.0
"""Vectors for texts: the model's last hidden states, normalised, pooled, of length 1."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt

from engine.errors import ContextFull, InvalidArgument
from engine.text.model import State

Pooling = Literal["mean", "last"]


class Embedding:
    """Texts become rows of `result` (float32 [texts, width]); `step` runs a slice."""

    def __init__(self, state: State, texts: Sequence[str], pooling: Pooling = "mean") -> None:
        """Raises:
        InvalidArgument: no text, or an empty one.
        ContextFull: a text is too long.
        """
        model = state.model
        self._ids = [model.tokenizer.encode(text) for text in texts]
        if not self._ids or not all(self._ids):
            raise InvalidArgument("There is no text to embed, or one is empty.")
        longest = max(map(len, self._ids))
        if longest > state.context:
            raise ContextFull(f"A text has {longest} tokens; the context has {state.context}.")
        self._state = state
        self._pooling = pooling
        self.tokens = sum(map(len, self._ids))
        self.result = np.zeros((len(texts), model.width), np.float32)
        self._slices = self._run()

    def step(self) -> bool:
        """One slice; False when that was not needed any more.

        Raises:
            DeviceLost
        """
        return next(self._slices, None) is not None

    def _run(self) -> Iterator[int]:
        state = self._state
        for row, ids in zip(self.result, self._ids, strict=True):
            state.common([])
            total = np.zeros(state.model.width)
            at = 0
            while at < len(ids):
                part = ids[at : at + state.piece]
                state.run(part, head=False, hidden=True)
                hidden = state.hidden(len(part)).astype(np.float64)
                total = total + hidden.sum(0) if self._pooling == "mean" else hidden[-1]
                at += len(part)
                yield at
            row[:] = _unit(total)


def _unit(vector: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    return vector / max(float(np.sqrt(vector @ vector)), 1e-30)
