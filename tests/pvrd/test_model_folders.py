# SPDX-License-Identifier: Apache-2.0
"""Folders of models on file systems that do not answer."""

from __future__ import annotations

import asyncio
import errno
import os
import select
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pvrd import model_folders
from pvrd.bus_values import plain
from pvrd.config import KEYS, Config, Paths
from pvrd.errors import OutOfMemory
from pvrd.model_folders import SILENT, Folders
from pvrd.models import ModelStore
from tests.buses import ROOT
from tests.pvrd.conftest import LONG, TEXT

GGUF = b"GGUF and no more"
# In the daemon's place of a file system whose server is gone: what lists DEAD waits for WAKE, a
# pipe that nobody writes to.
DEAD = """
import os

def silent(real):
    def call(path=".", *more):
        if not isinstance(path, int) and os.fspath(path) == os.environ["DEAD"]:
            open(os.environ["WAKE"], "rb").close()
        return real(path, *more)
    return call

os.scandir, os.listdir = silent(os.scandir), silent(os.listdir)
"""


class Dead:
    """A folder whose listing waits for `wake`."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.wake = threading.Event()
        self.asked = 0
        real = os.scandir

        def scandir(path: Any) -> Any:
            if path == str(folder):
                self.asked += 1
                assert self.wake.wait(LONG)
            return real(path)

        monkeypatch.setattr(os, "scandir", scandir)
        monkeypatch.setattr(model_folders, "ANSWER_S", 0.05)


@pytest.fixture
def places(tmp_path: Path) -> list[str]:
    for name in ("dead", "sound"):
        (tmp_path / name).mkdir()
        (tmp_path / name / f"{name}.gguf").write_bytes(GGUF)
    return [str(tmp_path / "dead"), str(tmp_path / "sound")]


@pytest.fixture
def dead(places: list[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Dead]:
    made = Dead(Path(places[0]), monkeypatch)
    yield made
    made.wake.set()


def test_others_are_read_while_one_does_not_answer(dead: Dead, places: list[str]) -> None:
    folders = Folders()
    for _ in range(3):
        seen = folders.read(places)
        assert [s.why for s in seen.values()] == [SILENT, ""]
        assert [[m.name for m in s.models] for s in seen.values()] == [[], ["sound"]]
    assert dead.asked == 1, "no more threads than one wait for it"
    look = folders._looks[places[0]]
    dead.wake.set()
    assert look.over.wait(LONG)
    model_folders.ANSWER_S = LONG
    assert [m.name for m in folders.read(places)[places[0]].models] == ["dead"]
    (Path(places[0]) / "new.gguf").write_bytes(GGUF)
    assert [m.name for m in folders.read(places)[places[0]].models] == ["dead", "new"]


def test_who_does_not_wait_any_more_is_not_kept(dead: Dead, places: list[str]) -> None:
    """The second one comes when the first has waited: it hears at once."""
    folders = Folders()
    folders.read(places)
    model_folders.ANSWER_S = 0.0  # nothing would be heard of a new look
    assert folders.read(places[:1])[places[0]].why == SILENT
    assert dead.asked == 1


def test_what_cannot_be_read_says_why(tmp_path: Path) -> None:
    names = [str(tmp_path), str(tmp_path / "none"), __file__, "a\0b", ""]
    assert [seen.why for seen in Folders().read(names).values()] == [
        "", "No such file or directory", "Not a directory", "it is no path",
        "No such file or directory",
    ]  # fmt: skip


def test_a_shortage_is_no_empty_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def listing(path: Any) -> Any:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(os, "scandir", listing)
    monkeypatch.setattr(os, "listdir", listing)
    with pytest.raises(OutOfMemory):
        Folders().read([str(tmp_path)])


@pytest.mark.bus
def test_a_daemon_goes_on_beside_a_folder_that_does_not_answer(
    start: Any, callers: Any, until: Any, tmp_path: Path
) -> None:
    code, folder, wake = tmp_path / "code", tmp_path / "models", tmp_path / "wake"
    code.mkdir()
    folder.mkdir()
    (code / "sitecustomize.py").write_text(DEAD)
    (folder / "far.gguf").write_bytes(GGUF)
    os.mkfifo(wake)
    daemon = start(
        {"models.paths": [str(folder)]},
        PYTHONPATH=os.pathsep.join([str(code), str(ROOT)]),
        DEAD=str(folder), WAKE=str(wake),
    )  # fmt: skip
    caller = callers()
    caller.state("gpu")

    def names() -> list[str]:
        return [model["name"] for model in plain(caller.call("ListModels").body[0])]

    def told() -> list[str]:
        facts = plain(caller.call("GetDiagnostics").body[0])
        return [f["message"] for f in facts if f["code"] == "no_folder"]

    assert "far" not in names()
    assert told() == [f"models.paths names {folder}: it does not answer"]
    assert caller.open_text(model="fake-text")
    assert caller.fails("OpenText", "a{sv}", [caller.options(model="far")])[0] == "UnknownModel"

    writer = os.open(wake, os.O_RDWR)  # who opens the pipe waits no more
    try:
        until(lambda: "far" in names(), "the folder's models")
        assert told() == []
        assert daemon.stop() == 0
    finally:
        os.close(writer)


@pytest.mark.bus
def test_a_file_that_does_not_open_stops_its_own_job_alone(
    start: Any, caller: Any, lines: Any, until: Any, kill: Any, tmp_path: Path
) -> None:
    """The file of an open session becomes one whose open() waits, and then a worker needs it."""
    models = tmp_path / "data" / "pvrd" / "models"
    models.mkdir(parents=True)
    (models / "far.gguf").write_bytes(GGUF)
    daemon = start(folder=tmp_path)
    caller.state("gpu")
    session = caller.open_text(model="far")
    until(lambda: caller.get("Ready", session, TEXT), "the model")
    (models / "far.gguf").unlink()
    os.mkfifo(models / "far.gguf")
    before = daemon.fds()
    pid = caller.get("Devices")[0]["pid"]
    kill(pid)
    until(lambda: caller.get("Devices")[0]["pid"] not in (0, pid), "the successor")
    caller.state("gpu")
    stream = lines(caller.generate(session, "x", max_tokens=2))
    # All others are served meanwhile, by that worker too.
    assert "far" not in [m["name"] for m in plain(caller.call("ListModels").body[0])]
    other = caller.open_text(model="fake-text")
    assert lines(caller.generate(other, "x", max_tokens=2)).rest()[-1]["type"] == "end"
    assert not select.select([stream.fd], [], [], 0)[0], "and it still waits"
    last = stream.rest()[-1]
    assert (last["type"], last["error"]) == ("error", "Timeout")
    assert last["message"] == "the file of model far does not answer within 5 s"
    # What comes too late is given back.
    with open(models / "far.gguf", "wb"):
        caller.call("Close", path=other, interface=TEXT)
        until(lambda: daemon.fds() <= before, "no descriptor left")


@pytest.mark.bus
@pytest.mark.parametrize("lies", ["state", "data"])
def test_a_store_that_does_not_answer_is_one_folder_of_many(
    start: Any, callers: Any, tmp_path: Path, lies: str
) -> None:
    """pvrd's own folder, and the system's, as those that the configuration names."""
    code, wake = tmp_path / "code", tmp_path / "wake"
    code.mkdir()
    (code / "sitecustomize.py").write_text(DEAD)
    os.mkfifo(wake)
    folder = tmp_path / lies / "pvrd" / "models"
    folder.mkdir(parents=True)
    other = tmp_path / "other"
    other.mkdir()
    (other / "near.gguf").write_bytes(GGUF)
    daemon = start(
        {"models.paths": [str(other)]}, folder=tmp_path,
        PYTHONPATH=os.pathsep.join([str(code), str(ROOT)]), DEAD=str(folder), WAKE=str(wake),
    )  # fmt: skip
    caller = callers()
    caller.state("gpu")
    assert caller.open_text(model="near")
    assert caller.fails("OpenText", "a{sv}", [caller.options(model="nea")])[0] == "UnknownModel"
    facts = plain(caller.call("GetDiagnostics").body[0])
    told = [f["message"] for f in facts if f["code"] == "no_folder"]
    assert told == [f"models lie in {folder}: it does not answer"]
    writer = os.open(wake, os.O_RDWR)
    try:
        assert daemon.stop() == 0
    finally:
        os.close(writer)


def test_what_was_compiled_from_a_silent_folder_is_kept(
    dead: Dead, places: list[str], tmp_path: Path
) -> None:
    values: dict[str, Any] = {key: rule.default for key, rule in KEYS.items()}
    values["models.paths"] = tuple(places)
    paths = Paths(tmp_path / "etc", tmp_path / "state", tmp_path / "cache")
    store = ModelStore(paths, Config(values))
    paths.cache.mkdir()
    compiled = paths.cache / f"{'0' * 32}.pvrm"
    compiled.touch()
    os.utime(compiled, (0, 0))
    store.sweep()
    assert compiled.exists()


def test_the_loop_runs_while_files_do_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ask; one thread looks, and who waits for too long is told so."""
    from pvrd import diagnostics

    wake, asked = threading.Event(), []

    def look(core: Any) -> list[Any]:
        asked.append(core)
        assert wake.wait(LONG)
        return ["seen"]

    class Core:
        looking = None

    async def both() -> None:
        core: Any = Core()
        monkeypatch.setattr(diagnostics, "LOOK_S", 0.05)
        for fact in await asyncio.gather(*(diagnostics._looked(core) for _ in range(2))):
            assert "do not answer within 0.05 s" in plain(fact[0]["message"])
        wake.set()
        monkeypatch.setattr(diagnostics, "LOOK_S", LONG)
        assert await diagnostics._looked(core) == ["seen"]
        assert len(asked) == 1

    monkeypatch.setattr(diagnostics, "_look", look)
    asyncio.run(both())
