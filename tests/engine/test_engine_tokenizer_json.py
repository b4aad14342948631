# SPDX-License-Identifier: Apache-2.0
"""tokenizer.json: the same ids as the tokenizers library's own, on any text; what is refused."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, trainers

from engine.errors import BadModel, UnsupportedModel
from engine.importers.hf import Folder
from engine.text.tokenizer import TextTokenizer
from engine.text.tokenizer_json import chat_template, import_folder_tokenizer
from tests.engine.family_models import CASES, write_folder

VOCAB = 2000
CORPUS = [
    "The quick brown fox jumps over the lazy dog's back, isn't it? 12345 and 678.",
    "Übergrößenträger, naïve café, Ελληνικά κείμενα, русский текст, 你好世界, こんにちは",
    "def f(x):\n    return x ** 2  # comment\n\n\tprint(f(3))\r\n",
    "🙂👩‍👩‍👧 emoji … “quotes” — dashes – and\u00a0spaces\u3000here",
] * 3
_HEAD = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_TAIL = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def regex(digits: str) -> Any:
    split = pre_tokenizers.Split(Regex(_HEAD + digits + _TAIL), behavior="isolated")
    last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([split, last])


def smollm() -> Any:
    digits = pre_tokenizers.Digits(individual_digits=True)
    return pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])


CUTS = {
    "gpt-2": lambda: pre_tokenizers.ByteLevel(add_prefix_space=False),
    "smollm": smollm,
    "llama-bpe": lambda: regex(r"\p{N}{1,3}"),
    "qwen2": lambda: regex(r"\p{N}"),
}


def bytewise(name: str) -> tokenizers.Tokenizer:
    made = tokenizers.Tokenizer(models.BPE(ignore_merges=name == "llama-bpe"))
    if name == "qwen2":
        made.normalizer = normalizers.NFC()
    made.pre_tokenizer = CUTS[name]()
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=700, initial_alphabet=alphabet, show_progress=False, special_tokens=["<|end|>"]
    )
    made.train_from_iterator(CORPUS, trainer)
    made.add_tokens([AddedToken("<tool>", normalized=False)])
    return made


def sentencepiece() -> tokenizers.Tokenizer:
    made = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    made.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=600, special_tokens=tokens, show_progress=False)
    made.train_from_iterator(CORPUS[:3], trainer)
    data = json.loads(made.to_str())
    data["added_tokens"] = data["added_tokens"][:3]  # bytes are plain tokens in such files
    return tokenizers.Tokenizer.from_str(json.dumps(data))


def write(path: Path, data: dict[str, Any], **config: Any) -> Path:
    write_folder(path, CASES["llama"])
    (path / "tokenizer.json").write_text(json.dumps(data), encoding="utf-8")
    (path / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return path


def imported(path: Path, vocab: int = VOCAB) -> TextTokenizer:
    fd = os.open(path, os.O_RDONLY)
    try:
        with Folder(fd) as folder:
            return TextTokenizer(import_folder_tokenizer(folder, vocab))
    finally:
        os.close(fd)


@pytest.fixture(scope="module", params=[*CUTS, "sentencepiece"])
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[tokenizers.Tokenizer, TextTokenizer]:
    library = sentencepiece() if request.param == "sentencepiece" else bytewise(request.param)
    path = write(tmp_path_factory.mktemp("t") / "m", json.loads(library.to_str()))
    own = imported(path)
    assert own.settings.pre == ("" if request.param == "sentencepiece" else request.param)
    return library, own


@given(text=st.text(max_size=60) | st.sampled_from(CORPUS))
@settings(max_examples=150, deadline=None)
def test_the_same_ids_as_the_library(
    pair: tuple[tokenizers.Tokenizer, TextTokenizer], text: str
) -> None:
    library, own = pair
    if any(token in text for token in ("<|end|>", "<tool>", "<unk>", "<s>", "</s>")):
        return  # control tokens in a user's text are no control tokens here
    text = text.encode("utf-8", "replace").decode()
    assert own.encode(text, bos=False) == library.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("text", CORPUS[:4])
def test_and_back(pair: tuple[tokenizers.Tokenizer, TextTokenizer], text: str) -> None:
    own = pair[1]
    prefix = " " if own.settings.add_space_prefix else ""
    assert own.decode(own.encode(text, bos=False)) == prefix + text


def test_control_tokens_ends_and_bos(tmp_path: Path) -> None:
    data = json.loads(bytewise("qwen2").to_str())
    ids = {token["content"]: token["id"] for token in data["added_tokens"]}
    end, tool = ids["<|end|>"], ids["<tool>"]
    path = write(tmp_path / "m", data, bos_token={"content": "<|end|>"}, eos_token="<|end|>")
    own = imported(path)
    assert set(own.settings.ends) == {end, 2}  # the folder's eos_token_id
    assert own.settings.add_bos is False
    assert own.encode("<|end|>", specials=True) == [end]
    assert end not in own.encode("<|end|>")
    assert own.encode("a<tool>", bos=False)[-1] == tool
    data["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<|end|>", "type_id": 0}}, {"Sequence": {"id": "A"}}],
    }
    path = write(tmp_path / "n", data, bos_token="<|end|>")
    assert imported(path).encode("a")[0] == end


def test_chat_templates(tmp_path: Path) -> None:
    def template(**config: Any) -> str | None:
        path = write(tmp_path / "m", {"model": {}}, **config)
        fd = os.open(path, os.O_RDONLY)
        try:
            with Folder(fd) as folder:
                return chat_template(folder)
        finally:
            os.close(fd)

    assert template() is None
    assert template(chat_template="one") == "one"
    several = [{"name": "tool_use", "template": "x"}, {"name": "default", "template": "two"}]
    assert template(chat_template=several) == "two"
    (tmp_path / "m" / "chat_template.jinja").write_text("three")
    assert template(chat_template="one") == "three"


def spoiled(**change: Any) -> dict[str, Any]:
    data = json.loads(bytewise("gpt-2").to_str())
    return {**data, **change, "model": {**data["model"], **change.get("model", {})}}


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"model": {"type": "Unigram"}}, "of the kind 'Unigram'"),
        ({"pre_tokenizer": {"type": "Sequence", "pretokenizers": [
            {"type": "Split", "pattern": {"Regex": "(a+)+b"}, "behavior": "Isolated"},
            {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False},
        ]}}, r"\(a\+\)\+b"),
        ({"normalizer": {"type": "Lowercase"}}, "Lowercase"),
    ],
)  # fmt: skip
def test_what_is_not_supported_is_named(
    tmp_path: Path, change: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(UnsupportedModel, match=sentence):
        imported(write(tmp_path / "m", spoiled(**change)))


@pytest.mark.parametrize(
    "change",
    [
        {"model": {"vocab": []}},
        {"model": {"vocab": {}}, "added_tokens": []},
        {"model": {"vocab": {"a": -1}}},
        {"model": {"vocab": {"a": 1 << 40}}},
        {"model": {"vocab": {"a" * 600: 0}}},
        {"model": {"merges": None}},
        {"model": {"merges": ["ab"]}},
        {"model": {"merges": [["a", "zz"]]}},
        {"model": {"merges": [["a", 1]]}},
        {"added_tokens": {"a": 1}},
        {"added_tokens": [{"id": 1}]},
        {"added_tokens": [{"id": "1", "content": "x"}]},
    ],
    ids=str,
)
def test_damaged_files(tmp_path: Path, change: dict[str, Any]) -> None:
    with pytest.raises(BadModel, match=r"^The .*\.$"):
        imported(write(tmp_path / "m", spoiled(**change)))
