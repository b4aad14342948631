# SPDX-License-Identifier: Apache-2.0
"""Ids of a short text without the whole vocabulary in the tokenizers library.

The library makes hash maps of all tokens and merges, which takes longer than the first token of a
small model does (0.1 s for 128,000 tokens). Byte-pair merging joins neighbours alone, so what it
looks up are parts of the text. For a short one a tokenizer of those few is made, from tables that
lie in the compiled model: hashes of all tokens' names in order, and merges as pairs of ids.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from tokenizers import Tokenizer

MOST_TEXT = 400  # characters
MOST_PARTS = 6000
_NOT = ("dropout", "continuing_subword_prefix", "end_of_word_suffix")
_FRAME = ("unk_token", "fuse_unk", "byte_fallback", "ignore_merges")

Tables = dict[str, npt.NDArray[Any]]
FORMATS = {"frame": "json", "hashes": "u64", "ids": "u32", "merges": "u32"}  # of the tables
_TYPES = {"json": "u1", "u64": "<u8", "u32": "<u4"}


def read(blobs: Callable[[str], npt.NDArray[np.uint8]]) -> Tables:
    """The tables of a compiled model; `blobs` gives the bytes of each."""
    found = {key: blobs(key).view(_TYPES[form]) for key, form in FORMATS.items()}
    return {**found, "merges": found["merges"].reshape(-1, 2)}


def _hash(name: str) -> int:
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")


def _hashes(names: Iterable[str]) -> npt.NDArray[np.uint64]:
    return np.fromiter(map(_hash, names), np.uint64)


def tables(library: bytes) -> Tables | None:
    """What Short needs of a tokenizer.json; None where it would not do the same.

    `frame`: the file without tokens and merges, JSON; `hashes` u64, in order, `ids` u32 beside
    them; `merges` u32 [n, 2], the first to be applied first.
    """
    whole = json.loads(library)
    model = whole["model"]
    if whole["added_tokens"] or model["type"] != "BPE":
        return None
    if any(
        model.get(key) for key in ("dropout", "continuing_subword_prefix", "end_of_word_suffix")
    ):
        return None
    vocab: dict[str, int] = model["vocab"]
    merges = [pair.split(" ") if isinstance(pair, str) else pair for pair in model["merges"]]
    hashes = _hashes(vocab)
    order = np.argsort(hashes)
    if (np.diff(hashes[order]) == 0).any():
        return None
    frame = {**whole, "model": {**model, "vocab": {}, "merges": [], "unk_token": None}}
    kept = {key: model.get(key) for key in _FRAME}
    longest = max(map(len, vocab), default=0)
    words = json.dumps({"library": frame, "model": kept, "longest": longest}).encode()
    return {
        "frame": np.frombuffer(words, np.uint8),
        "hashes": hashes[order],
        "ids": np.fromiter(vocab.values(), np.uint32)[order],
        "merges": np.array([[vocab[a], vocab[b]] for a, b in merges], np.uint32).reshape(-1, 2),
    }


class Short:
    """Ids of short texts."""

    def __init__(self, hf: Any, found: Tables) -> None:
        """`hf` is the tokenizers library.

        Raises:
            Exception: the library's, for a frame that it does not know; ValueError.
        """
        frame = json.loads(bytes(found["frame"]))
        self._hf = hf
        self._library: Tokenizer = hf.Tokenizer.from_str(json.dumps(frame["library"]))
        self._model = {key: frame["model"][key] for key in _FRAME}
        self._longest = int(frame["longest"])
        self._hashes, self._ids, self._merges = found["hashes"], found["ids"], found["merges"]
        if len(self._hashes) != len(self._ids) or not len(self._ids):
            raise ValueError("tables of different lengths")
        self._always: set[str] = set()
        if self._model["unk_token"] is not None:
            self._always.add(self._model["unk_token"])
        if self._model["byte_fallback"]:
            self._always.update(f"<0x{byte:02X}>" for byte in range(256))

    def encode(self, text: str) -> list[int] | None:
        """Ids of a text; None where it has too many parts."""
        if len(text) > MOST_TEXT:
            return None
        whole, before = self._library, text
        if whole.normalizer is not None:
            before = whole.normalizer.normalize_str(before)
        words = [before]
        if whole.pre_tokenizer is not None:
            words = [word for word, _ in whole.pre_tokenizer.pre_tokenize_str(before)]
        parts = set(self._always)
        for word in set(words):
            for begin in range(len(word)):
                end = min(len(word), begin + self._longest)
                parts.update(word[begin:to] for to in range(begin + 1, end + 1))
            if len(parts) > MOST_PARTS:
                return None
        whole.model = self._made(list(parts))
        return list(whole.encode(text, add_special_tokens=False).ids)

    def _made(self, names: list[str]) -> Any:
        """The model of those of the names that are tokens."""
        wanted = _hashes(names)
        at = np.minimum(np.searchsorted(self._hashes, wanted), len(self._hashes) - 1)
        there = self._hashes[at] == wanted
        ids = self._ids[at]
        vocab = {name: int(i) for name, i, ok in zip(names, ids, there, strict=True) if ok}
        named = {i: name for name, i in vocab.items()}
        known = ids[there]
        both = np.isin(self._merges, known).all(axis=1)
        pairs = [(named[int(a)], named[int(b)]) for a, b in self._merges[both]]
        merges = [(a, b) for a, b in pairs if a + b in vocab]
        return self._hf.models.BPE(vocab, merges, **self._model)
