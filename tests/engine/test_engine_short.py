# SPDX-License-Identifier: Apache-2.0
"""Short texts without the whole vocabulary: the ids that the whole library gives."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from engine import pvrm
from engine.backends.cpu import CpuBackend
from engine.errors import BadModel
from engine.text import short, tokenizer
from engine.text.model import TextModel

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)
CUTS = tokenizers.Regex(r"\p{N}{1,3}| ?\p{L}+|\s+")


def trained(kind: str) -> tokenizers.Tokenizer:
    """A tokenizer of either kind, learnt from this file."""
    words = Path(__file__).read_text(encoding="utf-8").split("\n")
    if kind == "bytes":
        made = tokenizers.Tokenizer(tokenizers.models.BPE())
        made.normalizer = tokenizers.normalizers.NFC()
        steps = [
            tokenizers.pre_tokenizers.Split(CUTS, behavior="isolated"),
            tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
        made.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(steps)
        alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
        trainer = tokenizers.trainers.BpeTrainer(
            vocab_size=900, initial_alphabet=alphabet, show_progress=False
        )
        made.train_from_iterator(words, trainer)
        return made
    names = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *"▁abcdeé\n"]
    merges = [("▁", "a"), ("b", "c"), ("a", "bc"), ("▁a", "bc"), ("c", "d"), ("d", "e")]
    names += [a + b for a, b in merges if a + b not in names]
    vocab = {name: i for i, name in enumerate(names)}
    unknown = {"unk_token": "<unk>", "fuse_unk": False, "byte_fallback": kind == "pieces"}
    made = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, merges, **unknown))
    made.normalizer = tokenizers.normalizers.Replace(" ", "▁")
    return made


@pytest.fixture(scope="module", params=["bytes", "pieces", "pieces without bytes"])
def both(request: pytest.FixtureRequest) -> tuple[tokenizers.Tokenizer, short.Short]:
    whole = trained(request.param)
    found = short.tables(whole.to_str().encode())
    assert found is not None
    return whole, short.Short(tokenizers, found)


@settings(max_examples=150, deadline=None)
@given(text=TEXTS | st.text("abcde é\n", max_size=60) | st.sampled_from(["def __init__(self)", ""]))
def test_the_ids_of_the_library(both: tuple[tokenizers.Tokenizer, short.Short], text: str) -> None:
    whole, quick = both
    assert quick.encode(text) == whole.encode(text, add_special_tokens=False).ids


def test_long_texts_are_left_to_the_library(
    both: tuple[tokenizers.Tokenizer, short.Short],
) -> None:
    _, quick = both
    assert quick.encode("a" * short.MOST_TEXT) is not None
    assert quick.encode("a" * (short.MOST_TEXT + 1)) is None


@pytest.mark.parametrize(
    "change",
    [
        {"dropout": 0.1},
        {"continuing_subword_prefix": "##"},
        {"end_of_word_suffix": "</w>"},
        {"type": "WordPiece"},
    ],
)
def test_what_is_not_known_has_no_tables(change: dict[str, Any]) -> None:
    whole = json.loads(trained("bytes").to_str())
    whole["model"] |= change
    assert short.tables(json.dumps(whole).encode()) is None


def test_a_model_of_the_cache_reads_the_library_when_it_has_to(
    tiny_q8: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend, cache = CpuBackend(1), str(tmp_path / "m.pvrm")
    first = TextModel.load(str(tiny_q8), cache, backend)
    texts = ["a b", "", "\n\nb c d", "x" * 1000]
    ids = [first.tokenizer.encode(text) for text in texts]
    first.close()
    if not pvrm.Pvrm.open(cache, own=True).whole:  # no attributes in this file system
        monkeypatch.setattr(pvrm, "_note", pvrm._mark)
    second = TextModel.load(str(tiny_q8), cache, backend)
    assert [second.tokenizer.encode(text) for text in texts[:3]] == ids[:3]
    assert second.tokenizer._whole is None
    assert second.tokenizer.encode(texts[3]) == ids[3]
    assert second.tokenizer._whole is not None
    second.close()
    monkeypatch.setattr(tokenizer, "SHORTS", 2)
    third = TextModel.load(str(tiny_q8), cache, backend)
    third.tokenizer._source = b"{"
    assert third.tokenizer.encode(texts[0]) == ids[0]
    assert third.tokenizer.encode(texts[2]) == ids[2]
    with pytest.raises(BadModel, match="tokenizer is damaged"):
        third.tokenizer.encode("c")
    third.close()
