# SPDX-License-Identifier: Apache-2.0
"""A generation: a request becomes slices and events. Text and end of an answer are functions of its
ids alone.

Resumed with the ids that were delivered already, a Generation goes on behind them: it replays them
through detokenizer and stop strings, prefills prompt and ids, and draws token n with the random
number of n. That is what the undisturbed one would have said, but for logits so close that the last
digits decide, in which prefill and decode differ.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Literal

import numpy as np
import numpy.typing as npt

from engine.errors import ContextFull, InvalidArgument
from engine.pace import LIMIT, device_clock
from engine.text.constraint import Constraint
from engine.text.guess import SIZES, Guesser
from engine.text.model import State
from engine.text.penalties import penalised
from engine.text.request import End, Event, Reason, Request, Start, Token, tokenize
from engine.text.sampler import Candidates, Mirostat, sample
from engine.text.settings import MAX_TOKENS, Settings
from engine.text.tokenizer import Detokenizer

Logits = Callable[[], npt.NDArray[np.float32]]

_AHEAD_S = 0.01  # what a slice of several tokens may take
_ALONE = 8  # slices in parts, of which one is of one token


class StopMatcher:
    """Holds text back while it may begin a stop string; a stop string itself is not passed on."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.hit = False

    def add(self, text: str) -> str:
        """What may be passed on now. `hit` is set when a stop string is complete; nothing comes
        after it.
        """
        self._held += text
        if not self._stops:
            return self.rest()
        found = [at for s in self._stops if (at := self._held.find(s)) >= 0]
        if found:
            self.hit = True
            out, self._held = self._held[: min(found)], ""
            return out
        keep = 0
        for n in range(1, min(max(map(len, self._stops)), len(self._held) + 1)):
            if any(s.startswith(self._held[-n:]) for s in self._stops):
                keep = n
        cut = len(self._held) - keep
        out, self._held = self._held[:cut], self._held[cut:]
        return out

    def rest(self) -> str:
        """What was held back, when no stop string can come any more."""
        out, self._held = self._held, ""
        return out


