# SPDX-License-Identifier: Apache-2.0
"""Events of a text stream as objects of OpenAI's API. Needs no framework."""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping
from typing import Any

# pvrd's reason of an end -> finish_reason. A job that somebody else cancelled ends as it stands.
_FINISH = {"stop": "stop", "length": "length", "cancelled": "stop"}


class Answer:
    """An answer while it comes: takes the events, gives chunks and in the end the whole."""

    def __init__(self, chat: bool, model: str, alternatives: int, logprobs: bool) -> None:
        """alternatives: of each token, how many the client wants to see."""
        self.chat = chat
        self._model = model
        self._alternatives = alternatives
        self._logprobs = logprobs
        self._id = ("chatcmpl-" if chat else "cmpl-") + secrets.token_hex(12)
        self._created = int(time.time())
        self._text: list[str] = []
        self._tokens: list[dict[str, Any]] = []
        self._places: list[int] = []
        self._length = 0
        self._prompt_tokens = self._written = self._read = 0
        self._device = ""
        self.finish: str | None = None

    @property
    def text(self) -> str:
        """What has come."""
        return "".join(self._text)

    def take(self, event: Mapping[str, Any]) -> dict[str, Any] | None:
        """The chunk that an event makes, if any."""
        kind = event.get("type")
        if kind == "start":
            self._model = str(event.get("model") or self._model)
            self._prompt_tokens = int(event.get("prompt_tokens", 0))
            self._device = str(event.get("device_name", ""))
            return self._chunk("", first=True) if self.chat else None
        if kind == "device":
            self._device = str(event.get("device_name", ""))
        if kind not in ("token", "end"):
            return None
        text = str(event.get("text", ""))
        told = self._told(event) if kind == "token" and "logprob" in event else None
        self._text.append(text)
        if told:
            self._tokens.append(told)
            self._places.append(self._length)
        self._length += len(text)
        if kind == "end":
            self.finish = _FINISH.get(str(event.get("reason")), "stop")
            self._written = int(event.get("tokens", 0))
            self._read = int(event.get("stats", {}).get("prefill_tokens", self._prompt_tokens))
        elif not text and not told:
            return None
        return self._chunk(text, [told] if told else [], self._places[-1:])

    def _told(self, event: Mapping[str, Any]) -> dict[str, Any]:
        """A token with its alternatives. pvrd says of these only the numbers: a name that vLLM
        gives tokens, too."""
        text = str(event.get("text", ""))
        own = {"token": text, "logprob": event["logprob"], "bytes": list(text.encode())}
        ranked = list(event.get("logprobs", ()))[: self._alternatives]
        return own | {"top_logprobs": [_alternative(int(n), p, event, own) for n, p in ranked]}

    def _head(self, kind: str) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": kind,
            "created": self._created,
            "model": self._model,
            "system_fingerprint": f"pvrd {self._device}".strip(),
        }

    def _chunk(
        self, text: str, tokens: Any = (), places: Any = (), first: bool = False
    ) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": 0, "finish_reason": self.finish}
        if self.chat:
            role = {"role": "assistant"} if first else {}
            choice["delta"] = role | ({"content": text} if text or first else {})
        else:
            choice["text"] = text
        choice["logprobs"] = self._shown(list(tokens), list(places))
        kind = "chat.completion.chunk" if self.chat else "text_completion"
        return self._head(kind) | {"choices": [choice]}

    def _shown(self, tokens: list[dict[str, Any]], places: list[int]) -> dict[str, Any] | None:
        if not self._logprobs:
            return None
        if self.chat:
            return {"content": tokens, "refusal": None}
        return {
            "tokens": [t["token"] for t in tokens],
            "token_logprobs": [t["logprob"] for t in tokens],
            "top_logprobs": [
                {a["token"]: a["logprob"] for a in t["top_logprobs"]} for t in tokens
            ],
            "text_offset": places,
        }

    def usage(self) -> dict[str, Any]:
        """The tokens that were read and written."""
        return {
            "prompt_tokens": self._prompt_tokens,
            "completion_tokens": self._written,
            "total_tokens": self._prompt_tokens + self._written,
            # Those that an earlier request's work served for.
            "prompt_tokens_details": {"cached_tokens": max(0, self._prompt_tokens - self._read)},
        }

    def usage_chunk(self) -> dict[str, Any]:
        """The last chunk, for those who asked for it."""
        kind = "chat.completion.chunk" if self.chat else "text_completion"
        return self._head(kind) | {"choices": [], "usage": self.usage()}

    def whole(self) -> dict[str, Any]:
        """The answer in one object."""
        choice: dict[str, Any] = {"index": 0, "finish_reason": self.finish}
        if self.chat:
            choice["message"] = {"role": "assistant", "content": self.text, "refusal": None}
        else:
            choice["text"] = self.text
        choice["logprobs"] = self._shown(self._tokens, self._places)
        kind = "chat.completion" if self.chat else "text_completion"
        return self._head(kind) | {"choices": [choice], "usage": self.usage()}


def _alternative(
    number: int, logprob: float, event: Mapping[str, Any], own: Mapping[str, Any]
) -> dict[str, Any]:
    if number == event.get("id"):
        return dict(own)
    return {"token": f"token_id:{number}", "logprob": logprob, "bytes": None}


def model(entry: Mapping[str, Any]) -> dict[str, Any]:
    """A model of ListModels."""
    return {
        "id": entry["name"],
        "object": "model",
        "created": int(entry.get("added", 0)),
        "owned_by": str(entry.get("source", "pvrd")),
    }
