# SPDX-License-Identifier: Apache-2.0
"""Requests of OpenAI's API as messages and options of pvrd. Needs no framework.

What changes an answer and cannot be done is refused by name; what does not (user, metadata, store)
is ignored, as is what a later version of the API adds.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

_ROLES = {"developer": "system", "system": "system", "user": "user", "assistant": "assistant",
          "tool": "tool"}  # fmt: skip
_TEXT_PARTS = ("text", "input_text", "output_text")
_TOP_LOGPROBS = 20
MOST_TEXTS = 2048  # of a request for embeddings, as OpenAI's own
_INTEGERS = ("top_k", "repeat_last_n", "dry_allowed_length", "mirostat")
_NUMBERS = (
    "temperature", "top_p", "min_p", "frequency_penalty", "presence_penalty", "repeat_penalty",
    "dry_multiplier", "dry_base", "mirostat_tau", "mirostat_eta",
)  # fmt: skip
# Each with the values that ask for nothing.
_NOT_DONE: dict[str, tuple[Any, ...]] = {
    "tools": ([],),
    "functions": ([],),
    "tool_choice": ("none", "auto"),
    "function_call": ("none", "auto"),
    "n": (1,),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "audio": (),
    "modalities": (["text"],),
    "prediction": (),
    "web_search_options": (),
    "dimensions": (),
}


class Refused(Exception):
    """A request that is answered with an error before pvrd hears of it."""

    def __init__(
        self, status: int, message: str, code: str | None = None, param: str | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.code, self.param = status, code, param


def _bad(param: str, what: str) -> Refused:
    return Refused(400, f"{param} {what}", param=param)


def refuse_undone(body: Mapping[str, Any]) -> None:
    """Raises:
    Refused: the request asks for what pvrd does not do.
    """
    for key, harmless in _NOT_DONE.items():
        value = body.get(key)
        if value is not None and value not in harmless:
            raise _bad(key, "is not supported")


def flag(body: Mapping[str, Any], key: str) -> bool:
    """A switch that is off when absent.

    Raises:
        Refused: it is neither true nor false.
    """
    value = body.get(key)
    if value is not None and not isinstance(value, bool):
        raise _bad(key, "has to be true or false")
    return bool(value)


def model(body: Mapping[str, Any]) -> str:
    """The model that is asked for; empty for pvrd's default one.

    Raises:
        Refused: it is no string.
    """
    value = body.get("model")
    if not isinstance(value, str):
        raise _bad("model", "has to be the name of a model, or default")
    return "" if value == "default" else value


def _number(body: Mapping[str, Any], key: str) -> float | None:
    value = body.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _bad(key, "has to be a number")
    try:
        number = float(value)
    except OverflowError:  # a whole number of JSON has no bound
        number = math.inf
    if not math.isfinite(number):
        raise _bad(key, "has to be a number")
    return number


def _integer(body: Mapping[str, Any], key: str) -> int | None:
    value = body.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int):
        raise _bad(key, "has to be a whole number")
    return value


def _text(content: Any, param: str) -> str:
    """A message's content: a string, or parts of type text."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise _bad(param, "has to be a text")
    pieces = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in _TEXT_PARTS or not isinstance(part.get("text"), str):
            raise _bad(param, "has a part that is no text")
        pieces.append(part["text"])
    return "".join(pieces)


def messages(body: Mapping[str, Any]) -> list[dict[str, str]]:
    """The talk as {role, content}.

    Raises:
        Refused: it is none, or holds what is no text.
    """
    given = body.get("messages")
    if not isinstance(given, list) or not given:
        raise _bad("messages", "has to be a list of messages")
    out = []
    for n, message in enumerate(given):
        role = message.get("role") if isinstance(message, dict) else None
        if not isinstance(role, str) or role not in _ROLES:
            raise _bad(f"messages[{n}].role", f"has to be one of {', '.join(_ROLES)}")
        content = _text(message.get("content"), f"messages[{n}].content")
        out.append({"role": _ROLES[role], "content": content})
    return out


