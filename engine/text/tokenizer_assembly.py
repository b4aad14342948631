# SPDX-License-Identifier: Apache-2.0
"""A tokenizer of the tokens that a model's file holds, whatever the file: for the `tokenizers`
library, and the bytes that each id stands for.

Control tokens get names in the library's vocabulary that no text can spell.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from engine.errors import BadModel, UnsupportedModel
from engine.text.tokenizer import Data, Settings, tokenizers_library

if TYPE_CHECKING:
    from tokenizers import Tokenizer

MAX_TOKEN = 512  # bytes of a token's text: it has to fit a line of the text stream
MAX_SPECIALS = 1 << 18  # characters of all control tokens together
MAX_SPECIAL = 256  # characters of one

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6

_CONTRACTIONS = "(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_WORDS = r"|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"

# How text is cut before merging, by tokenizer.ggml.pre, as llama.cpp does it (src/llama-vocab.cpp):
# patterns that are applied one after the other.
SPLITS: dict[str, tuple[str, ...]] = {
    "default": (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]"),
    "gpt-2": (_GPT2,),
    "smollm": (r"\p{N}", _GPT2),
    "llama-bpe": (_CONTRACTIONS + _WORDS % r"\p{N}{1,3}",),
    "qwen2": (_CONTRACTIONS + _WORDS % r"\p{N}",),
}

# Control tokens that end an answer whatever the file's eos key says (the list that llama.cpp
# keeps).
_END_TEXTS = {
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|eom_id|>", "<EOT>",
    "<|end_of_text|>", "</s>", "<|return|>", "<|call|>", "< EOT >", "_<EOT>",
    "<｜end▁of▁sentence｜>", "<end_of_utterance>",
}  # fmt: skip


def _byte_alphabet() -> dict[str, int]:
    """The printable character that byte-level BPE writes for each byte (GPT-2's table), turned
    round.
    """
    own = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [b for b in range(256) if b not in own]
    table = {chr(b): b for b in own}
    table.update({chr(256 + i): b for i, b in enumerate(rest)})
    return table


_BYTES = _byte_alphabet()

Pairs = list[tuple[str, str]]  # merges


@dataclass(frozen=True)
class Words:
    """What a model's file says of its tokens: texts and types by id, and the ids of some."""

    kind: str  # gpt2 or llama
    pre: str
    texts: Sequence[str]
    types: Sequence[int]
    bos: int | None
    eos: int | None
    ends: frozenset[int]
    add_bos: bool
    add_space_prefix: bool
    unknown: int | None = None
    normalizer: str = ""  # "NFC" where texts are normalised first
    ignore_merges: bool = False  # a piece that is a token is taken as one, whatever the merges


def assemble(words: Words, merges: Callable[[dict[str, int]], Pairs]) -> Data:
    """A tokenizer of a model's tokens; `merges` gets the names under which the library knows them.

    Raises:
        BadModel, UnsupportedModel
    """
    texts, types = words.texts, words.types
    specials = [(t, i) for i, t in enumerate(texts) if t and types[i] in (CONTROL, UNKNOWN)]
    user = [(t, i) for i, t in enumerate(texts) if t and types[i] == USER_DEFINED]
    lengths = [len(t) for t, _ in (*specials, *user)]
    if sum(lengths) > MAX_SPECIALS or max(lengths, default=0) > MAX_SPECIAL:
        raise UnsupportedModel("The model has too many or too long control tokens.")
    ends = words.ends | {i for t, i in specials if types[i] == CONTROL and t in _END_TEXTS}
    settings = Settings(
        words.kind,
        words.pre,
        words.bos,
        words.eos,
        words.add_bos and words.bos is not None,
        words.add_space_prefix,
        tuple(sorted(ends)),
        tuple(specials),
        tuple(user),
    )
    # No text contains NUL followed by these digits as one token: merges that would build it do not
    # exist.
    hidden = {CONTROL, UNUSED, UNKNOWN, USER_DEFINED}
    names = [f"\0{i}" if types[i] in hidden else text for i, text in enumerate(texts)]
    known: dict[str, int] = {}
    for i, name in enumerate(names):
        # A text that stands twice is found under its first id.
        known.setdefault(name if name not in known else f"\0{i}", i)
    pairs = merges(known)
    if words.kind == "gpt2":
        library = _byte_level(known, pairs, words)
        if words.normalizer:
            library.normalizer = getattr(tokenizers_library().normalizers, words.normalizer)()
    else:
        unk = names[words.unknown] if words.unknown is not None else None
        library = _sentencepiece(known, pairs, unk)
    pieces = [_piece(words.kind, t, types[i]) for i, t in enumerate(texts)]
    end = np.cumsum([len(p) for p in pieces], dtype=np.int64)
    return Data(
        asdict(settings),
        library.to_str().encode(),
        np.frombuffer(b"".join(pieces), np.uint8),
        end.astype(np.uint32),
    )


def usable(merges: Pairs, known: dict[str, int], texts: set[str]) -> Pairs:
    """The merges that can come about: one that builds a token that is looked for as a whole is
    never used.

    Raises:
        BadModel: one is of no tokens.
    """
    for left, right in merges:
        if not left or not right or not {left, right, left + right} <= texts:
            raise BadModel(f"The model has the impossible merge {left[:20]!r} {right[:20]!r}.")
    return [(a, b) for a, b in merges if a in known and b in known and a + b in known]


def _piece(kind: str, text: str, type_: int) -> bytes:
    """The bytes that a token stands for in an answer; control tokens stand for none."""
    if type_ in (CONTROL, UNKNOWN, UNUSED):
        return b""
    if type_ == USER_DEFINED:
        return text.encode()
    if kind == "gpt2":
        if all(c in _BYTES for c in text):
            return bytes(_BYTES[c] for c in text)
        return text.encode()
    if type_ == BYTE:
        if not re.fullmatch("<0x[0-9A-Fa-f]{2}>", text):
            raise BadModel(f"The model has the byte token {text[:16]!r}.")
        return bytes([int(text[3:5], 16)])
    return text.replace("▁", " ").encode()


def _byte_level(vocab: dict[str, int], merges: Pairs, words: Words) -> Tokenizer:
    """Byte-level BPE. Bytes that the vocabulary lacks are left out, as llama.cpp does it."""
    hf = tokenizers_library()
    library: Tokenizer = hf.Tokenizer(
        hf.models.BPE(vocab, merges, ignore_merges=words.ignore_merges)
    )
    cuts: list[Any] = [
        hf.pre_tokenizers.Split(hf.Regex(pattern), behavior="isolated")
        for pattern in SPLITS[words.pre]
    ]
    cuts.append(hf.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
    library.pre_tokenizer = hf.pre_tokenizers.Sequence(cuts)
    return library


def _sentencepiece(vocab: dict[str, int], merges: Pairs, unk: str | None) -> Tokenizer:
    hf = tokenizers_library()
    model = hf.models.BPE(vocab, merges, unk_token=unk, fuse_unk=False, byte_fallback=True)
    library: Tokenizer = hf.Tokenizer(model)
    library.normalizer = hf.normalizers.Replace(" ", "▁")
    return library
