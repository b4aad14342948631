# SPDX-License-Identifier: Apache-2.0
"""Tokenizer of a model, made from a GGUF file's metadata or (`tokenizer_json`) from a folder's.

The `tokenizers` library does the merging (byte-level BPE for `gpt2`, SentencePiece's BPE for
`llama`); which text is looked at for control tokens is decided here: only what a chat template
wrote, never what a user wrote. Control tokens therefore get names in the library's vocabulary that
no text can spell.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from engine.errors import BadModel, UnsupportedModel
from engine.importers.gguf import Gguf
from engine.text.short import Short, Tables

if TYPE_CHECKING:
    from tokenizers import Tokenizer

MAX_VOCAB = 1 << 21
MAX_TOKEN = 512  # bytes of a token's text: it has to fit a line of the text stream
MAX_SPLIT = 128  # characters of the longest SentencePiece that merges are derived for

MAX_SPECIALS = 1 << 18  # characters of all control tokens together
MAX_SPECIAL = 256  # characters of one
MAX_MERGES = 1 << 21
SHORTS = 16  # short texts before the whole library pays

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6

_CONTRACTIONS = "(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_WORDS = r"|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"

# How text is cut before merging, by tokenizer.ggml.pre, as llama.cpp does it (src/llama-vocab.cpp):
# patterns that are applied one after the other.
_SPLITS: dict[str, tuple[str, ...]] = {
    "default": (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]"),
    "gpt-2": (_GPT2,),
    "smollm": (r"\p{N}", _GPT2),
    "llama-bpe": (_CONTRACTIONS + _WORDS % r"\p{N}{1,3}",),
    "qwen2": (_CONTRACTIONS + _WORDS % r"\p{N}",),
}
_ALIASES = {
    "phi-2": "gpt-2", "jina-es": "gpt-2", "jina-de": "gpt-2", "mpt": "gpt-2", "olmo": "gpt-2",
    "gigachat": "gpt-2", "starcoder": "smollm", "refact": "smollm", "command-r": "smollm",
    "codeshell": "smollm", "exaone": "smollm", "minerva-7b": "smollm", "llama3": "llama-bpe",
    "llama-v3": "llama-bpe", "falcon3": "llama-bpe", "pixtral": "llama-bpe",
    "deepseek-r1-qwen": "qwen2", "stablelm2": "qwen2", "hunyuan": "qwen2",
}  # fmt: skip

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


def import_tokenizer(file: Gguf, vocab: int) -> Data:
    """Reads a GGUF's tokenizer. `vocab` is the number of rows of the embedding table.

    Raises:
        BadModel: damaged or missing.
        UnsupportedModel: a kind of tokenizer or of pre-tokenizer that is not known.
    """
    kind = file.text("tokenizer.ggml.model")
    if kind not in ("gpt2", "llama"):
        raise UnsupportedModel(
            f"The model has a tokenizer of the kind {kind!r}, which is not supported."
        )
    texts = _token_texts(file, vocab)
    types = _token_types(file, len(texts))
    pre = ""
    if kind == "gpt2":
        pre = file.text("tokenizer.ggml.pre", "default")
        pre = _ALIASES.get(pre, pre)
        if pre not in _SPLITS:
            raise UnsupportedModel(
                f"The model cuts text by the rules {pre!r}, which are not supported."
            )
    words = _words(file, kind, pre, texts, types)
    if kind == "gpt2":
        merges = _merges(file)
        return assemble(words, lambda known: usable(merges, known, set(texts)))
    scores = _scores(file, len(texts))
    return assemble(words, lambda known: _by_scores(known, scores, types))


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
            library.normalizer = getattr(_tokenizers().normalizers, words.normalizer)()
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


def _token_texts(file: Gguf, vocab: int) -> list[str]:
    raw = file.strings("tokenizer.ggml.tokens")
    if not 0 < len(raw) <= vocab <= MAX_VOCAB:
        raise BadModel(f"The model has {len(raw)} tokens and {vocab} embeddings.")
    if any(len(t) > MAX_TOKEN for t in raw):
        raise BadModel(f"The model has a token of more than {MAX_TOKEN} bytes.")
    # A few old vocabularies hold pieces of characters; they can be written but never be merged.
    return [t.decode("utf-8", "replace") for t in raw]


def _token_types(file: Gguf, count: int) -> list[int]:
    types = file.numbers("tokenizer.ggml.token_type")
    if types is None:
        return [NORMAL] * count
    if len(types) != count or types.dtype.kind not in "iu":
        raise BadModel("The model's token types do not match its tokens.")
    return [int(t) for t in types]


def _scores(file: Gguf, count: int) -> npt.NDArray[np.float64]:
    scores = file.numbers("tokenizer.ggml.scores")
    if scores is None or len(scores) != count or scores.dtype.kind != "f":
        raise BadModel("The model's token scores do not match its tokens.")
    return np.nan_to_num(scores.astype(np.float64))


def _special_id(file: Gguf, name: str, count: int) -> int | None:
    key = f"tokenizer.ggml.{name}_token_id"
    if key not in file.metadata:
        return None
    value = file.int(key)
    # llama.cpp's files write -1 (as an unsigned number) for "there is none".
    return value if 0 <= value < count else None


def _words(file: Gguf, kind: str, pre: str, texts: Sequence[str], types: Sequence[int]) -> Words:
    names = ("bos", "eos", "eot", "eom", "unknown")
    special = {name: _special_id(file, name, len(texts)) for name in names}
    unknown = special["unknown"]
    if unknown is None:
        unknown = next((i for i, t in enumerate(types) if t == UNKNOWN), None)
    adds = kind == "llama" or pre == "llama-bpe"
    return Words(
        kind,
        pre,
        texts,
        types,
        special["bos"],
        special["eos"],
        frozenset(i for name in names[1:4] if (i := special[name]) is not None),
        file.bool("tokenizer.ggml.add_bos_token", adds),
        file.bool("tokenizer.ggml.add_space_prefix", kind == "llama"),
        unknown,
        ignore_merges=pre == "llama-bpe",
    )


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


def _merges(file: Gguf) -> Pairs:
    merges = []
    for raw in file.strings("tokenizer.ggml.merges"):
        left, _, right = raw.decode("utf-8", "replace").partition(" ")
        merges.append((left, right))
    return merges


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


def _tokenizers() -> Any:
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


def _byte_level(vocab: dict[str, int], merges: Pairs, words: Words) -> Tokenizer:
    """Byte-level BPE. Bytes that the vocabulary lacks are left out, as llama.cpp does it."""
    hf = _tokenizers()
    library: Tokenizer = hf.Tokenizer(
        hf.models.BPE(vocab, merges, ignore_merges=words.ignore_merges)
    )
    cuts: list[Any] = [
        hf.pre_tokenizers.Split(hf.Regex(pattern), behavior="isolated")
        for pattern in _SPLITS[words.pre]
    ]
    cuts.append(hf.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
    library.pre_tokenizer = hf.pre_tokenizers.Sequence(cuts)
    return library


def _by_scores(
    vocab: dict[str, int], scores: npt.NDArray[np.float64], types: Sequence[int]
) -> Pairs:
    """SentencePiece's BPE joins the pair whose union has the best score; as merges, in the order of
    the scores.
    """
    found: list[tuple[float, int, str, str]] = []
    for text, i in vocab.items():
        if types[i] != NORMAL or not 1 < len(text) <= MAX_SPLIT:
            continue
        for cut in range(1, len(text)):
            left, right = text[:cut], text[cut:]
            if left in vocab and right in vocab:
                found.append((-scores[i], i, left, right))
        if len(found) > MAX_MERGES:
            raise UnsupportedModel(f"The model's tokens join in more than {MAX_MERGES} ways.")
    found.sort(key=lambda f: (f[0], f[1], vocab[f[2]], vocab[f[3]]))
    return [(left, right) for _, _, left, right in found]


def _sentencepiece(vocab: dict[str, int], merges: Pairs, unk: str | None) -> Tokenizer:
    hf = _tokenizers()
    model = hf.models.BPE(vocab, merges, unk_token=unk, fuse_unk=False, byte_fallback=True)
    library: Tokenizer = hf.Tokenizer(model)
    library.normalizer = hf.normalizers.Replace(" ", "▁")
    return library


class TextTokenizer:
    """Text to ids and back."""

    def __init__(self, data: Data) -> None:
        """Raises:
        BadModel: the data is damaged.
        UnsupportedModel: the tokenizers library is not installed.
        """
        hf = _tokenizers()
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
                self._whole = _tokenizers().Tokenizer.from_str(bytes(self._source).decode())
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
