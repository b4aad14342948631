# SPDX-License-Identifier: Apache-2.0
"""What is asked of a text model, and the events that an answer is made of (engine/text/generate.py
makes them).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from engine.errors import InvalidArgument
from engine.text.model import TextModel
from engine.text.template import check_messages

Reason = Literal["stop", "length", "cancelled"]


@dataclass(frozen=True)
class Request:
    """What is asked for: `generate` goes on from a prompt, `chat` answers messages [{role,
    content}, …].
    """

    kind: Literal["generate", "chat"]
    prompt: str = ""
    messages: Sequence[Mapping[str, str]] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def parse(cls, header: Mapping[str, Any]) -> Request:
        """From the header of a journal.

        Raises:
            InvalidArgument
        """
        settings = header.get("settings", {})
        if not isinstance(settings, Mapping):
            raise InvalidArgument("The settings are no object.")
        kind = header.get("kind")
        if kind == "chat":
            return cls("chat", messages=check_messages(header.get("messages")), settings=settings)
        prompt = header.get("prompt")
        if kind != "generate" or not isinstance(prompt, str):
            raise InvalidArgument("A request is of the kind generate with a prompt, or chat.")
        return cls("generate", prompt=prompt, settings=settings)


def tokenize(model: TextModel, request: Request) -> tuple[list[int], tuple[str, ...]]:
    """Ids of a request's prompt, and stop strings that its form adds.

    Raises:
        BadModel: a broken chat template.
        InvalidArgument: messages that the template refuses, an empty prompt.
    """
    if request.kind == "chat":
        pieces = model.template.render(check_messages(list(request.messages)))
        ids, stops = model.tokenizer.encode_pieces(pieces), model.template.stops
    else:
        ids, stops = model.tokenizer.encode(request.prompt), ()
    if not ids:
        raise InvalidArgument("The prompt is empty.")
    return ids, stops


@dataclass(frozen=True)
class Start:
    """The first event."""

    prompt_tokens: int
    context: int


@dataclass(frozen=True)
class Token:
    """Token number n; `text` is what it completes of the answer, and may be empty. `logprob` is the
    log of its chance as the model gave it, `logprobs` those of the likeliest tokens.
    """

    n: int
    id: int
    text: str
    top5: list[list[float]] | None = None
    logprob: float | None = None
    logprobs: list[list[float]] | None = None


@dataclass(frozen=True)
class End:
    """The last event; `text` is what was held back. Stats: prefill_s, prefill_tokens, decode_s,
    decode_tokens.
    """

    reason: Reason
    text: str
    stats: dict[str, float]


Event = Start | Token | End


def message(event: Event) -> dict[str, Any]:
    """An event as a message of the worker protocol, without its job."""
    names = {Start: "text.start", Token: "text.token", End: "text.end"}
    fields = {k: v for k, v in asdict(event).items() if v is not None}
    return {"t": names[type(event)], **fields}