class Generation:
    """One answer. `step` runs one slice; `finished` is true once `End` was returned."""

    def __init__(
        self,
        state: State,
        request: Request,
        delivered: Sequence[int] = (),
        notes: Mapping[str, float] | None = None,
    ) -> None:
        """Tokenises the prompt and replays `delivered`; nothing runs on the device yet. notes: of
        the generation that computed what is in the state's caches.

        Raises:
            ContextFull: the prompt and one token do not fit.
            InvalidArgument, BadModel
        """
        self._state = state
        model = state.model
        self._ids, stops = tokenize(model, request)
        self.prompt_tokens = len(self._ids)
        if self.prompt_tokens >= state.context:
            raise ContextFull(
                f"The prompt has {self.prompt_tokens} tokens; a context of {state.context} has no"
                " room for an answer."
            )
        # Without a seed the prompt gives one: the answer has to be the same after a restart.
        seed = zlib.crc32(np.asarray(self._ids, "<u4").tobytes())
        self.settings = Settings.parse(request.settings, seed)
        self._mirostat = Mirostat.of(self.settings)
        self._constraint: Constraint | None = None
        if self.settings.schema:
            self._constraint = Constraint(model.tokenizer, self.settings.schema)
        self._detokenizer = Detokenizer(model.tokenizer)
        self._stops = StopMatcher((*self.settings.stop, *stops))
        self._ends = frozenset(model.tokenizer.settings.ends)
        self._started = False
        self._reason: Reason | None = None
        self.finished = False
        self._stats: dict[str, float] = {
            "prefill_s": 0.0, "prefill_tokens": 0, "decode_s": 0.0, "decode_tokens": 0
        }  # fmt: skip
        for token in delivered:
            if self._reason is not None or not 0 <= token < model.vocab:
                raise InvalidArgument(
                    "The tokens that were delivered do not belong to this request."
                )
            self._accept(token)
        self._guesser = Guesser(state.price) if model.guesses else None
        self._slices = 0  # that could have been of several tokens
        # Seconds a token of the last slice that decoded, without waits; 0: there was none.
        self._pace = 0.0
        self._resumed = len(self._ids)
        self._followed = self.prompt_tokens if delivered else MAX_TOKENS
        if self._mirostat is not None and self._mirostat.resumes(notes or {}, self.delivered):
            self._followed = MAX_TOKENS

    @property
    def state(self) -> State:
        """What it computes with."""
        return self._state

    @property
    def notes(self) -> dict[str, float]:
        """What a generation that takes over the caches needs besides."""
        if self._mirostat is None or self._followed != MAX_TOKENS:
            return {}
        return {"tokens": self.delivered, "mirostat": self._mirostat.mu}

    @property
    def answer(self) -> list[int]:
        """The ids of the answer so far."""
        return self._ids[self.prompt_tokens :]

    @property
    def delivered(self) -> int:
        """Tokens of the answer so far."""
        return len(self._ids) - self.prompt_tokens

    def step(self, most: int = MAX_TOKENS) -> list[Event]:
        """Runs one slice (a piece of the prompt, or up to the next token, or as many as `most`
        tokens that need no choice by the host) and returns what it brought about.

        Raises:
            DeviceLost: the device is gone or computes nonsense.
        """
        events: list[Event] = []
        if self.finished:
            return events
        if not self._started:
            self._started = True
            events.append(Start(self.prompt_tokens, self._state.context))
        began, decoded = device_clock(), self._stats["decode_tokens"]
        if self._reason is None:
            if (steps := self._ahead(most)) > 1:
                events += self._several(steps)
            elif guess := self._guess(most):
                events += self._checked(guess)
            else:
                events += self._slice()
        if (count := self._stats["decode_tokens"] - decoded) > 0:
            self._pace = (device_clock() - began) / count
        if self._reason is not None:
            events.append(self._end(self._reason))
        return events

    def _slice(self) -> list[Event]:
        """A slice of one sequence of tokens, and the token that it leads to, if it does."""
        events: list[Event] = []
        began = time.perf_counter()
        decode, count = self._decoding, self._known
        # What the session computed before stays; the last token is fed anyway, for its logits.
        self._state.common(self._ids[: count - 1])
        pending = self._ids[len(self._state.tokens) : count]
        now = pending[: self._state.piece]
        head = len(now) == len(pending)
        # Of the prompt a single token, too, is a prefill's: so each row of it is computed
        # alike, however much of it was there and however it is cut.
        self._state.run(now, head, decode=decode)
        if not decode:
            self._stats["prefill_tokens"] += len(now)
        if head and count < len(self._ids):
            self._follow(count)
        elif head:
            events.append(self._draw(self._state.best(), self._state.logits))
        took = time.perf_counter() - began
        self._charge("decode" if decode else "prefill", took)
        if decode:
            self._state.price.decoded(took)
        return events

    def _ahead(self, most: int) -> int:
        """How many tokens the next slice may bring about: more than one where each is the
        likeliest, whatever came before, and all of them take little time.
        """
        if self.settings.temperature or self.settings.penalises or self._constraint is not None:
            return 1
        if not self._pace or self.next_id is None:
            return 1
        left = self.settings.max_tokens - self.delivered
        room = self._state.context - len(self._state.tokens)
        apart_s: float = getattr(self._state.executable, "apart_s", 0.0)
        bound = apart_s or min(_AHEAD_S, LIMIT.slice_s or _AHEAD_S)
        self._slices += 1
        if apart_s and not self._slices % _ALONE:
            return 1
        ahead = max(1, int(self._state.ahead * LIMIT.scale))
        return min(most, ahead, left, room, int(bound / self._pace))

    def _several(self, steps: int) -> list[Event]:
        """A slice of several tokens. Those behind the end of the answer are nothing."""
        events: list[Event] = []
        began = time.perf_counter()
        others = bool(self.settings.logprobs or self.settings.top5)
        for record in self._state.run_ahead(self._ids[-1], steps, others):
            events.append(self._draw(record, self._state.logits))
            if self._reason is not None:
                break
        self._state.common(self._ids[:-1])
        self._charge("decode", time.perf_counter() - began, len(events))
        return events

    def _guess(self, most: int) -> list[int]:
        """Tokens that may come next and are worth being checked in one slice."""
        if self._guesser is None or self.next_id is None:
            return []
        self._guesser.learn(self._ids)
        left = self.settings.max_tokens - self.delivered
        room = self._state.context - len(self._state.tokens)
        most = min(most, left, room, int(SIZES[-1] * LIMIT.scale)) - 1
        found = self._guesser.guess(most, LIMIT.slice_s)
        return found if found and self._state.rows is not None else []

    def _checked(self, guess: list[int]) -> list[Event]:
        """A slice with guessed tokens: the answer goes on up to the first that is wrong, as it
        would without them.
        """
        events: list[Event] = []
        began = time.perf_counter()
        rows = self._state.rows
        assert rows is not None
        rows.run([self._ids[-1], *guess])
        for row, expected in enumerate([*guess, None]):
            token = self._draw(rows.best(row), lambda r=row: rows.logits(r))  # type: ignore[misc]
            events.append(token)
            if self._reason is not None or token.id != expected:
                break
        self._state.common(self._ids[:-1])
        took = time.perf_counter() - began
        self._charge("decode", took, len(events))
        self._state.price.checked(len(guess) + 1, took)
        return events

    @property
    def next_id(self) -> int | None:
        """The one id that the next slice feeds, when that is a token of the answer; else None."""
        if self.finished or self._reason is not None or not self._decoding:
            return None
        count = len(self._ids)
        self._state.common(self._ids[: count - 1])
        return self._ids[-1] if len(self._state.tokens) == count - 1 else None

    def fed(self, record: npt.NDArray[np.uint8], logits: Logits, took: float) -> list[Event]:
        """As step, when `next_id` was fed to the state by someone else, in `took` seconds: the
        topk record that came of it, and how to read all logits.

        Raises:
            DeviceLost: the device computes nonsense.
        """
        events: list[Event] = [self._draw(record, logits)]
        self._charge("decode", took)
        self._pace = took
        if self._reason is not None:
            events.append(self._end(self._reason))
        return events

    def cancel(self) -> list[Event]:
        """Ends the answer here: the text that was held back, and `cancelled`."""
        return [] if self.finished else [self._end("cancelled")]

    @property
    def _known(self) -> int:
        """Ids that can be fed before something is chosen: all, but that mirostat has to see the
        logits before each token that was delivered by others.
        """
        if self._mirostat is None:
            return len(self._ids)
        return min(self._followed, len(self._ids))

    def _follow(self, count: int) -> None:
        """Mirostat learns from token `count`, which a predecessor chose."""
        assert self._mirostat is not None
        logits = self._state.logits()
        if self.settings.penalises:
            logits = penalised(logits, self.settings, self._ids[:count])
        best = Candidates.of(logits)
        self._mirostat.follow(best, self.settings.temperature, self._ids[count])
        self._followed = count + 1 if count + 1 < self._resumed else MAX_TOKENS

    @property
    def _decoding(self) -> bool:
        """The prompt, and what was delivered by others, is computed."""
        return len(self._ids) > self._resumed

    def _charge(self, phase: Literal["prefill", "decode"], seconds: float, tokens: int = 1) -> None:
        self._stats[f"{phase}_s"] += seconds
        if phase == "decode":
            self._stats["decode_tokens"] += tokens

    def _draw(self, record: npt.NDArray[np.uint8], logits: Logits) -> Token:
        """The next token of the answer."""
        best = Candidates.parse(record)
        n, wanted = self.delivered, self.settings.logprobs
        vocab = self._state.model.vocab
        allowed = self._constraint.allowed() if self._constraint else None
        token = sample(best, self.settings, n, vocab, logits, self._ids, self._mirostat, allowed)
        text = self._accept(token)
        out = Token(n, token, text, best.top5() if self.settings.top5 else None)
        if not wanted:
            return out
        own = best.logit(token)
        own = float(logits()[token]) if own is None else own
        return replace(out, logprob=round(own - best.lse, 6), logprobs=best.likeliest(wanted))

    def _accept(self, token: int) -> str:
        """Takes a token into the answer; sets the reason when it is the last. Returns its text."""
        self._ids.append(token)
        if token in self._ends:
            self._reason = "stop"
            return ""
        if self._constraint is not None:
            self._constraint.accept(token)
        text = self._stops.add(self._detokenizer.add(token))
        if self._stops.hit or (self._constraint is not None and self._constraint.done):
            self._reason = "stop"
        elif self.delivered >= self.settings.max_tokens or len(self._ids) >= self._state.context:
            self._reason = "length"
        return text

    def _end(self, reason: Reason) -> End:
        self.finished = True
        return End(reason, "" if self._stops.hit else self._stops.rest(), self._stats)
