# SPDX-License-Identifier: Apache-2.0
"""Options of methods (a{sv}): checked against a table, with messages that name the key."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pvrd.bus_values import plain
from pvrd.errors import InvalidArgument


@dataclass(frozen=True)
class Option:
    """A key: kind is bool, int, float, str, strs or numbers (a dictionary from whole numbers to
    numbers); default None means that it may be absent.
    """

    kind: str
    default: Any = None
    low: float = 0
    high: float = (1 << 32) - 1
    choices: tuple[str, ...] = ()
    length: int = 256  # of a string, in characters


DEVICE = Option("str", "auto", choices=("auto", "gpu", "cpu"))
PRIORITY = Option("int", 5, high=15)

TEXT_SESSION: Mapping[str, Option] = {
    "model": Option("str", ""),
    "device": DEVICE,
    "priority": PRIORITY,
    "share": Option("int", 0, high=100),
    "context": Option("int", 2048, low=16, high=1 << 20),
    "kv": Option("str", "f16", choices=("f16", "q8")),
}

TEXT_JOB: Mapping[str, Option] = {
    "max_tokens": Option("int", 256, low=1, high=1 << 20),
    "temperature": Option("float", 0.0, high=100),
    "top_k": Option("int", 40, high=64),
    "top_p": Option("float", 0.95, high=1),
    "min_p": Option("float", 0.05, high=1),
    "seed": Option("int", high=(1 << 64) - 1),
    "stop": Option("strs", (), high=8),
    "top5": Option("bool", False),
    "logprobs": Option("int", 0, high=20),
    "repeat_penalty": Option("float", 1.0, low=0.01, high=100),
    "repeat_last_n": Option("int", 64, high=1 << 20),
    "frequency_penalty": Option("float", 0.0, low=-100, high=100),
    "presence_penalty": Option("float", 0.0, low=-100, high=100),
    "dry_multiplier": Option("float", 0.0, high=100),
    "dry_base": Option("float", 1.75, low=1, high=10),
    "dry_allowed_length": Option("int", 2, low=1, high=1024),
    "mirostat": Option("int", 0, high=2),
    "mirostat_tau": Option("float", 5.0, high=100),
    "mirostat_eta": Option("float", 0.1, high=1),
    "logit_bias": Option("numbers", {}, low=-1000, high=1000, length=1024),
    "schema": Option("str", "", length=1 << 16),
}

EXTRACT: Mapping[str, Option] = {
    **{k: option for k, option in TEXT_JOB.items() if k not in ("schema", "stop", "mirostat")},
    "instruction": Option("str", "", length=1 << 14),
}

EMBED: Mapping[str, Option] = {
    "pooling": Option("str", "mean", choices=("mean", "last")),
    "count_tokens": Option("bool", False),
}

CLASSIFY: Mapping[str, Option] = {
    "question": Option("str", "", length=1 << 14),
    "calibrate": Option("bool", True),
}

ENLARGED: Mapping[str, Option] = {
    "scale": Option("float", 2.0, low=1, high=8),
    "out_width": Option("int", low=1, high=131072),
    "out_height": Option("int", low=1, high=131072),
    "tile": Option("int", 0, high=4096),
    "overlap": Option("int", 0, high=256),
    "tile_map": Option("bool", False),
    "precision": Option("str", "f32", choices=("model", "f32", "int8", "auto")),
}

VIDEO_SESSION: Mapping[str, Option] = {
    "model": Option("str", ""),
    "width": Option("int", low=1, high=16384),
    "height": Option("int", low=1, high=16384),
    "pixel": Option("str", "i420", choices=("i420", "nv12", "i444", "gray")),
    "depth": Option("int", 8, low=8, high=16),
    "siting": Option("str", "left", choices=("left", "centre")),
    "full_range": Option("bool", False),
    **ENLARGED,
    "unchanged": Option("str", "exact", choices=("exact", "tolerant", "off")),
    "adapt": Option("bool", True),
    "interpolate": Option("bool", True),
    "slots": Option("int", low=1, high=16),
    "device": DEVICE,
    "priority": PRIORITY,
    "share": Option("int", 0, high=100),
}

PICTURE: Mapping[str, Option] = {
    "model": Option("str", ""),
    **ENLARGED,
    "format": Option("str", "", choices=("", "png", "jpeg")),
    "device": DEVICE,
    "priority": PRIORITY,
    "share": Option("int", 0, high=100),
    "stream": Option("bool", False),
}

LIST_JOBS: Mapping[str, Option] = {"all": Option("bool", False)}

TRACE: Mapping[str, Option] = {"seconds": Option("float", 2.0, low=0.01, high=600)}

ADD_MODEL: Mapping[str, Option] = {
    "licence": Option("str", ""),
    "origin": Option("str", "", length=1024),
    "replace": Option("bool", False),
    "stream": Option("bool", False),
    "interactive": Option("bool", False),
}


def parse(given: Mapping[str, Any], table: Mapping[str, Option]) -> dict[str, Any]:
    """All keys of the table with their values.

    Raises:
        InvalidArgument: a key that is not there, a wrong type, a value out of range.
    """
    unknown = sorted(set(given) - set(table))
    if unknown:
        known = ", ".join(sorted(table))
        raise InvalidArgument(f"there is no option {unknown[0][:64]!r}; there are {known}")
    return {
        key: _value(key, plain(given[key]), option) if key in given else option.default
        for key, option in table.items()
    }


def _value(key: str, value: Any, option: Option) -> Any:
    if option.kind == "bool":
        if not isinstance(value, bool):
            raise InvalidArgument(f"option {key!r} is true or false")
        return value
    if option.kind in ("int", "float"):
        number = isinstance(value, int) or (option.kind == "float" and isinstance(value, float))
        if isinstance(value, bool) or not number or not math.isfinite(value):
            what = "an integer" if option.kind == "int" else "a number"
            raise InvalidArgument(f"option {key!r} is {what}")
        if not option.low <= value <= option.high:
            raise InvalidArgument(
                f"option {key!r} lies in {option.low} to {option.high}, not {value}"
            )
        return value if option.kind == "int" else float(value)
    if option.kind == "strs":
        return _strings(key, value, option)
    if option.kind == "numbers":
        return _numbers(key, value, option)
    if not isinstance(value, str):
        raise InvalidArgument(f"option {key!r} is a string")
    if option.choices and value not in option.choices:
        choices = ", ".join(c for c in option.choices if c)
        raise InvalidArgument(f"option {key!r} is one of {choices}, not {value[:64]!r}")
    if len(value) > option.length:
        raise InvalidArgument(f"option {key!r} has at most {option.length} characters")
    return value


def _strings(key: str, value: Any, option: Option) -> list[str]:
    if not isinstance(value, Sequence) or isinstance(value, (str, bytes)):
        raise InvalidArgument(f"option {key!r} is a list of strings")
    if len(value) > option.high or not all(isinstance(v, str) for v in value):
        raise InvalidArgument(f"option {key!r} is a list of at most {option.high:g} strings")
    if any(not v or len(v) > option.length for v in value):
        raise InvalidArgument(f"option {key!r}: each string has 1 to {option.length} characters")
    return list(value)


def _numbers(key: str, value: Any, option: Option) -> dict[str, float]:
    """Keys as decimal text, as JSON has them."""
    if not isinstance(value, Mapping) or len(value) > option.length:
        raise InvalidArgument(f"option {key!r} gives at most {option.length} numbers one each")
    out = {}
    for name, number in value.items():
        if isinstance(name, bool) or not isinstance(name, int) or name < 0:
            raise InvalidArgument(f"option {key!r} has keys that are whole numbers")
        if isinstance(number, bool) or not isinstance(number, (int, float)):
            raise InvalidArgument(f"option {key!r} has values that are numbers")
        if not option.low <= number <= option.high:
            raise InvalidArgument(f"option {key!r} has values in {option.low} to {option.high}")
        out[str(name)] = float(number)
    return out
