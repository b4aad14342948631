# SPDX-License-Identifier: Apache-2.0
"""Choosing a token from logits: greedy, or top-k, top-p, min-p and temperature in this order
(llama.cpp's).

The device reads back its 64 best logits and the log-sum-exp of all. That is all that greedy, a
top_k of 1..64, and mostly top_p and min_p without top_k need. When the cut would lie beyond the 64
(top_k 0 or above 64), the whole logits are read for that token. Random numbers are counter-based: a
function of the seed and the token's number alone, so a generation that is resumed goes on as it
would have.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from engine.errors import DeviceLost, InvalidArgument

Floats = npt.NDArray[np.float64]

CANDIDATES = 64
RECORD_BYTES = CANDIDATES * 8 + 8
MAX_STOPS = 16
MAX_STOP_LENGTH = 256
MAX_TOKENS = 1 << 20
_MASK = (1 << 64) - 1
# Settings of a job that are not about sampling and may stand beside these.
_OTHERS = frozenset({"model", "device", "context", "priority", "share", "stream", "session"})


@dataclass(frozen=True)
class Settings:
    """What a request may ask for; the defaults are those of the API."""

    temperature: float = 0.0
    top_k: int = 40  # 0: all
    top_p: float = 0.95  # 1: all
    min_p: float = 0.05  # 0: all
    seed: int = 0
    max_tokens: int = 256
    stop: tuple[str, ...] = ()
    top5: bool = False

    @classmethod
    def parse(cls, given: Mapping[str, Any], seed: int = 0) -> Settings:
        """Settings of a request; `seed` is for those that name none.

        Raises:
            InvalidArgument: unknown names, wrong types, values out of range.
        """
        known = {"temperature", "top_k", "top_p", "min_p", "seed", "max_tokens", "stop", "top5"}
        if unknown := set(given) - known - _OTHERS:
            raise InvalidArgument(f"There is no setting named {min(unknown)!r}.")
        stop = given.get("stop", ())
        stops = (
            (stop,) if isinstance(stop, str) else tuple(stop) if isinstance(stop, list) else stop
        )
        if not isinstance(stops, tuple) or not all(isinstance(s, str) and s for s in stops):
            raise InvalidArgument("stop is a list of texts that are not empty.")
        if len(stops) > MAX_STOPS or any(len(s) > MAX_STOP_LENGTH for s in stops):
            raise InvalidArgument(
                f"There may be {MAX_STOPS} stop strings of {MAX_STOP_LENGTH} characters at most."
            )
        top5 = given.get("top5", False)
        if not isinstance(top5, bool):
            raise InvalidArgument("top5 is true or false.")
        return cls(
            _number(given, "temperature", cls.temperature, 0.0, 100.0),
            _whole(given, "top_k", cls.top_k, 0, MAX_TOKENS * 2),
            _number(given, "top_p", cls.top_p, 0.0, 1.0),
            _number(given, "min_p", cls.min_p, 0.0, 1.0),
            _whole(given, "seed", seed, 0, _MASK),
            _whole(given, "max_tokens", cls.max_tokens, 1, MAX_TOKENS),
            stops,
            top5,
        )


def _number(given: Mapping[str, Any], name: str, default: float, low: float, high: float) -> float:
    value = given.get(name, default)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
        raise InvalidArgument(f"{name} is a number from {low:g} to {high:g}.")
    return float(value)


def _whole(given: Mapping[str, Any], name: str, default: int, low: int, high: int) -> int:
    value = given.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise InvalidArgument(f"{name} is a whole number from {low} to {high}.")
    return value


def _mix(x: int) -> int:
    """The finaliser of SplitMix64 (Steele, Lea and Flood 2014)."""
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


def uniform(seed: int, position: int) -> float:
    """The random number in [0, 1) that belongs to a seed and a position."""
    state = (_mix(seed & _MASK) + (position + 1) * 0x9E3779B97F4A7C15) & _MASK
    return float(_mix(state) >> 11) * 2.0**-53


@dataclass(frozen=True)
class Candidates:
    """The best tokens in falling order of logits, equal ones by id, and the log-sum-exp of all
    logits.
    """

    ids: npt.NDArray[np.uint32]
    logits: Floats
    lse: float

    @classmethod
    def parse(cls, record: npt.NDArray[np.uint8]) -> Candidates:
        """From the bytes of the `topk` buffer.

        Raises:
            DeviceLost: they are no numbers: the device computes nonsense.
        """
        words = np.ascontiguousarray(record[:RECORD_BYTES]).view(np.uint32)
        ids = words[0 : 2 * CANDIDATES : 2]
        floats = words.view(np.float32).astype(np.float64)
        logits = floats[1 : 2 * CANDIDATES : 2]
        top, lse = floats[2 * CANDIDATES :]
        count = int(((ids != 0xFFFFFFFF) & ~np.isnan(logits)).sum())
        if not count or not (math.isfinite(top) and math.isfinite(lse) and np.isfinite(logits[0])):
            raise DeviceLost("The device computed logits that are no numbers.")
        return cls(ids[:count], logits[:count], float(lse))

    @classmethod
    def of(cls, logits: npt.NDArray[np.float32]) -> Candidates:
        """All of a vocabulary."""
        values = logits.astype(np.float64)
        order = np.lexsort((np.arange(len(values)), -values))
        top = values[order[0]]
        lse = top + math.log(np.exp(values - top).sum())
        return cls(order.astype(np.uint32), values[order], float(lse))

    def top5(self) -> list[list[float]]:
        """[[id, logit], …] of the five best."""
        return [[int(i), float(v)] for i, v in zip(self.ids[:5], self.logits[:5], strict=True)]


def sample(
    best: Candidates,
    settings: Settings,
    position: int,
    vocab: int,
    everything: Callable[[], npt.NDArray[np.float32]],
) -> int:
    """The id of token number `position` of an answer.

    `best` holds the device's candidates; `everything` reads all logits and is called only when they
    do not suffice.
    """
    if settings.temperature == 0:
        return int(best.ids[0])
    if not _suffices(best, settings, vocab):
        best = Candidates.of(everything())
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
    weights = np.exp((logits[:keep] - logits[0]) / settings.temperature)
    total = np.cumsum(weights)
    chosen = int(np.searchsorted(total, uniform(settings.seed, position) * total[-1], side="right"))
    return int(ids[min(chosen, keep - 1)])


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
