# SPDX-License-Identifier: Apache-2.0
"""Which of some labels fits a text: by how likely the model is to say each after a question.

A label's score is the mean log chance of its tokens after the text, less the same without a text:
what the model says anyway counts for nothing (Holtzman et al., "Surface form competition", EMNLP
2021; Zhao et al., "Calibrate before use", ICML 2021).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from engine.errors import ContextFull, InvalidArgument
from engine.text.model import State

MAX_LABELS = 64
_NOTHING = "N/A"


class Classification:
    """`scores`: for each label its share, in sum 1, once `step` says that there is nothing left."""

    def __init__(
        self,
        state: State,
        text: str,
        labels: Sequence[str],
        question: str = "",
        calibrate: bool = True,
    ) -> None:
        """`question` stands before the text; "" for one that names the labels.

        Raises:
            InvalidArgument: fewer than two labels, too many, an empty or a double one; no text.
            ContextFull: the text is too long.
        """
        if not 2 <= len(labels) <= MAX_LABELS or len(set(labels)) != len(labels):
            raise InvalidArgument(f"There are 2 to {MAX_LABELS} labels, each once.")
        if not text.strip() or not all(label.strip() for label in labels):
            raise InvalidArgument("The text or a label is empty.")
        self._state = state
        question = question or f"Which of these fits the text: {', '.join(labels)}?"
        texts = [text, _NOTHING] if calibrate else [text]
        self._prompts = [_prompt(state, question, t) for t in texts]
        lead = "" if state.model.info["chat"] else " "
        encode = state.model.tokenizer.encode_inside
        self._labels = [encode(lead + label.strip()) for label in labels]
        longest = max(map(len, self._prompts)) + max(map(len, self._labels))
        if longest > state.context:
            raise ContextFull(
                f"The text has {longest} tokens with its question; the context has {state.context}."
            )
        self.tokens = sum(map(len, self._prompts))
        self.scores: dict[str, float] = dict.fromkeys(labels, 0.0)
        self._slices = self._run()

    def step(self) -> bool:
        """One slice; False when that was not needed any more.

        Raises:
            DeviceLost
        """
        return next(self._slices, None) is not None

    @property
    def best(self) -> str:
        """The label with the greatest share."""
        return max(self.scores, key=lambda label: self.scores[label])

    def _run(self) -> Iterator[int]:
        values = np.zeros((len(self._prompts), len(self._labels)))
        for row, prompt in zip(values, self._prompts, strict=True):
            yield from self._feed(prompt)
            first = _log_softmax(self._state.logits())
            for n, label in enumerate(self._labels):
                total = float(first[label[0]])
                for at in range(1, len(label)):
                    yield from self._feed([*prompt, *label[:at]])
                    total += float(_log_softmax(self._state.logits())[label[at]])
                row[n] = total / len(label)
        points = values[0] - values[1] if len(values) == 2 else values[0]
        shares = np.exp(points - points.max())
        self.scores = dict(zip(self.scores, (shares / shares.sum()).tolist(), strict=True))

    def _feed(self, ids: list[int]) -> Iterator[int]:
        """Slices that lead to the logits after these ids."""
        state = self._state
        at = state.common(ids[:-1])
        while at < len(ids):
            end = min(at + state.piece, len(ids))
            state.run(ids[at:end], head=end == len(ids))
            yield at
            at = end


def _log_softmax(logits: npt.NDArray[np.float32]) -> npt.NDArray[np.float64]:
    values = logits.astype(np.float64)
    values -= values.max()
    return values - math.log(np.exp(values).sum())


def _prompt(state: State, question: str, text: str) -> list[int]:
    """Ids of the question about a text, up to where the label is said."""
    model = state.model
    if model.info["chat"]:
        content = f"{question}\n\n{text}\n\nAnswer with the label alone."
        return model.tokenizer.encode_pieces(
            model.template.render([{"role": "user", "content": content}])
        )
    return model.tokenizer.encode(f"{question}\n\nText: {text}\nLabel:")
