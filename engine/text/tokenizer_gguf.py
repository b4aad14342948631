# SPDX-License-Identifier: Apache-2.0
"""Tokenizer of a GGUF file: its tokens, their types, and its merges or the scores that stand for
them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from engine.errors import BadModel, UnsupportedModel
from engine.importers.gguf import Gguf
from engine.text import tokenizer_assembly as assembly
from engine.text.tokenizer import Data
from engine.text.tokenizer_assembly import MAX_TOKEN, NORMAL, UNKNOWN, Pairs, Words

MAX_VOCAB = 1 << 21
MAX_SPLIT = 128  # characters of the longest SentencePiece that merges are derived for
MAX_MERGES = 1 << 21

_ALIASES = {
    "phi-2": "gpt-2", "jina-es": "gpt-2", "jina-de": "gpt-2", "mpt": "gpt-2", "olmo": "gpt-2",
    "gigachat": "gpt-2", "starcoder": "smollm", "refact": "smollm", "command-r": "smollm",
    "codeshell": "smollm", "exaone": "smollm", "minerva-7b": "smollm", "llama3": "llama-bpe",
    "llama-v3": "llama-bpe", "falcon3": "llama-bpe", "pixtral": "llama-bpe",
    "deepseek-r1-qwen": "qwen2", "stablelm2": "qwen2", "hunyuan": "qwen2",
}  # fmt: skip


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
        if pre not in assembly.SPLITS:
            raise UnsupportedModel(
                f"The model cuts text by the rules {pre!r}, which are not supported."
            )
    words = _words(file, kind, pre, texts, types)
    if kind == "gpt2":
        merges = _merges(file)
        return assembly.assemble(words, lambda known: assembly.usable(merges, known, set(texts)))
    scores = _scores(file, len(texts))
    return assembly.assemble(words, lambda known: _by_scores(known, scores, types))


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


def _merges(file: Gguf) -> Pairs:
    merges = []
    for raw in file.strings("tokenizer.ggml.merges"):
        left, _, right = raw.decode("utf-8", "replace").partition(" ")
        merges.append((left, right))
    return merges


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
