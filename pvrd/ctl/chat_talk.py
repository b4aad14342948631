# SPDX-License-Identifier: Apache-2.0
"""A talk: its messages, and what asking costs when the context is full."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pvrd.ctl import common, generate, output

if TYPE_CHECKING:
    from pvrd.client import TextSession


@dataclass
class Counts:
    """What a talk has cost so far, in tokens; `last` is the record of the last answer."""

    answers: int = 0
    tokens: int = 0
    dropped: int = 0  # turns that made room
    context: int = 0
    used: int = 0  # of the context, by the last turn
    last: dict[str, Any] = field(default_factory=dict)


class Talk:
    """Messages, settings and the session that answers. `turns` are pairs of question and answer."""

    def __init__(
        self, session: TextSession, settings: dict[str, Any], system: str, as_json: bool
    ) -> None:
        self._session = session
        self.settings = settings
        self.system = system
        self.as_json = as_json
        self.turns: list[tuple[str, str]] = []
        self.question = ""  # the last one, answered or not
        self.counts = Counts()

    def say(self, text: str) -> None:
        """A remark for the person; standard output of a program that reads us has answers alone."""
        if sys.stdout.isatty() and not self.as_json:
            sys.stdout.write(output.plain(text) + "\n")
        else:
            output.warn(output.plain(text))

    def messages(self, question: str = "") -> list[dict[str, str]]:
        """The talk as the API takes it, with another question behind it."""
        found = [("system", self.system)] if self.system else []
        for asked, answered in self.turns:
            found += [("user", asked), ("assistant", answered)]
        found += [("user", question)] if question else []
        return [{"role": role, "content": content} for role, content in found]

    def ask(self, question: str) -> None:
        """Has a question answered. Where the context is full, the older half of the turns is
        dropped, as often as it takes: so the rest of it stays the same for several questions, and
        with it what the daemon has computed of it.

        Raises:
            PvrdError: ContextFull when the question alone does not fit; it is not kept, nor is one
                whose answer was broken off.
        """
        from pvrd.errors import PvrdError

        self.question = question
        while True:
            try:
                done = generate.answer(
                    self._session,
                    self.messages(question),
                    "",
                    self.settings,
                    show=not self.as_json,
                )
                break
            except PvrdError as error:
                if error.name != "ContextFull" or not self.turns:
                    raise
                self._drop((len(self.turns) + 1) // 2, "The context is full.")
        self._take(question, done)

    def _take(self, question: str, done: generate.Answer) -> None:
        record = done.record(False)
        self.turns.append((question, record["text"]))
        counts = self.counts
        counts.answers += 1
        counts.tokens += len(record["token_ids"])
        counts.context = int(done.start.get("context", 0))
        counts.used = record["prompt_tokens"] + len(record["token_ids"])
        counts.last = record
        if self.as_json:
            output.emit_json(record)
        else:
            sys.stdout.write("\n")
            sys.stdout.flush()
            common.speed_note(record)
        if record["reason"] == "length" and counts.used >= counts.context > 0:
            self._drop(len(self.turns) // 2, "The answer was cut, as the context is full.")

    def _drop(self, count: int, why: str) -> None:
        del self.turns[:count]
        self.counts.dropped += count
        what = {0: "", 1: " The oldest turn was dropped."}
        self.say(why + what.get(count, f" The {count} oldest turns were dropped."))
