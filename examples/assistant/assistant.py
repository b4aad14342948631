#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The text end of a voice assistant: a sentence becomes an intent and slots that always parse.

    assistant.py "turn the heating on"                 one sentence
    assistant.py --evaluate utterances.toml            how often it is right, and how long it takes

The rules (car.toml) give each intent some phrases and its slots. The intent is that of the phrases
that a sentence is most alike, by the vectors of pvrd's Embed: the mean of the model's states over
the sentence, and its state where it is about to sum the sentence up in a word. Slots are filled by
an answer that has to fit the intent's schema, after the intent's phrases as examples. Nothing here
knows the model; the shipped one has 135 million parameters, and what it gets wrong is shown.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pvrd.client import Client, TextSession
from pvrd.errors import PvrdError

HERE = Path(__file__).resolve().parent
# (what is embedded, which state of it, its weight)
VIEWS = (
    ("The driver says: {}", "mean", 0.3),
    ("The driver says: {}\nIn one word:", "last", 0.7),
)
LONGEST = 4  # words of a slot
AT_ONCE = 8  # texts that are embedded in a call
BEST = 2  # an intent is as near as the mean of its two nearest phrases

Vector = list[float]


@dataclass(frozen=True)
class Understood:
    """What a sentence means; `sure` is the lead over the second intent (0 to 2)."""

    intent: str
    slots: dict[str, Any]
    sure: float


class Assistant:
    """Rules and the vectors of their phrases, made once."""

    def __init__(self, session: TextSession, rules: dict[str, Any]) -> None:
        self._session = session
        self._rules = rules
        self._phrases = [
            (name, p if isinstance(p, str) else p["say"])
            for name, rule in rules.items()
            for p in rule["phrases"]
        ]
        self._centres: list[Vector] = []
        self._known: list[list[Vector]] = []
        for form, pooling, _ in VIEWS:
            texts = [form.format(p) for _, p in self._phrases]
            vectors: list[Vector] = []
            for at in range(0, len(texts), AT_ONCE):  # a call has 20 s
                some = texts[at : at + AT_ONCE]
                vectors += session.embed(some, {"pooling": pooling})
            centre = [statistics.fmean(column) for column in zip(*vectors, strict=True)]
            self._centres.append(centre)
            self._known.append([_from(centre, v) for v in vectors])

    def understand(self, text: str) -> Understood:
        """Intent and slots of a sentence."""
        near = [0.0] * len(self._phrases)
        for (form, pooling, weight), centre, known in zip(
            VIEWS, self._centres, self._known, strict=True
        ):
            vector = _from(
                centre, self._session.embed([form.format(text)], {"pooling": pooling})[0]
            )
            for i, other in enumerate(known):
                near[i] += (
                    weight * math.sumprod(vector, other)
                    if _SUMPROD
                    else weight * sum(a * b for a, b in zip(vector, other, strict=True))
                )
        marks = {
            name: statistics.fmean(
                sorted(n for n, (of, _) in zip(near, self._phrases, strict=True) if of == name)[
                    -BEST:
                ]
            )
            for name in self._rules
        }
        first, second = sorted(marks, key=lambda name: -marks[name])[:2]
        return Understood(first, self._slots(first, text), marks[first] - marks[second])

    def _slots(self, intent: str, text: str) -> dict[str, Any]:
        slots = self._rules[intent].get("slots")
        if not slots:
            return {}
        talk = []
        for phrase in self._rules[intent]["phrases"]:
            values = {name: phrase[name] for name in slots}
            talk += [_said("user", phrase["say"]), _said("assistant", json.dumps(values))]
        schema = {
            "type": "object",
            "properties": {
                name: {"enum": _spans(text)} if slot.get("type") == "string" else slot
                for name, slot in slots.items()
            },
            "required": list(slots),
            "additionalProperties": False,
        }
        events = self._session.chat([*talk, _said("user", text)], {"schema": json.dumps(schema)})
        found: dict[str, Any] = json.loads("".join(str(e.get("text", "")) for e in events))
        return found


def _said(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def _spans(text: str) -> list[str]:
    """All runs of at most LONGEST words of a sentence."""
    words = text.replace(",", " ").split()
    return list(
        dict.fromkeys(
            " ".join(words[i:j])
            for i in range(len(words))
            for j in range(i + 1, min(i + LONGEST, len(words)) + 1)
        )
    )


_SUMPROD = hasattr(math, "sumprod")  # Python 3.12


def _from(centre: Vector, vector: Vector) -> Vector:
    """The direction from the centre: what all sentences have in common says nothing."""
    away = [a - b for a, b in zip(vector, centre, strict=True)]
    length = math.hypot(*away) or 1.0
    return [a / length for a in away]


def _alike(a: Any, b: Any) -> bool:
    """Texts are compared without case and leading articles."""
    if isinstance(a, str) and isinstance(b, str):
        plain = [t.casefold().strip().removeprefix("the ").removeprefix("my ") for t in (a, b)]
        return plain[0] == plain[1]
    return bool(a == b)


def evaluate(assistant: Assistant, path: Path, as_json: bool) -> int:
    """Prints accuracy and times over written sentences."""
    cases = tomllib.loads(path.read_text(encoding="utf-8"))["utterance"]
    right = slots_right = slots_all = 0
    times = []
    for case in cases:
        began = time.perf_counter()
        got = assistant.understand(case["text"])
        times.append(1000 * (time.perf_counter() - began))
        hit = got.intent == case["intent"]
        right += hit
        for name, value in case.get("slots", {}).items():
            slots_all += 1
            fits = hit and _alike(got.slots.get(name), value)
            slots_right += fits
            if not fits and not as_json:
                print(f"  {case['text']!r}: {name} is {got.slots.get(name)!r}, not {value!r}")
        if not hit and not as_json:
            print(f"  {case['text']!r}: {got.intent}, not {case['intent']}")
    times.sort()
    record = {
        "utterances": len(cases),
        "intent_accuracy": right / len(cases),
        "slot_accuracy": slots_right / slots_all if slots_all else None,
        "p50_ms": round(statistics.median(times), 1),
        "p95_ms": round(times[math.ceil(0.95 * len(times)) - 1], 1),
    }
    if as_json:
        print(json.dumps(record))
        return 0
    print(f"{path.name}: {right} of {len(cases)} intents, {slots_right} of {slots_all} slots;")
    print(
        f"from text to intent and slots {record['p50_ms']} ms (median), {record['p95_ms']} ms (p95)"
    )
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("text", nargs="*", help="a sentence; without one, a line of input each")
    parser.add_argument("--rules", type=Path, default=HERE / "car.toml")
    parser.add_argument(
        "--evaluate", type=Path, metavar="FILE", help="sentences with what they mean"
    )
    parser.add_argument("--device", choices=("auto", "gpu", "cpu"), default="auto")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    rules = tomllib.loads(args.rules.read_text(encoding="utf-8"))
    try:
        with (
            Client() as client,
            client.open_text({"device": args.device, "context": 512}) as session,
        ):
            for _ in session.loading():
                pass
            assistant = Assistant(session, rules)
            if args.evaluate:
                return evaluate(assistant, args.evaluate, args.json)
            for text in [" ".join(args.text)] if args.text else map(str.strip, sys.stdin):
                if text:
                    got = assistant.understand(text)
                    print(json.dumps({"intent": got.intent, "slots": got.slots}), flush=True)
    except PvrdError as error:
        print(f"assistant: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
