# SPDX-License-Identifier: Apache-2.0
"""What was said before makes its tokens less likely: penalties on logits, as llama.cpp orders them.

Repetition: Keskar et al., CTRL (2019), a logit is divided by the penalty where it is positive, else
multiplied. Frequency and presence: OpenAI's, subtracted. DRY ("don't repeat yourself", p-e-w, text
generation web UI 2024): a token that would make a repeated sequence of n tokens longer loses
multiplier * base ** (n - allowed length).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from engine.text.settings import Settings

LONGEST = 64  # matches of DRY are followed so far; the penalty is enormous long before
LOOK_BACK = 4096  # tokens that DRY looks at


def penalised(
    logits: npt.NDArray[np.float32], settings: Settings, history: Sequence[int]
) -> npt.NDArray[np.float32]:
    """Logits of a vocabulary after penalties and biases; `history` is prompt and answer so far."""
    out = logits.astype(np.float32, copy=True)
    for token, bias in settings.logit_bias:
        if token < len(out):
            out[token] += bias
    recent = np.asarray(history[-settings.repeat_last_n :], np.int64)
    ids, counts = np.unique(recent, return_counts=True)
    values = out[ids]
    values = np.where(
        values > 0, values / settings.repeat_penalty, values * settings.repeat_penalty
    )
    out[ids] = values - counts * settings.frequency_penalty - settings.presence_penalty
    if settings.dry_multiplier:
        for token, length in repeats(history[-LOOK_BACK:]).items():
            if (beyond := length - settings.dry_allowed_length) >= 0:
                out[token] -= settings.dry_multiplier * settings.dry_base**beyond
    return out


def repeats(history: Sequence[int]) -> dict[int, int]:
    """For each token that followed an earlier occurrence of what was said last: how many tokens of
    the end of `history` (at most LONGEST) stood before it there, the longest such run.
    """
    found: dict[int, int] = {}
    if not history:
        return found
    ids = np.asarray(history, np.int64)
    for at in np.flatnonzero(ids[:-1] == ids[-1]).tolist():
        most = min(at + 1, LONGEST)
        same = ids[at + 1 - most : at + 1] == ids[len(ids) - most :]
        length = most if same.all() else int(np.argmin(same[::-1]))
        follower = int(ids[at + 1])
        found[follower] = max(found.get(follower, 0), length)
    return found
