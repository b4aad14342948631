# SPDX-License-Identifier: Apache-2.0
"""Guesses what a text says next from what it said before, and tells when checking that pays.

The last tokens are looked up in prompt and answer; what followed them there is the guess (prompt
lookup, Saxena 2023). Several guessed tokens are fed in one slice with the logits after each, and
the answer goes on with what it would have said anyway: a guess never changes a token, only what it
costs. Guesses are compared with every answer, also where nothing is checked, so a text that does
not repeat itself costs nothing but the comparison.
"""

from __future__ import annotations

from collections.abc import Sequence

GRAM = 3  # tokens that are looked up
SIZES = (2, 4, 8)  # tokens of a slice: what the products take at a time
GAIN = 1.1  # what a slice of several has to be better than single tokens by
_WEIGHT, _CHANCE = 2.0, 0.4  # what is believed of a guess before there were any
_FADE = 0.9  # of what earlier guesses say with each new one


class Price:
    """What slices of several tokens take, in times of one that decodes a single token. Kept by a
    session from answer to answer.
    """

    def __init__(self) -> None:
        self._one = 0.0  # seconds
        self._times = {2: 1.3, 4: 1.6, 8: 2.2}

    def decoded(self, seconds: float) -> None:
        """A slice with one token took so long."""
        self._one += (0.3 if self._one else 1.0) * (seconds - self._one)

    def checked(self, tokens: int, seconds: float) -> None:
        """A slice with so many did."""
        if self._one:
            size = size_of(tokens)
            self._times[size] += 0.5 * (seconds / self._one - self._times[size])

    def of(self, tokens: int) -> float:
        """In times of a single token; 0: it is not known what that takes."""
        return self._times[size_of(tokens)] if self._one else 0.0

    def seconds(self, tokens: int) -> float:
        """Of a slice with so many."""
        return self._times[size_of(tokens)] * self._one


def size_of(tokens: int) -> int:
    """Of SIZES the one that so many tokens take."""
    return next(size for size in SIZES if size >= tokens)


class Guesser:
    """The guesses of one answer."""

    def __init__(self, price: Price) -> None:
        self._price = price
        self._follows: dict[tuple[int, ...], int] = {}  # where the text goes on behind GRAM tokens
        self._seen = 0
        self._expected: list[int] = []
        self._right = self._tried = 0.0

    def learn(self, ids: Sequence[int]) -> None:
        """Prompt and answer so far, which only ever grow."""
        for i in range(self._seen, len(ids)):
            if self._expected:
                right = self._expected.pop(0) == ids[i]
                self._right, self._tried = _FADE * self._right + right, _FADE * self._tried + 1
                if not right:
                    self._expected.clear()
            if i >= GRAM:
                self._follows[tuple(ids[i - GRAM : i])] = i
        self._seen = len(ids)
        at = self._follows.get(tuple(ids[-GRAM:]))
        if at is not None:
            length = len(ids) - at  # what comes behind the end would be this again
            self._expected = [ids[at + i % length] for i in range(SIZES[-1] - 1)]

    def chance(self) -> float:
        """That the next guessed token is right, when those before it were."""
        return (self._right + _WEIGHT * _CHANCE) / (self._tried + _WEIGHT)

    def guess(self, most: int, most_s: float = 0.0) -> list[int]:
        """Tokens that are worth being checked behind the last one; at most `most` that are fed with
        it, and `most_s` seconds for all (0: any).
        """
        best, chosen = GAIN, 0
        chance = self.chance()
        for size in SIZES:
            count = min(size - 1, len(self._expected), most)
            times = self._price.of(size)
            if count < 1 or not times or 0 < most_s < self._price.seconds(size):
                continue
            gain = sum(chance**i for i in range(count + 1)) / times
            if gain > best:
                best, chosen = gain, count
        return self._expected[:chosen]
