# SPDX-License-Identifier: Apache-2.0
"""What guessing tokens from the text before them is worth: tokens/s of answers with and without it.

    python -m benchmarks.text_guess [--quick] [--json] [--threads N] [--model FILE] [--pairs N]

Rows are named TASK: copies (of a paragraph, with a word changed; of records that are picked), an
answer that has to fit a schema, summaries, and answers that owe the prompt nothing. `ours` is what
a session writes a second with guesses where they pay (engine/text/guess.py), the "peer" the same
session without any; runs are interleaved. Greedy, so both say the same up to where two tokens are
nearly as likely: how many of the tokens are the same, and how many a slice brought, is printed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import common, peers
from benchmarks.text_cpu import smollm2
from engine.backends.cpu import CpuBackend
from engine.text.generate import Generation
from engine.text.model import State, TextModel
from engine.text.request import End, Request

TEXT = Path(__file__).with_name("data") / "opticks-20k.txt"
MOST = 160  # tokens of an answer

_ORDERS = """Order 1041: Maria Lindqvist, Kungsgatan 14, Uppsala. Two oak shelves. Paid 12 March.
Order 1042: Tomasz Zielinski, Ulica Dluga 88, Gdansk. One reading lamp. Not paid.
Order 1043: Aoife Brennan, 7 Quay Street, Galway. Four dining chairs. Paid 14 March.
Order 1044: Giulia Ferrante, Via dei Mille 3, Torino. One desk, one drawer unit. Not paid.
Order 1045: Henrik Dahl, Strandvejen 201, Aarhus. A coat rack. Paid 15 March."""

_LETTER = """Dear Mr Okafor, thank you for your letter of 3 June about the delivery of the pump.
The pump left our works in Leeds on Tuesday and will reach the harbour at Felixstowe on Thursday.
From there the ship Calliope takes it to Lagos, where it should arrive on 28 June. Please have the
customs papers ready, as storage in the harbour costs 40 pounds a day.
Yours sincerely, Ellen Whitcombe."""

_SCHEMA = {
    "type": "object",
    "properties": {
        name: {"type": "string", "maxLength": 60}
        for name in ("sender", "recipient", "ship", "from", "to", "arrives")
    },
    "required": ["sender", "recipient", "ship", "from", "to", "arrives"],
    "additionalProperties": False,
}


@dataclass(frozen=True)
class Task:
    """What is asked for."""

    name: str
    text: str
    settings: dict[str, Any] = field(default_factory=dict)


def tasks() -> list[Task]:
    """All of them."""
    page = TEXT.read_text(encoding="utf-8")[:2400]
    schema = json.dumps(_SCHEMA)
    return [
        Task("copy a letter", f"Copy this letter word for word:\n\n{_LETTER}"),
        Task("change a name", f"Write this letter again, but to Mr Adeyemi:\n\n{_LETTER}"),
        Task("pick records", f"{_ORDERS}\n\nWrite down the orders that are not paid, as they are."),
        Task("fill a schema", f"{_LETTER}\n\nGive the facts of this letter.", {"schema": schema}),
        Task("summary of a letter", f"{_LETTER}\n\nSummarise this letter in two sentences."),
        Task("summary of a page", f"{page}\n\nSummarise this text in one paragraph."),
        Task("free answer", "Why is the sky blue? Explain it to a child."),
        Task("sampled story", "Tell a story about a fox.", {"temperature": 0.8, "seed": 1}),
    ]


@dataclass(frozen=True)
class Run:
    """Ids of an answer, seconds of writing it, slices."""

    ids: list[int]
    seconds: float
    slices: int

    @property
    def rate(self) -> float:
        return (len(self.ids) - 1) / self.seconds


def run(state: State, task: Task, guesses: bool) -> Run:
    """One answer; the prompt is not counted."""
    state.model.guesses = guesses
    messages = [{"role": "user", "content": task.text}]
    settings = {"max_tokens": MOST, **task.settings}
    generation = Generation(state, Request("chat", messages=messages, settings=settings))
    slices, end = 0, None
    while not generation.finished:
        before = generation.delivered
        for event in generation.step():
            end = event if isinstance(event, End) else end
        slices += before > 0 and generation.delivered > before
    assert end is not None
    return Run(generation.answer, end.stats["decode_s"], slices)


def measure(args: argparse.Namespace) -> list[common.Row]:
    source = Path(args.model) if args.model else smollm2()
    backend = CpuBackend(args.threads)
    model = TextModel.load(source, str(peers.cache() / f"{source.stem}.pvrm"), backend)
    pairs = args.pairs or (2 if args.quick else 10)
    rows = []
    for task in tasks():
        state = model.state(2048)
        made, plain = run(state, task, True), run(state, task, False)
        a, b = common.interleaved(
            lambda s=state, t=task: run(s, t, True).rate,  # type: ignore[misc]
            lambda s=state, t=task: run(s, t, False).rate,  # type: ignore[misc]
            pairs,
        )
        state.close()
        same = next(
            (i for i, (x, y) in enumerate(zip(made.ids, plain.ids, strict=False)) if x != y),
            len(made.ids),
        )
        each = (len(made.ids) - 1) / max(1, made.slices)
        ratio, bound = common.median_ratio(a, b)
        print(
            f"{task.name}: median ratio {ratio:.2f}, lower bound {bound:.2f}; {each:.2f} tokens a"
            f" slice, {same} of {len(made.ids)} tokens the same",
            file=sys.stderr,
        )
        middle = statistics.median(a), statistics.median(b)
        rows.append(common.row(task.name, "tokens/s", *middle, "without guesses"))
    model.close()
    backend.close()
    return rows


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", help="a GGUF file instead of SmolLM2")
    parser.add_argument("--pairs", type=int, default=0, help="runs of each, in turn (10; quick: 2)")


if __name__ == "__main__":
    sys.exit(common.main((__doc__ or "").splitlines()[0], measure, options))
