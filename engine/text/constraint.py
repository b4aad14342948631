# SPDX-License-Identifier: Apache-2.0
"""Answers that have to fit a JSON schema: which tokens may come next, a function of the ids so far.

The grammar is llguidance's (Rust, MIT), which computes a mask over the vocabulary for each token
within bounds of its own. What a schema leaves open is bounded here, so that answers end: texts
without `maxLength` have at most MAX_TEXT characters, arrays without `maxItems` MAX_ITEMS items,
numbers a few digits, and there is no space between tokens of the JSON.
"""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Iterator, Mapping
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from engine.errors import InvalidArgument, UnsupportedModel
from engine.text.tokenizer import TextTokenizer

if TYPE_CHECKING:
    import llguidance

MAX_SCHEMA = 1 << 16  # bytes
MAX_DEPTH = 32
MAX_TEXT = 200
MAX_ITEMS = 16
# States of what knows the multiples of all numbers that are named: these take 0.3 s, 20 times
# as many half a minute.
MAX_MULTIPLE = 10**5
LEAST = 1024 - 2**63  # of the numbers in a schema: the next float below is -2^63
# Without no_forcing the library runs ahead through all that has but one way to go on, which a
# short schema can make gigabytes of.
_OPTIONS = '%llguidance {"no_forcing": true}\nstart: %json '
_PLACE = re.compile(r"^(at \d+\(\d+\): )?(failed to [a-z]+ (JSON schema|\"%json\"): )?")
_TOO_MUCH = "The schema is too much to follow"
_FUEL = {"initial_lexer_fuel": 2_000_000, "max_grammar_size": 200_000, "max_lexer_states": 50_000}


def _library() -> Any:
    """llguidance, which is not built for every machine.

    Raises:
        UnsupportedModel: it is not installed.
    """
    try:
        import llguidance
    except ImportError:
        raise UnsupportedModel(
            "Answers by a schema need the Python package llguidance, which is not installed."
        ) from None
    return llguidance


class _Vocabulary:
    """A tokenizer as llguidance wants it."""

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self._tokenizer = tokenizer
        settings = tokenizer.settings
        self.eos_token_id = settings.eos if settings.eos is not None else settings.ends[0]
        self.bos_token_id = settings.bos
        self.special_token_ids = sorted({i for _, i in settings.specials} | set(settings.ends))
        marked = dict.fromkeys(self.special_token_ids)
        names = {i: t for t, i in settings.specials}
        self.tokens = [
            names.get(i, f"<{i}>").encode() if i in marked else tokenizer.piece(i)
            for i in range(tokenizer.vocab)
        ]

    def __call__(self, text: bytes | str) -> list[int]:
        plain = text.decode("utf-8", "replace") if isinstance(text, bytes) else text
        return self._tokenizer.encode_inside(plain)


@functools.lru_cache(maxsize=2)
def _prepared(tokenizer: TextTokenizer) -> llguidance.LLTokenizer:
    """The vocabulary as a trie: a second's work for a large one, kept for the last models."""
    library = _library()
    vocabulary = library.TokenizerWrapper(_Vocabulary(tokenizer))
    ends = list(tokenizer.settings.ends) or [vocabulary.eos_token_id]
    return library.LLTokenizer(  # type: ignore[no-any-return]
        vocabulary,
        n_vocab=tokenizer.vocab,
        eos_token=ends,
        slices=library.LLTokenizer.json_slices(),
    )


def bounded(schema: str) -> dict[str, Any]:
    """A schema with bounds where it has none.

    Raises:
        InvalidArgument: it is no JSON object, too large or nested too deeply.
    """
    if len(schema.encode("utf-8", "replace")) > MAX_SCHEMA:
        raise InvalidArgument(f"A schema has at most {MAX_SCHEMA >> 10} KiB.")
    try:
        parsed = json.loads(schema)
    except (ValueError, RecursionError):
        raise InvalidArgument("The schema is no JSON.") from None
    if not isinstance(parsed, dict):
        raise InvalidArgument("The schema is no JSON object.")
    out = _bound(parsed, 0)
    assert isinstance(out, dict)
    _check_multiples(out)
    _check_least(out)
    return {**out, "x-guidance": {"whitespace_flexible": False}}


