#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Sums up a text that may be longer than the model's context.

    summarize.py [--words N] [--context TOKENS] FILE        - is standard input

The text is cut at paragraphs (where one is too long, at sentences, then words) into pieces that fit
the context, each piece is summed up, and the summaries, one after the other, are summed up again
until they fit in one piece. Progress goes to standard error, the summary to standard output as it
is written.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from pvrd.client import Client, TextSession
from pvrd.errors import PvrdError

ASK = "Summarize this text in at most {words} words:\n\n{text}"
SPARE = 96  # tokens for the request around a piece, and the template
CUTS = (r"\n\s*\n", r"(?<=[.!?])\s+", r"\s+")


class Summarizer:
    """A session and its measures in tokens."""

    def __init__(self, session: TextSession, context: int, words: int) -> None:
        self._session = session
        self._words = words
        self._answer = min(3 * words, context // 3)
        self._room = context - self._answer - SPARE
        if self._room < 64:
            raise SystemExit("summarize: the context is too small for so many words.")

    def summarize(self, text: str) -> Iterator[str]:
        """The summary, piece by piece as it is written."""
        while len(pieces := list(self._pieces(text, 0))) > 1:
            parts = []
            for n, piece in enumerate(pieces, 1):
                print(f"\rpiece {n} of {len(pieces)} …", end="", file=sys.stderr, flush=True)
                parts.append("".join(self._ask(piece)).strip())
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
            shorter = "\n\n".join(parts)
            if len(shorter) >= len(text):
                raise SystemExit("summarize: the model makes the text no shorter.")
            text = shorter
        yield from self._ask(text)

    def _ask(self, piece: str) -> Iterator[str]:
        request = ASK.format(words=self._words, text=piece)
        settings = {"max_tokens": self._answer, "repeat_penalty": 1.1}
        for event in self._session.chat([{"role": "user", "content": request}], settings):
            yield str(event.get("text", ""))

    def _pieces(self, text: str, level: int) -> Iterator[str]:
        """Runs of the text's parts that fit, as long as they may be."""
        if not text.strip():
            return
        if self._session.count_tokens(text) <= self._room:
            yield text
            return
        if level == len(CUTS):
            raise SystemExit("summarize: a single word is longer than the context.")
        run: list[str] = []
        filled = 0
        for part in re.split(CUTS[level], text):
            size = self._session.count_tokens(part) + 2  # and what joins it to the next
            if filled + size > self._room and run:
                yield "\n\n".join(run) if level == 0 else " ".join(run)
                run, filled = [], 0
            if size > self._room:
                yield from self._pieces(part, level + 1)
                continue
            run.append(part)
            filled += size
        if run:
            yield "\n\n".join(run) if level == 0 else " ".join(run)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("file", metavar="FILE")
    parser.add_argument("--words", type=int, default=60)
    parser.add_argument("--context", type=int, default=2048, help="tokens (2048)")
    parser.add_argument("--device", choices=("auto", "gpu", "cpu"), default="auto")
    args = parser.parse_args()
    try:
        text = sys.stdin.read() if args.file == "-" else Path(args.file).read_text("utf-8")
    except (OSError, ValueError) as error:
        print(f"summarize: {args.file} cannot be read: {error}", file=sys.stderr)
        return 1
    try:
        with (
            Client() as client,
            client.open_text({"device": args.device, "context": args.context}) as session,
        ):
            said = ""
            for piece in Summarizer(session, args.context, args.words).summarize(text):
                said += piece
                print(piece, end="", flush=True)
            print()
    except PvrdError as error:
        print(f"summarize: {error}", file=sys.stderr)
        return 1
    return 0 if said.strip() else 1


if __name__ == "__main__":
    sys.exit(main())
