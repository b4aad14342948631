# SPDX-License-Identifier: Apache-2.0
"""Tokenizer of a model: text to ids and back. `tokenizer_gguf` and `tokenizer_json` make it of a
file's or a folder's tokens, by `tokenizer_assembly`.

The `tokenizers` library does the merging (byte-level BPE for `gpt2`, SentencePiece's BPE for
`llama`); which text is looked at for control tokens is decided here: only what a chat template
wrote, never what a user wrote.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from engine.errors import BadModel, UnsupportedModel
from engine.text.short import Short, Tables

if TYPE_CHECKING:
    from tokenizers import Tokenizer

SHORTS = 16  # short texts before the whole library pays


@dataclass(frozen=True)
class Settings:
    """What a tokenizer knows besides its vocabulary; stored in a compiled model's header."""

    kind: str  # gpt2 or llama
    pre: str
    bos: int | None
    eos: int | None
    add_bos: bool
    add_space_prefix: bool
    ends: tuple[int, ...]  # ids that end an answer
    specials: tuple[tuple[str, int], ...]  # control tokens: in templates' text only
    user_defined: tuple[tuple[str, int], ...]  # tokens that are looked for in any text


@dataclass(frozen=True)
class Data:
    """A tokenizer as a compiled model holds it."""

    settings: dict[str, Any]
    library: bytes  # tokenizer.json of the tokenizers library
    pieces: npt.NDArray[np.uint8]  # the bytes that each id stands for, one after the other
    ends: npt.NDArray[np.uint32]  # where each piece ends
    short: Tables | None = None  # for short texts: `library` is then not read before it has to be


def tokenizers_library() -> Any:
    """The library, imported when a text model needs it: where it is missing, video still works.

    Raises:
        UnsupportedModel: it is not installed.
    """
    try:
        import tokenizers
    except ImportError:
        what = "Text models need the Python package tokenizers, which is not installed."
        raise UnsupportedModel(what) from None
    return tokenizers


class TextTokenizer:
    """Text to ids and back."""

    def __init__(self, data: Data) -> None:
        """Raises:
        BadModel: the data is damaged.
        UnsupportedModel: the tokenizers library is not installed.
        """
        hf = tokenizers_library()
        try:
            raw = dict(data.settings)
            for key in ("ends",):
                raw[key] = tuple(int(i) for i in raw[key])
            for key in ("specials", "user_defined"):
                raw[key] = tuple((str(t), int(i)) for t, i in raw[key])
            self.settings = Settings(**raw)
            self._short = None if data.short is None else Short(hf, data.short)
        except Exception as e:  # the library raises bare Exceptions
            raise BadModel("The compiled model's tokenizer is damaged.") from e
        self._source = data.library
        self._whole: Tokenizer | None = None
        self._shorts = 0
        if self._short is None:
            self._whole = self._library
        self._pieces = bytes(data.pieces)
        self._piece_ends = data.ends
        self._specials = dict(self.settings.specials)
        self._user = dict(self.settings.user_defined)
        self.special_texts = tuple(self._specials)
        self._plain = _alternatives(self._user)
        self._marked = _alternatives({**self._user, **self._specials})

    @property
    def _library(self) -> Tokenizer:
        """All of it.

        Raises:
            BadModel: it is damaged.
        """
        if self._whole is None:
            try:
                self._whole = tokenizers_library().Tokenizer.from_str(bytes(self._source).decode())
            except Exception as e:
                raise BadModel("The compiled model's tokenizer is damaged.") from e
            self._source, self._short = b"", None
        return self._whole

    def _ids(self, text: str) -> list[int]:
        """Ids of a text without control tokens."""
        if self._short is not None and self._shorts < SHORTS:
            self._shorts += 1
            if (ids := self._short.encode(text)) is not None:
                return ids
        return list(self._library.encode(text, add_special_tokens=False).ids)

    @property
    def vocab(self) -> int:
        """Number of tokens; the model may have more embeddings than that."""
        return len(self._piece_ends)

    def special(self, token: int | None) -> str:
        """The text of a control token, "" for none: bos_token and eos_token of templates."""
        return next((t for t, i in self.settings.specials if i == token), "")

    def encode(self, text: str, specials: bool = False, bos: bool | None = None) -> list[int]:
        """Ids of a text. `specials`: control tokens in it count as such; `bos` None: as the model
        wants it.
        """
        pieces = [(text, specials)]
        return self.encode_pieces(pieces, bos)

    def encode_inside(self, text: str) -> list[int]:
        """Ids of a text that goes on with another: nothing comes before it."""
        return self._ids(text)

    def encode_pieces(
        self, pieces: Sequence[tuple[str, bool]], bos: bool | None = None
    ) -> list[int]:
        """Ids of a text whose parts (text, control tokens count) follow each other."""
        ids: list[int] = []
        if self.settings.bos is not None and (self.settings.add_bos if bos is None else bos):
            ids.append(self.settings.bos)
        after_special = True
        for text, specials in pieces:
            for part, token in self._cut(text, self._marked if specials else self._plain, specials):
                if token is not None:
                    ids.append(token)
                    after_special = True
                elif part:
                    # llama.cpp puts SentencePiece's leading space after each control token too.
                    prefix = " " if self.settings.add_space_prefix and after_special else ""
                    ids.extend(self._ids(prefix + part))
                    after_special = False
        if bos is None and len(ids) > 1 and ids[0] == ids[1] == self.settings.bos and pieces[0][1]:
            del ids[0]  # the template wrote it as well
        return ids

    def _cut(
        self, text: str, pattern: re.Pattern[str] | None, specials: bool
    ) -> Iterator[tuple[str, int | None]]:
        # JSON can carry halves of surrogate pairs, which are no text.
        text = text.encode("utf-8", "replace").decode()
        at = 0
        for match in pattern.finditer(text) if pattern else ():
            yield text[at : match.start()], None
            found = match.group()
            token = self._user.get(found)
            if token is None or (specials and found in self._specials):
                token = self._specials[found]
            yield found, token
            at = match.end()
        yield text[at:], None

    def piece(self, token: int) -> bytes:
        """The bytes that an id stands for; none for control tokens and ids without a token."""
        if not 0 <= token < len(self._piece_ends):
            return b""
        begin = int(self._piece_ends[token - 1]) if token else 0
        return self._pieces[begin : int(self._piece_ends[token])]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, without what is no whole character at the end."""
        stream = Detokenizer(self)
        return "".join(map(stream.add, ids))


class Detokenizer:
    """Ids to text as they come: whole characters only, a function of the ids alone.

    Bytes that are no UTF-8 become U+FFFD; those of a character that is still incomplete wait.
    """

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, token: int) -> str:
        """The characters that this token completes."""
        return self._decoder.decode(self._tokenizer.piece(token))


def _alternatives(texts: dict[str, int]) -> re.Pattern[str] | None:
    """A pattern of all texts, the longest first."""
    if not texts:
        return None
    return re.compile("|".join(re.escape(t) for t in sorted(texts, key=len, reverse=True)))
