# SPDX-License-Identifier: Apache-2.0
"""What changes the model store: adding, replacing, removing, sweeping, a full disk."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pvrd.bus_values import V, plain
from pvrd.config import KEYS, Config
from pvrd.errors import (
    BadModel,
    InvalidArgument,
    QuotaExceeded,
    UnknownModel,
    UnsupportedModel,
)  # fmt: skip
from pvrd.models import ModelStore
from tests.pvrd.stores import put, store

__all__ = ["store"]

NO_OPTIONS = {"licence": "", "origin": "", "replace": False}


def add(store: ModelStore, data: bytes, name: str = "new", fails: Exception | None = None,
        meanwhile: Callable[[], Any] = int, **options: Any) -> dict[str, Any]:  # fmt: skip
    async def inspect(fd: int) -> dict[str, Any]:
        assert os.pread(fd, 1 << 24, 0) == data
        meanwhile()
        if fails:
            raise fails
        return {"kind": "text", "arch": "llama"}

    async def main() -> dict[str, Any]:
        fd = os.memfd_create("model", os.MFD_ALLOW_SEALING)
        try:
            os.write(fd, data)
            fcntl.fcntl(fd, 1033, 2)
            steps: list[int] = []
            found = await store.add(fd, name, {**NO_OPTIONS, **options}, inspect,
                                    lambda done, total: steps.append(done))  # fmt: skip
            assert steps[-1] == len(data)
            return found
        finally:
            os.close(fd)

    return asyncio.run(main())


def left(store: ModelStore) -> list[str]:
    return sorted(p.name for p in store.paths.models.iterdir())


def test_add_and_remove(store: ModelStore) -> None:
    data = b"GGUF" + bytes(3000000)
    got = add(store, data, licence="MIT")
    assert (got["name"], got["size"], got["arch"]) == ("new", len(data), "llama")
    model = store.find("new", "text")
    assert model.removable
    assert model.path.read_bytes() == data
    assert model.details["sha256"] == got["sha256"]
    assert model.key == got["sha256"][:32]
    with pytest.raises(InvalidArgument, match="already"):
        add(store, data)
    add(store, b"GGUF2", replace=True)
    assert store.find("new", "text").size == 5
    assert left(store) == ["new"]
    store.remove("new")
    assert left(store) == []
    with pytest.raises(UnknownModel):
        store.remove("new")


def test_another_pvrd_that_starts_leaves_what_is_being_added(store: ModelStore) -> None:
    dead = store.paths.models / ".new-dead"
    found: list[list[str]] = []

    def another() -> None:
        dead.mkdir()
        ModelStore(store.paths, store.config).recover()
        found.append(left(store))

    add(store, b"GGUF1", meanwhile=another)
    ((alive,),) = found
    assert alive.startswith(".new-")
    assert alive != dead.name
    assert left(store) == ["new"]
    assert store.find("new", "text").size == 5


def test_a_model_that_was_being_replaced_is_not_lost(
    store: ModelStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    add(store, b"GGUF1")
    folder = store.paths.models
    # Killed between taking the old one away and giving the new one its name.
    (folder / "new").rename(folder / ".new-old")
    (folder / ".new-half").mkdir()
    (folder / ".new-half" / "model.toml").write_text('name = "half"\n')
    again = ModelStore(store.paths, store.config)
    again.recover()
    assert again.find("new", "text").path.read_bytes() == b"GGUF1"
    assert left(again) == ["new"]
    rename = Path.rename

    def refuses(self: Path, target: Path) -> Path:
        if target.name == "new" and (self / "model.gguf").stat().st_size == 6:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", refuses)
    with pytest.raises(QuotaExceeded, match="cannot be written"):
        add(again, b"GGUF22", replace=True)
    assert again.find("new", "text").path.read_bytes() == b"GGUF1"
    assert left(again) == ["new"]

    def refuses_all(self: Path, target: Path) -> Path:
        if target.name == "new":
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", refuses_all)
    with pytest.raises(QuotaExceeded, match="cannot be written"):
        add(again, b"GGUF22", replace=True)
    monkeypatch.undo()
    again = ModelStore(store.paths, store.config)
    again.recover()
    assert again.find("new", "text").path.read_bytes() == b"GGUF1"
    assert left(again) == ["new"]


def test_a_removed_model_takes_what_was_compiled_from_it(store: ModelStore) -> None:
    cache = store.paths.cache
    cache.mkdir(parents=True)
    digest = add(store, b"GGUF1", "one")["sha256"]
    add(store, b"GGUF1", "twin")
    compiled = cache / f"{digest[:32]}.pvrm"
    compiled.write_bytes(b"x")
    store.remove("one")
    assert compiled.exists()
    store.remove("twin")
    assert not compiled.exists()


def test_the_cache_is_swept(store: ModelStore) -> None:
    cache = store.paths.cache
    store.sweep()  # there is no folder yet
    cache.mkdir(parents=True)
    (cache / "devices").mkdir()
    put(store.paths.models, "alpha.gguf")
    key = store.find("alpha", "text").key
    ages = {f"{key}.pvrm": 9, "gone.pvrm": 9, ".pvrm-broken": 9, "young.pvrm": 0, ".pvrm-now": 0}
    for name, days in ages.items():
        (cache / name).write_bytes(b"x")
        when = time.time() - days * 86400
        os.utime(cache / name, (when, when))
    store.sweep()
    kept = {"devices", f"{key}.pvrm", "young.pvrm", ".pvrm-now"}
    assert {path.name for path in cache.iterdir()} == kept


def test_add_what_is_no_model(store: ModelStore) -> None:
    with pytest.raises(BadModel):
        add(store, b"junk", fails=BadModel("no model"))
    with pytest.raises(InvalidArgument):
        add(store, b"GGUF", name="../evil")
    assert left(store) == []


def test_full_disk(store: ModelStore, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int, data: Any, offset: int) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        with pytest.raises(QuotaExceeded, match="No space left"):
            add(store, b"GGUF" * 100)
    assert left(store) == []
    real = os.statvfs(store.paths.models)
    small = os.statvfs_result((*real[:4], 1000, *real[5:]))
    with monkeypatch.context() as patch:
        patch.setattr(os, "statvfs", lambda path: small)
        with pytest.raises(QuotaExceeded, match="bytes free"):
            add(store, b"GGUF" * 100)
    values = {key: rule.default for key, rule in KEYS.items()}
    store.config = Config({**values, "limits.model_bytes": 10})
    with pytest.raises(QuotaExceeded, match="model_bytes is 10"):
        add(store, b"GGUF" * 100)
    assert left(store) == []


def test_what_another_version_added_is_named(store: ModelStore) -> None:
    add(store, b"GGUF1", "later")
    folder = store.paths.models / "later"
    assert [oct(p.stat().st_mode & 0o077) for p in folder.glob("*.gguf")] == ["0o0"]
    told = folder / "model.toml"
    told.write_text(told.read_text().replace("format = 1", "format = 2"))
    assert "later" not in store.all()
    with pytest.raises(UnsupportedModel, match=r"another version of pvrd \(format 2, not 1\)"):
        store.find("later", "text")
    add(store, b"GGUF2", "later")
    assert store.find("later", "text").kind == "text"
    # What the first version wrote says nothing of a format.
    told.write_text(told.read_text().replace("format = 1\n", ""))
    assert store.find("later", "text").kind == "text"


def test_leftovers_are_cleared(store: ModelStore) -> None:
    put(store.paths.models, ".new-dead/model.gguf")
    ModelStore(store.paths, store.config).recover()
    assert left(store) == []


@pytest.mark.bus
def test_models_over_the_bus(start: Any, callers: Any, lines: Any, tmp_path: Path) -> None:
    daemon = start()
    caller = callers()
    caller.state("gpu")
    path = tmp_path / "Ein Modell.gguf"
    path.write_bytes(b"GGUF" + bytes(100000))
    with path.open("rb") as file:
        reply = caller.call(
            "AddModel", "hsa{sv}", [0, "mine", caller.options(licence="CC0")], [file.fileno()]
        )
        info = plain(reply.body[0])
        assert (info["name"], info["kind"], info["size"]) == ("mine", "text", 100004)
        reply = caller.call(
            "AddModel", "hsa{sv}", [0, "second", caller.options(stream=True)], [file.fileno()]
        )
        got = lines(reply.fds.take(reply.body[0]["progress"].value)).rest()
        assert (got[-1]["type"], got[-1]["sha256"]) == ("end", info["sha256"])
        name, _ = caller.fails("AddModel", "hsa{sv}", [0, "mine", {}], [file.fileno()])
        assert name == "InvalidArgument"
    listed = {m["name"]: m for m in plain(caller.call("ListModels").body[0])}
    assert listed["mine"]["removable"]
    assert listed["mine"]["licence"] == "CC0"
    assert listed["fake-text"]["default"]
    session = caller.open_text(model="mine")
    assert len(lines(caller.generate(session, "x", max_tokens=2)).rest()) == 4
    junk = tmp_path / "junk"
    junk.write_bytes(b"junk" * 100)
    with junk.open("rb") as file:
        got = caller.fails("AddModel", "hsa{sv}", [0, "junk", {}], [file.fileno()])
        assert got[0] == "BadModel"
    caller.call("RemoveModel", "s", ["mine"])
    caller.call("RemoveModel", "s", ["second"])
    assert list((daemon.folder / "state" / "pvrd" / "models").iterdir()) == []
    assert caller.fails("OpenText", "a{sv}", [{"model": V("s", "mine")}])[0] == "UnknownModel"