def prompt(body: Mapping[str, Any]) -> str:
    """The prompt of a completion.

    Raises:
        Refused: it is no text, or there are several.
    """
    given = body.get("prompt", "")
    if isinstance(given, list) and len(given) == 1:
        given = given[0]
    if not isinstance(given, str):
        raise _bad("prompt", "has to be one text; token numbers and several texts are not taken")
    return given


def texts(body: Mapping[str, Any]) -> list[str]:
    """What to embed.

    Raises:
        Refused: it is no text, or none; one is empty, or there are too many.
    """
    given = body.get("input")
    listed = [given] if isinstance(given, str) else given
    if not isinstance(listed, list) or not listed or not all(isinstance(t, str) for t in listed):
        raise _bad("input", "has to be a text or a list of texts; token numbers are not taken")
    if not all(listed):
        raise _bad("input", "has a text that is empty")
    if len(listed) > MOST_TEXTS:
        raise _bad("input", f"has {len(listed)} texts; it may have {MOST_TEXTS}")
    return listed


def _schema(body: Mapping[str, Any]) -> str | None:
    given = body.get("response_format")
    kind = given.get("type") if isinstance(given, dict) else given
    if kind in (None, "text"):
        return None
    if kind == "json_object":
        return '{"type":"object"}'
    if kind != "json_schema" or not isinstance(given, dict):
        raise _bad("response_format", "has to be of type text, json_object or json_schema")
    outer = given.get("json_schema")
    schema = outer.get("schema") if isinstance(outer, dict) else None
    if not isinstance(schema, dict):
        raise _bad("response_format.json_schema.schema", "has to be a JSON schema")
    return json.dumps(schema)


def _stop(body: Mapping[str, Any]) -> list[str] | None:
    given = body.get("stop")
    if given is None:
        return None
    listed = [given] if isinstance(given, str) else given
    if not isinstance(listed, list) or not all(isinstance(s, str) for s in listed):
        raise _bad("stop", "has to be a text or a list of texts")
    return [s for s in listed if s]


def _bias(body: Mapping[str, Any]) -> dict[int, float] | None:
    given = body.get("logit_bias")
    if not given:
        return None
    try:
        return {int(key): float(value) for key, value in given.items()}
    except (AttributeError, OverflowError, TypeError, ValueError):
        raise _bad("logit_bias", "has to be token numbers with numbers") from None


def _logprobs(body: Mapping[str, Any]) -> int:
    """How many likeliest tokens pvrd is to tell: chat says a flag and a number, completions a
    number alone."""
    given = body.get("logprobs")
    if given is None or given is False:
        return 0
    wanted = _integer(body, "top_logprobs") if given is True else _integer(body, "logprobs")
    if wanted is not None and not 0 <= wanted <= _TOP_LOGPROBS:
        name = "top_logprobs" if given is True else "logprobs"
        raise _bad(name, f"has to be 0 to {_TOP_LOGPROBS}")
    return max(wanted or 0, 1)


def shown_logprobs(body: Mapping[str, Any]) -> int:
    """How many alternatives of each token the answer is to show."""
    given = body.get("top_logprobs") if body.get("logprobs") is True else body.get("logprobs")
    return given if isinstance(given, int) and not isinstance(given, bool) else 0


def settings(body: Mapping[str, Any]) -> dict[str, Any]:
    """Options of Chat and Generate; None is absent. Beside OpenAI's own those of pvrd's sampler.

    Raises:
        Refused: a value of a wrong type. Those out of range are left to pvrd.
    """
    found: dict[str, Any] = {key: _number(body, key) for key in _NUMBERS}
    found |= {key: _integer(body, key) for key in _INTEGERS}
    if found["temperature"] is None:
        found["temperature"] = 1.0  # OpenAI's default; pvrd's own is 0
    most = _integer(body, "max_completion_tokens")
    found["max_tokens"] = most if most is not None else _integer(body, "max_tokens")
    for key in (*_INTEGERS, "max_tokens"):
        if (found[key] or 0) < 0:
            raise _bad(key, "is out of range")
    seed = _integer(body, "seed")
    found["seed"] = None if seed is None else seed % (1 << 64)
    found |= {"stop": _stop(body), "logit_bias": _bias(body), "schema": _schema(body)}
    found["logprobs"] = _logprobs(body) or None
    return {key: value for key, value in found.items() if value is not None}
