# SPDX-License-Identifier: Apache-2.0
"""Several sessions' next tokens in one slice: weights are read once for all of them.

A Batch is recorded over the KV caches of some states, its lanes. A slice feeds one token to each
lane. Weights are multiplied as for rows of a prompt, attention as for single tokens, so logits
differ from those of a session alone in their last digits only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager

import numpy as np
import numpy.typing as npt

from engine.errors import ContextFull, OutOfMemory
from engine.lower_batch import RECORD_STRIDE, NoBatch, lower_batch, params_at
from engine.record import recorded
from engine.text.model import State
from engine.text.sampler import RECORD_BYTES
from engine.variants import allowed

Making = AbstractContextManager[None]

MAX_LANES = 8
_KEPT = 4  # recordings that are kept


class Batch:
    """States of one model, decoded together."""

    def __init__(self, states: Sequence[State]) -> None:
        """Records.

        Raises:
            NoBatch: this model's activations cannot be bound a row at a time.
            OutOfMemory, BadModel, Quarantined
        """
        model = states[0].model
        contexts, forms = [state.context for state in states], [state.kv for state in states]
        lent = {}
        for lane, state in enumerate(states):
            for name in state.caches:
                lent[f"{name}@{lane}"] = (state.executable, name)
        backend = model.backend
        program, self.executable = recorded(
            backend,
            lambda: lower_batch(model.graph, backend.info, contexts, allowed(backend), forms),
            model.weights,
            lent,
        )
        self.states = tuple(states)
        self._vocab = model.vocab
        self._logits_stride = program.buffers["logits"].nbytes // len(states)
        self._params = np.zeros(program.buffers["params"].nbytes // 4, np.uint32)

    def has_room(self) -> bool:
        """Each lane's cache takes one more token."""
        return all(len(state.tokens) < state.context for state in self.states)

    def run(self, ids: Mapping[State, int]) -> None:
        """One slice: a token for each of these states, and the logits that follow it. Lanes that
        are left out compute something behind their tokens that nobody reads.

        Raises:
            ContextFull: a cache is full; nothing was run.
            DeviceLost
        """
        if not self.has_room():
            raise ContextFull("A context of the batch is full.")
        self._params[:3] = len(self.states), 0, len(self.states) - 1
        for lane, state in enumerate(self.states):
            at = params_at(lane) // 4
            self._params[at : at + 3] = 1, len(state.tokens), 0
        self.executable.write("params", self._params)
        words = [ids.get(state, 0) for state in self.states]
        self.executable.write("ids", np.asarray(words, np.uint32))
        self.executable.run("batch")
        for state, token in ids.items():
            state.tokens.append(token)

    def best(self, state: State) -> npt.NDArray[np.uint8]:
        """The record of `topk` for a state."""
        return self.executable.read("topk", RECORD_BYTES, self._lane(state) * RECORD_STRIDE)

    def logits(self, state: State) -> npt.NDArray[np.float32]:
        """All logits of a state."""
        at = self._lane(state) * self._logits_stride
        raw = self.executable.read("logits", 4 * self._vocab, at)
        return np.ascontiguousarray(raw).view(np.float32)

    def _lane(self, state: State) -> int:
        return self.states.index(state)

    def close(self) -> None:
        """Gives its recording back; the states stay as they are."""
        self.executable.close()


class Batches:
    """The batches that were lately of use."""

    def __init__(self) -> None:
        self._made: list[Batch] = []
        self._never: set[int] = set()  # models (by id) that cannot be batched

    def of(self, states: Sequence[State], making: Callable[[], Making]) -> Batch | None:
        """A batch that has these states, of one model, among at most twice as many lanes; None
        where there can be none. Recording takes its time, within `making`.

        Raises:
            BadModel, Quarantined
        """
        if id(states[0].model) in self._never:
            return None
        wanted = set(states)
        for batch in self._made:
            few = len(batch.states) <= 2 * len(states)
            if few and wanted <= set(batch.states) and batch.has_room():
                return batch
        try:
            with making():
                made = Batch(states)
        except NoBatch:
            self._never.add(id(states[0].model))
            return None
        except OutOfMemory:  # which each of them alone may well do without
            return None
        self._made.append(made)
        if len(self._made) > _KEPT:
            self._made.pop(0).close()
        return made

    def drop(self, state: State) -> None:
        """Gives up what was recorded over a state, before that is closed."""
        for batch in [b for b in self._made if state in b.states]:
            self._made.remove(batch)
            batch.close()