def _bound(node: Any, depth: int) -> Any:
    if depth > MAX_DEPTH:
        raise InvalidArgument(f"The schema is nested deeper than {MAX_DEPTH} levels.")
    if isinstance(node, list):
        return [_bound(item, depth + 1) for item in node]
    if not isinstance(node, Mapping):
        return node
    out = {
        key: value if key in ("enum", "const", "default", "examples") else _bound(value, depth + 1)
        for key, value in node.items()
    }
    kinds = out.get("type")
    kinds = kinds if isinstance(kinds, list) else [kinds]
    fixed = {"enum", "const"} & set(out)
    if "string" in kinds and not fixed | ({"pattern", "format", "maxLength"} & set(out)):
        out["maxLength"] = max(MAX_TEXT, _size(out.get("minLength")))
    if "array" in kinds and not fixed and "maxItems" not in out:
        out["maxItems"] = max(MAX_ITEMS, _size(out.get("minItems")))
    if "integer" in kinds and not fixed:
        _limit(out, 10**9)
    elif "number" in kinds and not fixed:
        _limit(out, 1e9)
    return out


def _check_multiples(schema: Any) -> None:
    """The library makes a state for each remainder, and of several rules the common multiple."""
    rules = {Fraction(str(n)) for n in _values(schema, "multipleOf") if _is_number(n) and n}
    if not rules:
        return
    common = math.lcm(*(rule.denominator for rule in rules))
    if math.lcm(*(int(rule * common) for rule in rules)) > MAX_MULTIPLE:
        raise InvalidArgument(
            f"The schema's multipleOf have a common multiple above {MAX_MULTIPLE}."
        )


def _check_least(schema: Any) -> None:
    """Of a range that lies at -2^63, or below it, the library looks for a middle until its stack
    ends, and the process with it.
    """
    for node in _nodes(schema):
        if isinstance(node, int | float) and node < LEAST:
            raise InvalidArgument(f"The schema has a number below {LEAST}.")


def _values(schema: Any, name: str) -> Iterator[Any]:
    """What stands under a name, wherever that is."""
    return (node[name] for node in _nodes(schema) if isinstance(node, Mapping) and name in node)


def _nodes(schema: Any) -> Iterator[Any]:
    """All that a schema has in it, however deep; values of `const` and `enum`, too."""
    left = [schema]
    while left:
        yield (node := left.pop())
        if isinstance(node, Mapping):
            left += node.values()
        elif isinstance(node, list):
            left += node


def _is_number(value: Any) -> bool:
    if isinstance(value, float):
        return math.isfinite(value)
    return isinstance(value, int) and not isinstance(value, bool)


def _size(value: Any) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) else 0


def _limit(out: dict[str, Any], most: float) -> None:
    if "minimum" not in out and "exclusiveMinimum" not in out:
        out["minimum"] = -most
    if "maximum" not in out and "exclusiveMaximum" not in out:
        out["maximum"] = most


class Constraint:
    """Where an answer stands in its grammar. `done`: nothing can follow."""

    def __init__(self, tokenizer: TextTokenizer, schema: str) -> None:
        """Raises:
        InvalidArgument: the schema is none, or too much for the grammar's bounds.
        UnsupportedModel: llguidance is not installed, or the model has no token that ends a text.
        """
        library = _library()
        if not tokenizer.settings.ends and tokenizer.settings.eos is None:
            raise UnsupportedModel("The model has no token that ends an answer.")
        grammar = _OPTIONS + json.dumps(bounded(schema))
        limits = library.LLParserLimits(**_FUEL)
        prepared = _prepared(tokenizer)
        self._matcher = library.LLMatcher(prepared, grammar, log_level=0, limits=limits)
        self._check("The schema cannot be followed")
        self._words = np.zeros(-(-tokenizer.vocab // 32), np.uint32)

    @property
    def done(self) -> bool:
        """The answer is complete."""
        return bool(self._matcher.is_stopped())

    def allowed(self) -> npt.NDArray[np.bool_]:
        """For each token of the vocabulary whether it may come next.

        Raises:
            InvalidArgument: the grammar ran out of its bounds.
        """
        self._matcher.unsafe_compute_mask_ptr(self._words.ctypes.data, self._words.nbytes)
        self._check(_TOO_MUCH)
        bits = np.unpackbits(self._words.view(np.uint8), bitorder="little")
        return bits.astype(np.bool_)

    def accept(self, token: int) -> None:
        """The token that came.

        Raises:
            InvalidArgument: it was not allowed, or the grammar ran out of its bounds.
        """
        if not self._matcher.consume_token(token):
            self._check(_TOO_MUCH)
            raise InvalidArgument("A token does not fit the schema.")

    def _check(self, failure: str) -> None:
        if not self._matcher.is_error():
            return
        why = _said(self._matcher.get_error())
        if why.startswith("NoExtension"):
            why = "no answer fits it"
        raise InvalidArgument(f"{failure}: {why}.")


def _said(error: str) -> str:
    """What the library says, in a line, without its stop, the answer so far, and the places in a
    grammar that nobody wrote.
    """
    for end in ("<state>", "1 | %llguidance"):
        error = error.partition(end)[0]
    said = " ".join(error.split())
    return _PLACE.sub("", said)[:200].rstrip(".")
