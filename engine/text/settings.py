# SPDX-License-Identifier: Apache-2.0
"""What a request may ask of the choice of tokens, checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from engine.errors import InvalidArgument

MAX_STOPS = 16
MAX_STOP_LENGTH = 256
MAX_TOKENS = 1 << 20
MAX_BIASES = 1024
MAX_LOGPROBS = 20
_SEEDS = (1 << 64) - 1
# Settings of a job that are not about sampling and may stand beside these.
_OTHERS = frozenset({"model", "device", "context", "kv", "priority", "share", "stream", "session"})

_NUMBERS = {  # name: lowest, highest
    "temperature": (0.0, 100.0),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "repeat_penalty": (0.01, 100.0),
    "frequency_penalty": (-100.0, 100.0),
    "presence_penalty": (-100.0, 100.0),
    "dry_multiplier": (0.0, 100.0),
    "dry_base": (1.0, 10.0),
    "mirostat_tau": (0.0, 100.0),
    "mirostat_eta": (0.0, 1.0),
}
_WHOLES = {
    "top_k": (0, MAX_TOKENS * 2),
    "seed": (0, _SEEDS),
    "max_tokens": (1, MAX_TOKENS),
    "repeat_last_n": (0, MAX_TOKENS),
    "dry_allowed_length": (1, 1024),
    "mirostat": (0, 2),
    "logprobs": (0, MAX_LOGPROBS),
}


@dataclass(frozen=True)
class Settings:
    """What a request may ask for; the defaults are those of the API.

    The penalties look at the last `repeat_last_n` tokens of prompt and answer (0: all), DRY at all.
    `logprobs`: so many likeliest tokens are told with each token (and its own chance with 1 or
    more).
    """

    temperature: float = 0.0
    top_k: int = 40  # 0: all
    top_p: float = 0.95  # 1: all
    min_p: float = 0.05  # 0: all
    seed: int = 0
    max_tokens: int = 256
    stop: tuple[str, ...] = ()
    top5: bool = False
    repeat_penalty: float = 1.0  # 1: none
    repeat_last_n: int = 64
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    dry_multiplier: float = 0.0  # 0: none
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    mirostat: int = 0  # 0: none, 2
    mirostat_tau: float = 5.0
    mirostat_eta: float = 0.1
    logit_bias: tuple[tuple[int, float], ...] = ()
    logprobs: int = 0
    schema: str = ""  # JSON that the answer has to fit; "": none

    @classmethod
    def parse(cls, given: Mapping[str, Any], seed: int = 0) -> Settings:
        """Settings of a request; `seed` is for those that name none.

        Raises:
            InvalidArgument: unknown names, wrong types, values out of range.
        """
        if unknown := set(given) - {f.name for f in fields(cls)} - _OTHERS:
            raise InvalidArgument(f"There is no setting named {min(unknown)!r}.")
        values: dict[str, Any] = {"seed": seed}
        for name, value in given.items():
            if name in _NUMBERS:
                values[name] = _number(name, value, *_NUMBERS[name])
            elif name in _WHOLES:
                values[name] = _whole(name, value, *_WHOLES[name])
        if "stop" in given:
            values["stop"] = _stops(given["stop"])
        if "schema" in given:
            if not isinstance(given["schema"], str):
                raise InvalidArgument("schema is a text of JSON.")
            if given["schema"] and values.get("mirostat"):
                raise InvalidArgument("schema and mirostat do not go together.")
            values["schema"] = given["schema"]
        if "logit_bias" in given:
            values["logit_bias"] = _biases(given["logit_bias"])
        if "top5" in given:
            if not isinstance(given["top5"], bool):
                raise InvalidArgument("top5 is true or false.")
            values["top5"] = given["top5"]
        if values.get("mirostat") == 1:
            raise InvalidArgument("mirostat is 0 (off) or 2.")
        return cls(**values)

    @property
    def penalises(self) -> bool:
        """Logits are changed by what was said before, or by a bias."""
        return bool(
            self.repeat_penalty != 1
            or self.frequency_penalty
            or self.presence_penalty
            or self.dry_multiplier
            or self.logit_bias
        )


def _stops(stop: Any) -> tuple[str, ...]:
    stops = (stop,) if isinstance(stop, str) else tuple(stop) if isinstance(stop, list) else stop
    if not isinstance(stops, tuple) or not all(isinstance(s, str) and s for s in stops):
        raise InvalidArgument("stop is a list of texts that are not empty.")
    if len(stops) > MAX_STOPS or any(len(s) > MAX_STOP_LENGTH for s in stops):
        raise InvalidArgument(
            f"There may be {MAX_STOPS} stop strings of {MAX_STOP_LENGTH} characters at most."
        )
    return stops


def _biases(given: Any) -> tuple[tuple[int, float], ...]:
    """From {"id": bias, …}."""
    if not isinstance(given, Mapping) or len(given) > MAX_BIASES:
        raise InvalidArgument(f"logit_bias gives at most {MAX_BIASES} token ids a number each.")
    out = []
    for key, value in given.items():
        text = str(key)
        if not (text.isascii() and text.isdigit()):
            raise InvalidArgument(f"logit_bias has {text[:32]!r} where a token id should be.")
        out.append((int(text), _number(f"logit_bias[{text}]", value, -1000.0, 1000.0)))
    return tuple(sorted(out))


def _number(name: str, value: Any, low: float, high: float) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
        raise InvalidArgument(f"{name} is a number from {low:g} to {high:g}.")
    return float(value)


def _whole(name: str, value: Any, low: int, high: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise InvalidArgument(f"{name} is a whole number from {low} to {high}.")
    return value
