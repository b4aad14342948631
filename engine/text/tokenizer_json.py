# SPDX-License-Identifier: Apache-2.0
"""Tokenizer and chat template of a Hugging Face folder: tokenizer.json, tokenizer_config.json and
chat_template.jinja.

Only what is understood is taken: BPE on bytes, cut by rules that are known, and SentencePiece's BPE
with single bytes for what it lacks. The library's own handling of control tokens is not used (see
`engine.text.tokenizer`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from engine.errors import BadModel, UnsupportedModel
from engine.importers.hf import Folder
from engine.text import tokenizer_assembly as assembly
from engine.text.tokenizer import Data
from engine.text.tokenizer_assembly import (
    BYTE,
    CONTROL,
    MAX_TOKEN,
    NORMAL,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    Pairs,
    Words,
)

_TAIL = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_HEAD = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
# Cuts before merging, as the files spell them -> the name that GGUF has for the same.
_SPLITS = {
    ("bytes",): "gpt-2",
    ("digits", "bytes"): "smollm",
    (_HEAD + r"\p{N}{1,3}" + _TAIL,): "llama-bpe",
    (_HEAD + r"\p{N}" + _TAIL,): "qwen2",
}


def import_folder_tokenizer(folder: Folder, vocab: int) -> Data:
    """Reads a folder's tokenizer. `vocab` is the number of rows of the embedding table.

    Raises:
        BadModel: damaged or missing.
        UnsupportedModel: a kind of tokenizer or of pre-tokenizer that is not known.
    """
    data = folder.json("tokenizer.json")
    model = data.get("model")
    if not isinstance(model, dict):
        raise BadModel("The model's tokenizer.json is damaged.")
    kind = model.get("type", "BPE")
    if kind != "BPE":
        raise UnsupportedModel(
            f"The model has a tokenizer of the kind {str(kind)[:32]!r}, which is not supported."
        )
    bytewise = any(s.get("type") == "ByteLevel" for s in _steps(data.get("pre_tokenizer")))
    texts, types = _tokens(data, model, vocab, bytewise)
    words = _settings(folder, data, model, texts, types)
    if bytewise:
        words = replace(
            words,
            kind="gpt2",
            pre=_pre(data),
            add_space_prefix=False,
            normalizer=_normalizer(data),
            ignore_merges=model.get("ignore_merges") is True,
        )
    merges = _merges(model)
    known = set(texts)
    return assembly.assemble(words, lambda names: assembly.usable(merges, names, known))


def chat_template(folder: Folder) -> str | None:
    """The folder's chat template, if it has one.

    Raises:
        BadModel
    """
    if folder.has("chat_template.jinja"):
        try:
            return folder.read_file("chat_template.jinja", 1 << 20).decode()
        except UnicodeDecodeError:
            raise BadModel("The model's chat_template.jinja is no text.") from None
    found = _config(folder).get("chat_template")
    if isinstance(found, list):  # several by name
        named = {t.get("name"): t.get("template") for t in found if isinstance(t, dict)}
        found = named.get("default")
    return found if isinstance(found, str) else None


def _config(folder: Folder) -> dict[str, Any]:
    has = folder.has("tokenizer_config.json")
    return folder.json("tokenizer_config.json") if has else {}


def _steps(part: Any) -> Iterator[Mapping[str, Any]]:
    """The steps of a normalizer, pre-tokenizer or post-processor, one after the other."""
    pending = [part]
    while pending:
        step = pending.pop(0)
        if not isinstance(step, dict):
            continue
        for key in ("pretokenizers", "normalizers", "processors"):
            inner = step.get(key)
            if isinstance(inner, list):
                pending[:0] = inner[:64]
                break
        else:
            yield step


def _tokens(
    data: Mapping[str, Any], model: Mapping[str, Any], vocab: int, bytewise: bool
) -> tuple[list[str], list[int]]:
    """Texts and types by id."""
    own, added = model.get("vocab"), data.get("added_tokens") or []
    if not isinstance(own, dict) or not isinstance(added, list):
        raise BadModel("The model's tokenizer.json is damaged.")
    ids: dict[int, tuple[str, int]] = {}
    for text, i in own.items():
        kind = NORMAL
        if not bytewise and len(text) == 6 and text.startswith("<0x") and text.endswith(">"):
            kind = BYTE
        ids[_id(i, vocab)] = (text, UNKNOWN if text == model.get("unk_token") else kind)
    for entry in added:
        if not isinstance(entry, dict) or not isinstance(entry.get("content"), str):
            raise BadModel("The model's tokenizer.json is damaged.")
        i = _id(entry.get("id"), vocab)
        if ids.get(i, ("", NORMAL))[1] != UNKNOWN:
            ids[i] = (entry["content"], CONTROL if entry.get("special") else USER_DEFINED)
    if not ids:
        raise BadModel("The model's tokenizer.json has no tokens.")
    if any(len(text.encode("utf-8", "replace")) > MAX_TOKEN for text, _ in ids.values()):
        raise BadModel(f"The model has a token of more than {MAX_TOKEN} bytes.")
    tokens = [ids.get(i, (f"[PAD{i}]", UNUSED)) for i in range(max(ids) + 1)]
    return [text for text, _ in tokens], [kind for _, kind in tokens]


def _id(value: Any, vocab: int) -> int:
    if type(value) is not int or not 0 <= value < vocab:
        raise BadModel(f"The model's tokenizer.json has a token beyond the {vocab} embeddings.")
    return value


def _merges(model: Mapping[str, Any]) -> Pairs:
    """Merges, written as "left right" or as a pair."""
    found: Pairs = []
    merges = model.get("merges")
    for merge in merges if isinstance(merges, list) else [None]:
        pair = merge.split(" ", 1) if isinstance(merge, str) else merge
        if (
            not isinstance(pair, list)
            or len(pair) != 2
            or not all(isinstance(part, str) for part in pair)
        ):
            raise BadModel("The model's tokenizer.json has an impossible merge.")
        found.append((pair[0], pair[1]))
    return found


def _pre(data: Mapping[str, Any]) -> str:
    """The name of the rules that text is cut by."""
    cuts: list[str] = []
    for step in _steps(data.get("pre_tokenizer")):
        kind, pattern = step.get("type"), step.get("pattern")
        if kind == "Split" and isinstance(pattern, dict) and step.get("behavior") == "Isolated":
            cuts.append(str(pattern.get("Regex")))
        elif kind == "Digits" and step.get("individual_digits") is True:
            cuts.append("digits")
        elif kind == "ByteLevel" and not step.get("add_prefix_space"):
            cuts += ["bytes"] if step.get("use_regex", True) else []
        else:
            cuts.append(str(kind))
    found = _SPLITS.get(tuple(cuts))
    if found is None:
        raise UnsupportedModel(
            f"The model cuts text by the rules {', '.join(cuts)[:200]!r}, which are not supported."
        )
    return found


def _normalizer(data: Mapping[str, Any]) -> str:
    kinds = [str(step.get("type")) for step in _steps(data.get("normalizer"))]
    if kinds not in ([], ["NFC"]):
        raise UnsupportedModel(
            f"The model normalises text by {', '.join(kinds)[:100]}, which is not supported."
        )
    return "".join(kinds)


def _settings(
    folder: Folder,
    data: Mapping[str, Any],
    model: Mapping[str, Any],
    texts: list[str],
    types: list[int],
) -> Words:
    """A SentencePiece tokenizer's Words; one on bytes changes the kind."""
    config = _config(folder)
    ids = {text: i for i, text in reversed(list(enumerate(texts)))}

    def special(name: str) -> int | None:
        value = config.get(name)
        value = value.get("content") if isinstance(value, dict) else value
        return ids.get(value) if isinstance(value, str) else None

    ends = {i for name in ("eos_token",) if (i := special(name)) is not None}
    files = [folder.config]
    if folder.has("generation_config.json"):
        files.append(folder.json("generation_config.json"))
    for file in files:
        value = file.get("eos_token_id")
        for i in value if isinstance(value, list) else [value]:
            if type(i) is int and 0 <= i < len(texts):
                ends.add(i)
    bos = special("bos_token")
    prefix = any(
        s.get("type") == "Prepend"
        or (s.get("type") == "Metaspace" and s.get("prepend_scheme", "always") != "never")
        for part in ("normalizer", "pre_tokenizer")
        for s in _steps(data.get(part))
    )
    unknown = model.get("unk_token")
    return Words(
        "llama",
        "",
        texts,
        types,
        bos,
        special("eos_token"),
        frozenset(ends),
        _adds_bos(config, data, texts, bos),
        prefix,
        ids.get(unknown) if isinstance(unknown, str) else None,
    )


def _adds_bos(
    config: Mapping[str, Any], data: Mapping[str, Any], texts: list[str], bos: int | None
) -> bool:
    """Whether each text begins with bos: the configuration says so, or the template of the
    post-processor.
    """
    said = config.get("add_bos_token")
    if isinstance(said, bool):
        return said
    for step in _steps(data.get("post_processor")):
        single = step.get("single")
        if step.get("type") == "TemplateProcessing" and isinstance(single, list) and single:
            first = single[0].get("SpecialToken") if isinstance(single[0], dict) else None
            if isinstance(first, dict) and bos is not None:
                return first.get("id") == texts[bos]
    return False
