# SPDX-License-Identifier: Apache-2.0
"""Choosing a token from logits: greedy, or top-k, top-p, min-p and temperature in this order
(llama.cpp's), or mirostat; before that penalties and biases.

The device reads back its 64 best logits and the log-sum-exp of all. That is all that greedy, a
top_k of 1..64, and mostly top_p and min_p without top_k need. When the cut would lie beyond the 64
(top_k 0 or above 64), or what was said before weighs in, the whole logits are read for that token.
Random numbers are counter-based: a
function of the seed and the token's number alone, so a generation that is resumed goes on as it
would have.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from engine.errors import DeviceLost
from engine.text.penalties import penalised
from engine.text.settings import Settings

Floats = npt.NDArray[np.float64]

CANDIDATES = 64
RECORD_BYTES = CANDIDATES * 8 + 8
_MASK = (1 << 64) - 1
_NONE = 0xFFFFFFFF  # the id of a place that no token has
_PAIR, _SUMS = struct.Struct("<If"), struct.Struct("<ff")


def _mix(x: int) -> int:
    """The finaliser of SplitMix64 (Steele, Lea and Flood 2014)."""
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


def uniform(seed: int, position: int) -> float:
    """The random number in [0, 1) that belongs to a seed and a position."""
    state = (_mix(seed & _MASK) + (position + 1) * 0x9E3779B97F4A7C15) & _MASK
    return float(_mix(state) >> 11) * 2.0**-53


class Candidates:
    """The best tokens in falling order of logits, equal ones by id, and the log-sum-exp of all
    logits.
    """

    def __init__(self, ids: npt.NDArray[np.uint32], logits: Floats, lse: float) -> None:
        self.lse = lse
        self.first = int(ids[0])
        self._made: tuple[npt.NDArray[np.uint32], Floats] | None = (ids, logits)
        self._record: npt.NDArray[np.uint8] | None = None

    @classmethod
    def parse(cls, record: npt.NDArray[np.uint8]) -> Candidates:
        """From the bytes of the `topk` buffer.

        Raises:
            DeviceLost: they are no numbers: the device computes nonsense.
        """
        first, logit = _PAIR.unpack_from(record.data)
        top, lse = _SUMS.unpack_from(record.data, 8 * CANDIDATES)
        if first == _NONE or not all(map(math.isfinite, (logit, top, lse))):
            raise DeviceLost("The device computed logits that are no numbers.")
        self = cls.__new__(cls)
        # A greedy answer asks for no more than the first of them, and not for long.
        self.lse, self.first, self._made, self._record = lse, first, None, record
        return self

    def _arrays(self) -> tuple[npt.NDArray[np.uint32], Floats]:
        if self._made is None:
            assert self._record is not None
            words = np.array(self._record[: 8 * CANDIDATES]).view(np.uint32)
            ids, logits = words[::2], words.view(np.float32)[1::2].astype(np.float64)
            count = int(((ids != _NONE) & ~np.isnan(logits)).sum())
            self._made = ids[:count], logits[:count]
        return self._made

    @property
    def ids(self) -> npt.NDArray[np.uint32]:
        """Their numbers."""
        return self._arrays()[0]

    @property
    def logits(self) -> Floats:
        """Their logits."""
        return self._arrays()[1]

    @classmethod
    def of(cls, logits: npt.NDArray[np.float32]) -> Candidates:
        """All of a vocabulary."""
        values = logits.astype(np.float64)
        order = np.lexsort((np.arange(len(values)), -values))
        top = values[order[0]]
        lse = top + math.log(np.exp(values - top).sum())
        return cls(order.astype(np.uint32), values[order], float(lse))

    def logit(self, token: int) -> float | None:
        """A token's logit; None when it is not among the candidates."""
        found = np.flatnonzero(self.ids == token)
        return float(self.logits[found[0]]) if len(found) else None

    def likeliest(self, count: int) -> list[list[float]]:
        """[[id, log of its chance], …] of the best."""
        pairs = zip(self.ids[:count], self.logits[:count] - self.lse, strict=True)
        return [[int(i), round(float(v), 6)] for i, v in pairs]

    def top5(self) -> list[list[float]]:
        """[[id, logit], …] of the five best."""
        return [[int(i), float(v)] for i, v in zip(self.ids[:5], self.logits[:5], strict=True)]


