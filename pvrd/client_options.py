# SPDX-License-Identifier: Apache-2.0
"""The options of the daemon's methods, as clients give them: plain values of known types."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from pvrd.bus_values import V
from pvrd.errors import InvalidArgument

# The type of each option, over all methods.
OPTIONS = {
    "model": "s",
    "device": "s",
    "priority": "u",
    "share": "u",
    "context": "u",
    "kv": "s",
    "max_tokens": "u",
    "temperature": "d",
    "top_k": "u",
    "top_p": "d",
    "min_p": "d",
    "seed": "t",
    "stop": "as",
    "top5": "b",
    "logprobs": "u",
    "repeat_penalty": "d",
    "repeat_last_n": "u",
    "frequency_penalty": "d",
    "presence_penalty": "d",
    "dry_multiplier": "d",
    "dry_base": "d",
    "dry_allowed_length": "u",
    "mirostat": "u",
    "mirostat_tau": "d",
    "mirostat_eta": "d",
    "logit_bias": "a{ud}",
    "schema": "s",
    "instruction": "s",
    "pooling": "s",
    "count_tokens": "b",
    "question": "s",
    "calibrate": "b",
    "width": "u",
    "height": "u",
    "pixel": "s",
    "depth": "u",
    "siting": "s",
    "full_range": "b",
    "scale": "d",
    "out_width": "u",
    "out_height": "u",
    "unchanged": "s",
    "adapt": "b",
    "interpolate": "b",
    "tile_map": "b",
    "precision": "s",
    "slots": "u",
    "tile": "u",
    "overlap": "u",
    "format": "s",
    "stream": "b",
    "licence": "s",
    "origin": "s",
    "replace": "b",
    "interactive": "b",
}

_T = TypeVar("_T")


def options(values: Mapping[str, Any]) -> dict[str, Any]:
    """Plain values as a{sv}; None is left out.

    Raises:
        InvalidArgument: an option that is not known, or a value that does not fit its type.
    """
    made = {}
    for key, value in values.items():
        if value is None:
            continue
        if key not in OPTIONS:
            raise InvalidArgument(f"there is no option {key}")
        kind, words = _KINDS[OPTIONS[key]]
        try:
            made[key] = V(OPTIONS[key], kind(value))
        except OverflowError:
            raise InvalidArgument(f"{key} is out of range") from None
        except (AttributeError, TypeError, ValueError):
            raise InvalidArgument(f"{key} has to be {words}") from None
    return made


def _whole(bits: int) -> Callable[[Any], int]:
    def check(value: Any) -> int:
        number = operator.index(value)
        if number >> bits:  # below 0, too
            raise OverflowError
        return number

    return check


def _is(kind: type[_T]) -> Callable[[Any], _T]:
    def check(value: Any) -> _T:
        if not isinstance(value, kind):
            raise TypeError
        return value

    return check


def _texts(value: Any) -> list[str]:
    if isinstance(value, str):
        raise TypeError
    return [_is(str)(text) for text in value]


def _biases(value: Any) -> dict[int, float]:
    token = _whole(32)
    return {token(key): float(number) for key, number in value.items()}


# What makes a value of a D-Bus type of any that fits, and words for what does.
_KINDS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "u": (_whole(32), "a whole number"),
    "t": (_whole(64), "a whole number"),
    "d": (float, "a number"),
    "b": (_is(bool), "true or false"),
    "s": (_is(str), "a text"),
    "as": (_texts, "a list of texts"),
    "a{ud}": (_biases, "token numbers with numbers"),
}
