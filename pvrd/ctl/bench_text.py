# SPDX-License-Identifier: Apache-2.0
"""How fast the daemon reads and writes text, in a table as llama-bench prints.

ppN is a prompt of N tokens, tgN are N tokens written one after the other. Rates are by the workers'
own clocks, so the bus costs nothing in them; what else the daemon does at the time does.
"""

from __future__ import annotations

import random
import statistics
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from pvrd.ctl import common, errors, generate, output

if TYPE_CHECKING:
    import argparse

    from pvrd.client import TextSession

# Frequent words, which most vocabularies have as one token.
_WORDS = (
    "time year people way day man thing woman life child world school state family student group "
    "country problem hand part place case week company system program question work government "
    "number night point home water room mother area money story fact month lot right study book"
)
_HEAD = ("model", "size", "params", "backend", "test", "t/s")
_TEMPLATE = 8  # tokens that a vocabulary may add to a text


def _counts(text: str) -> list[int]:
    """Numbers with commas between them; 0 stands for none."""
    return [n for n in map(common.at_least(0), text.split(",")) if n]


_counts.__name__ = "list such as 128,512"


def arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `pvrctl bench text`."""
    common.job_options(parser)
    parser.add_argument(
        "-p", type=_counts, default=[128, 512], metavar="N,…", help="tokens of prompts (128,512)"
    )
    parser.add_argument(
        "-n", type=_counts, default=[32], metavar="N,…", help="tokens that are written (32)"
    )
    parser.add_argument(
        "-r", type=common.at_least(1), default=5, metavar="N", help="repetitions (5)"
    )


def _run(session: TextSession, prompt: str, tokens: int) -> generate.Answer:
    return generate.answer(session, None, prompt, {"max_tokens": tokens}, show=False)


def _stat(answer: generate.Answer, what: str) -> float:
    return float((answer.end.get("stats") or {}).get(what, 0))


def text_of(count: Callable[[str], int], tokens: int, seed: int) -> str:
    """A text of about that many tokens, exactly so many where the vocabulary has ` a`; texts of
    different seeds differ from the first word on, so that nothing computed for one is of use for
    another.
    """
    drawn = random.Random(seed)
    words = [f"{seed}", *drawn.choices(_WORDS.split(), k=tokens)]
    low, high = 1, len(words)  # `low` words have at most so many tokens
    while low < high:
        middle = (low + high + 1) // 2
        if count(" ".join(words[:middle])) <= tokens:
            low = middle
        else:
            high = middle - 1
    text = " ".join(words[:low])
    while count(f"{text} a") <= tokens:
        text += " a"
    return text


class Bench:
    """A session that is measured."""

    def __init__(self, session: TextSession) -> None:
        """Runs once, so that everything is loaded and recorded."""
        self._session = session
        self._seed = 0
        first = _run(session, "Once", 2)
        self.start = first.start
        self._added = int(first.start.get("prompt_tokens", 1)) - session.count_tokens("Once")

    def prompt(self, tokens: int) -> tuple[int, float]:
        """Reads a prompt of about so many tokens: how many there were, and tokens a second."""
        self._seed += 1
        text = text_of(self._session.count_tokens, tokens - self._added, self._seed)
        done = _run(self._session, text, 1)
        return round(_stat(done, "prefill_tokens")), _rate(done, "prefill")

    def write(self, tokens: int) -> tuple[int, float]:
        """Writes so many tokens, in several answers where the model ends early."""
        written, seconds = 0.0, 0.0
        while written < tokens:
            self._seed += 1
            done = _run(self._session, f"{self._seed}. The", round(tokens - written) + 1)
            now = _stat(done, "decode_tokens")
            if not now:
                sentence = "The model ends its answers at once: there is nothing to measure."
                raise errors.CtlError(sentence)
            written, seconds = written + now, seconds + _stat(done, "decode_s")
        return round(written), written / seconds if seconds > 0 else 0.0


def _rate(done: generate.Answer, what: str) -> float:
    seconds = _stat(done, f"{what}_s")
    return _stat(done, f"{what}_tokens") / seconds if seconds > 0 else 0.0


def _measured(bench: Bench, args: argparse.Namespace) -> list[dict[str, Any]]:
    """A record for each test."""
    asked: list[tuple[str, int, Callable[[int], tuple[int, float]]]]
    asked = [("pp", n, bench.prompt) for n in args.p] + [("tg", n, bench.write) for n in args.n]
    meter = output.Progress("measuring", False if args.json else None)
    found: list[dict[str, Any]] = []
    try:
        for kind, n, run in asked:
            samples: list[tuple[int, float]] = []
            for _ in range(args.r):
                meter.update(len(found) * args.r + len(samples), len(asked) * args.r)
                samples.append(run(n))
            rates = [rate for _, rate in samples]
            found.append(
                {
                    "test": f"{kind}{samples[0][0]}",
                    "tokens_per_s": round(statistics.fmean(rates), 3),
                    "sd": round(statistics.stdev(rates), 3) if len(rates) > 1 else 0.0,
                    "samples": [round(rate, 3) for rate in rates],
                }
            )
    finally:
        meter.clear()
    return found


def _parameters(count: int) -> str:
    if not count:
        return "-"
    return f"{count / 1e9:.2f} B" if count >= 1e9 else f"{count / 1e6:.2f} M"


def _table(record: dict[str, Any]) -> str:
    """The record as a table of Markdown, numbers to the right."""
    of = [str(record["model"]), output.size(record["size"]), _parameters(record["parameters"])]
    rows = [
        [*of, str(record["device"]), one["test"], f"{one['tokens_per_s']:.2f} ± {one['sd']:.2f}"]
        for one in record["tests"]
    ]
    widths = [max(len(row[i]) for row in [list(_HEAD), *rows]) for i in range(len(_HEAD))]
    left = (True, False, False, True, False, False)

    def line(cells: list[str]) -> str:
        padded = [
            cell.ljust(width) if to_left else cell.rjust(width)
            for cell, width, to_left in zip(cells, widths, left, strict=True)
        ]
        return f"| {' | '.join(padded)} |\n"

    rule = [
        "-" * width if to_left else "-" * (width - 1) + ":"
        for width, to_left in zip(widths, left, strict=True)
    ]
    return line(list(_HEAD)) + line(rule) + "".join(map(line, rows))


def run(args: argparse.Namespace) -> int:
    """Runs `pvrctl bench text`.

    Raises:
        CtlError: nothing is asked for, or the model writes nothing.
    """
    if not args.p and not args.n:
        raise errors.CtlError("Neither prompts nor tokens to write are asked for.", errors.USAGE)
    args.context = max([*args.p, *args.n]) + 64 + _TEMPLATE
    with common.client(args) as client:
        sizes = {model["name"]: int(model.get("size", 0)) for model in client.models()}
        with client.open_text(generate.session_settings(args)) as session:
            common.wait_ready(session, args)
            bench = Bench(session)
            tests = _measured(bench, args)
    start = bench.start
    record = {
        "model": start.get("model", ""),
        "size": sizes.get(start.get("model"), 0),
        "parameters": int(start.get("parameters", 0)),
        "device": start.get("device", ""),
        "device_name": start.get("device_name", ""),
        "tests": tests,
    }
    if args.json:
        output.emit_json(record)
    else:
        sys.stdout.write(output.plain(f"{_table(record)}\non {record['device_name']}\n"))
    return errors.OK