def sample(
    best: Candidates,
    settings: Settings,
    position: int,
    vocab: int,
    everything: Callable[[], npt.NDArray[np.float32]],
    history: Sequence[int] = (),
    mirostat: Mirostat | None = None,
    allowed: npt.NDArray[np.bool_] | None = None,
) -> int:
    """The id of token number `position` of an answer.

    `best` holds the device's candidates; `everything` reads all logits and is called only when they
    do not suffice. `history` is all tokens before it, `mirostat` what the answer so far left of it,
    `allowed` says of each token (those beyond its end: no) whether it may come.
    """
    greedy = settings.temperature == 0
    if greedy and not settings.penalises:
        if allowed is None:
            return best.first
        known = best.ids[best.ids < len(allowed)]
        if len(fitting := known[allowed[known]]):
            return int(fitting[0])
    if settings.penalises or allowed is not None:
        raw = everything()
        if settings.penalises:
            raw = penalised(raw, settings, history)
        if allowed is not None:
            some = np.zeros(len(raw), np.bool_)
            some[: len(allowed)] = allowed[: len(raw)]
            raw = np.where(some, raw, np.float32(-np.inf))
        best = Candidates.of(raw)
    elif not (_suffices(best, settings, vocab) if mirostat is None else len(best.ids) >= vocab):
        best = Candidates.of(everything())
    if greedy:
        return int(best.ids[0])
    chance = uniform(settings.seed, position)
    if mirostat is not None:
        return mirostat.choose(best, settings.temperature, chance)
    ids, logits = best.ids, best.logits
    if settings.top_k:
        ids, logits = ids[: settings.top_k], logits[: settings.top_k]
        lse = logits[0] + math.log(np.exp(logits - logits[0]).sum())
    else:
        lse = best.lse
    p = np.exp(logits - lse)
    keep = len(p)
    if settings.top_p < 1:
        keep = min(keep, int(np.searchsorted(np.cumsum(p), settings.top_p)) + 1)
    if settings.min_p > 0:
        keep = min(keep, max(1, int((p >= settings.min_p * p[0]).sum())))
    return int(ids[_draw(logits[:keep], settings.temperature, chance)])


def _draw(logits: Floats, temperature: float, chance: float) -> int:
    """Which of these logits, in falling order, a random number in [0, 1) means."""
    total = np.cumsum(np.exp((logits - logits[0]) / temperature))
    return min(int(np.searchsorted(total, chance * total[-1], side="right")), len(logits) - 1)


@dataclass
class Mirostat:
    """Mirostat 2.0 (Basu et al., ICLR 2021): tokens whose surprise, in bits, is above `mu` are left
    out, and mu follows the surprise of what was chosen towards `tau`. It is a function of the
    logits so far: whoever resumes an answer is told it (`resumes`), or has to see them again
    (`follow`).
    """

    tau: float
    eta: float
    mu: float

    @classmethod
    def of(cls, settings: Settings) -> Mirostat | None:
        """The start of an answer's; None when it is not asked for."""
        if settings.mirostat != 2 or settings.temperature == 0:
            return None
        return cls(settings.mirostat_tau, settings.mirostat_eta, 2 * settings.mirostat_tau)

    def resumes(self, notes: Mapping[str, float], delivered: int) -> bool:
        """Goes on from another's value after so many tokens; False when that is not told."""
        mu = notes.get("mirostat", math.nan)
        if notes.get("tokens") != delivered or not math.isfinite(mu):
            return False
        self.mu = mu
        return True

    def choose(self, best: Candidates, temperature: float, chance: float) -> int:
        """A token of all candidates of a vocabulary."""
        keep, surprise = self._kept(best, temperature)
        at = _draw(best.logits[:keep], temperature, chance)
        self._learn(surprise[:keep], at)
        return int(best.ids[at])

    def follow(self, best: Candidates, temperature: float, token: int) -> None:
        """Learns from a token that was chosen before."""
        keep, surprise = self._kept(best, temperature)
        at = int(np.flatnonzero(best.ids == token)[0])
        self._learn(surprise[: max(keep, at + 1)], at)

    def _kept(self, best: Candidates, temperature: float) -> tuple[int, Floats]:
        warm = best.logits / temperature
        surprise = (warm[0] + math.log(np.exp(warm - warm[0]).sum()) - warm) / math.log(2)
        return max(1, int((surprise <= self.mu).sum())), surprise

    def _learn(self, surprise: Floats, at: int) -> None:
        """From the surprise of token `at` among those that were left, their chances summing to
        one.
        """
        left = np.exp2(-surprise).sum()
        self.mu -= self.eta * (float(surprise[at] + math.log2(left)) - self.tau)


def _suffices(best: Candidates, settings: Settings, vocab: int) -> bool:
    """Whether no token beyond the candidates can be chosen or change another's share."""
    count = len(best.ids)
    if count >= vocab or 0 < settings.top_k <= count:
        return True
    if settings.top_k:
        return False  # their sum decides about top_p
    p = np.exp(best.logits - best.lse)
    by_p = settings.top_p < 1 and float(p.sum()) >= settings.top_p
    return by_p or (settings.min_p > 0 and bool(p[-1] < settings.min_p * p[0]))
