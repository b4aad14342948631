# SPDX-License-Identifier: Apache-2.0
"""Answers by a schema: they parse and fit whatever the model says, also when they are resumed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.backends.cpu import CpuBackend
from engine.errors import InvalidArgument
from engine.text.constraint import MAX_DEPTH, MAX_SCHEMA, MAX_TEXT, Constraint, bounded
from engine.text.generate import Generation
from engine.text.model import TextModel
from engine.text.request import End, Request, Token

SCHEMA = {
    "type": "object",
    "properties": {
        "i": {"enum": ["on", "off"]},
        "d": {"type": "integer", "minimum": 0, "maximum": 9999},
        "w": {"type": "string", "maxLength": 6},
        "l": {"type": "array", "items": {"type": "number"}, "maxItems": 2},
    },
    "required": ["i", "d", "w", "l"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def model(tiny_q8: Path) -> Iterator[TextModel]:
    made = TextModel.load(tiny_q8, "", CpuBackend(1))
    yield made
    made.close()


def answer(model: TextModel, delivered: list[int] | None = None, **settings: Any) -> Any:
    """Ids, text and reason of an answer by SCHEMA."""
    state = model.state(96)
    asked = {"schema": json.dumps(SCHEMA), "max_tokens": 90, **settings}
    run = Generation(state, Request("generate", "w1", settings=asked), delivered or [])
    ids, text, reason = list(delivered or []), "", ""
    while not run.finished:
        for event in run.step():
            if isinstance(event, Token):
                ids.append(event.id)
            if isinstance(event, Token | End):
                text += event.text
            if isinstance(event, End):
                reason = event.reason
    state.close()
    return ids, text, reason


@pytest.mark.parametrize("seed", range(6))
def test_it_parses_and_fits(model: TextModel, seed: int) -> None:
    settings = {"temperature": 1.5, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": seed}
    _, text, reason = answer(model, **settings)
    assert reason == "stop"
    got = json.loads(text)
    assert list(got) == ["i", "d", "w", "l"]
    assert got["i"] in ("on", "off")
    assert isinstance(got["d"], int)
    assert len(got["w"]) <= 6
    assert len(got["l"]) <= 2
    assert all(isinstance(v, int | float) for v in got["l"])


@pytest.mark.parametrize(
    "settings", [{"temperature": 0}, {"temperature": 0, "presence_penalty": 0.5}]
)
def test_greedy_takes_the_likeliest_that_fits(model: TextModel, settings: dict[str, Any]) -> None:
    ids, text, reason = answer(model, **settings)
    assert reason == "stop"
    assert json.loads(text)
    for cut in (1, 7, len(ids) - 1):
        again, _, reason = answer(model, ids[:cut], **settings)
        assert (again, reason) == (ids, "stop")


def test_the_mask_is_the_grammars(model: TextModel) -> None:
    constraint = Constraint(model.tokenizer, '{"enum": ["ab", "ac"]}')
    said = b""
    while not constraint.done:
        allowed = np.flatnonzero(constraint.allowed())
        pieces = {model.tokenizer.piece(int(i)) for i in allowed}
        assert all((said + p) in b'"ab"' or (said + p) in b'"ac"' for p in pieces)
        said += model.tokenizer.piece(int(allowed[-1]))
        constraint.accept(int(allowed[-1]))
    assert said == b'"ac"'
    with pytest.raises(InvalidArgument, match="satisfy"):
        Constraint(model.tokenizer, '{"enum": ["ab"]}').accept(3 + ord("x"))


def test_what_is_open_is_bounded() -> None:
    got = bounded('{"properties": {"a": {"type": "string"}, "b": {"type": ["integer", "null"]}}}')
    assert got["properties"]["a"]["maxLength"] == MAX_TEXT
    assert got["properties"]["b"]["maximum"] == 10**9
    kept = {"type": "array", "items": {"type": "string", "enum": ["x" * 400]}, "maxItems": 99}
    assert bounded(json.dumps(kept)).items() >= kept.items()


@pytest.mark.parametrize(
    "schema",
    [
        "[]",
        "nonsense",
        "{",
        '{"type": "objec"}',
        '{"type": "string", "pattern": "((("}',
        '{"$ref": "#/nowhere"}',
        '{"a":' * (MAX_DEPTH + 2) + "1" + "}" * (MAX_DEPTH + 2),
        "[" * 100_000,
        '{"enum": ["' + "x" * MAX_SCHEMA + '"]}',
        '{"$ref": "#"}',
        '{"type": "integer", "multipleOf": 100000000}',
        '{"type": "integer", "multipleOf": 2143646}',
        '{"allOf": [{"multipleOf": 9973, "type": "integer"}, {"multipleOf": 9967}]}',
        '{"type": "number", "multipleOf": 1' + "0" * 400 + "}",
        '{"type": "integer", "minimum": 5, "maximum": 3}',
        '{"const": -9223372036854775808}',
        '{"enum": [[0, -9223372036854775807]]}',
        '{"type": "integer", "minimum": -1e30, "maximum": -1e30}',
    ],
)
def test_schemas_that_are_none(model: TextModel, schema: str) -> None:
    with pytest.raises(InvalidArgument, match="schema"):
        Constraint(model.tokenizer, schema).allowed()


@pytest.mark.parametrize("least", [-(2**63) + 1024, -(2**53), 2**63 - 1, 10**30])
def test_large_numbers_are_followed(model: TextModel, least: int) -> None:
    schema = {"type": "integer", "minimum": least, "maximum": least}
    for each in ({"const": least}, schema):
        constraint = Constraint(model.tokenizer, json.dumps(each))
        while not constraint.done:
            constraint.accept(int(np.flatnonzero(constraint.allowed())[-1]))


@pytest.mark.parametrize(("begin", "end"), [("[", "]"), ('{"a": ', "}")])
def test_values_as_deep_as_python_reads_them(begin: str, end: str) -> None:
    """They are followed or refused at any depth, however little is left of Python's stack."""
    refused = 0
    for depth in range(800, 1000):
        try:
            bounded('{"const": ' + begin * depth + "1" + end * depth + "}")
        except InvalidArgument:
            refused += 1
    assert refused < 200


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "array", "items": {"const": "a" * 30000}, "minItems": 10**9},
        {"type": "string", "pattern": "^((a{1000}){1000}){1000}$"},
        {"$defs": {"c": {"type": "object", "properties": {"c": {"$ref": "#/$defs/c"}},
                         "required": ["c"]}}, "$ref": "#/$defs/c"},
    ],
)  # fmt: skip
def test_long_answers_without_a_choice_are_not_run_ahead_through(
    model: TextModel, schema: dict[str, Any]
) -> None:
    """Each step has to be as cheap as any: the least of these would take gigabytes at once."""
    constraint = Constraint(model.tokenizer, json.dumps(schema))
    for _ in range(20):
        constraint.accept(int(np.flatnonzero(constraint.allowed())[0]))
    assert not constraint.done


def test_what_the_library_would_be_lenient_about_is_not_asked_for(model: TextModel) -> None:
    lenient = {"type": "integer", "not": {}, "x-guidance": {"lenient": True}}
    with pytest.raises(InvalidArgument, match="not"):
        Constraint(model.tokenizer, json.dumps(lenient))


def test_a_grammar_beyond_its_bounds_says_so_without_the_answer(model: TextModel) -> None:
    names = {f"k{i}": {"type": "string"} for i in range(600)}
    constraint = Constraint(model.tokenizer, json.dumps({"type": "object", "properties": names}))
    first = int(np.flatnonzero(constraint.allowed())[0])
    with pytest.raises(InvalidArgument, match=r"^The schema is too much to follow: [^<{]+\.$"):
        constraint.accept(first)
