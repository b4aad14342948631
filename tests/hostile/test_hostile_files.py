# SPDX-License-Identifier: Apache-2.0
"""File descriptors of every wrong kind, and names that want to be paths."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import select
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pvrd import config, fds
from pvrd.bus import BusError
from pvrd.bus_values import V
from pvrd.config import Paths
from pvrd.errors import InvalidArgument
from pvrd.models import ModelStore, check_name
from tests.buses import ROOT
from tests.pvrd.conftest import LONG, MANAGER, NAME, PATH

F_ADD_SEALS = 1033


def memfd(size: int, seals: int | None) -> int:
    fd = os.memfd_create("x", os.MFD_ALLOW_SEALING if seals is not None else 0)
    os.ftruncate(fd, size)
    if seals:
        fcntl.fcntl(fd, F_ADD_SEALS, seals)
    return fd


@contextlib.contextmanager
def wrong(folder: Path) -> Iterator[dict[str, int]]:
    """All kinds by name."""
    with contextlib.ExitStack() as stack:
        ends = os.pipe()
        left, right = socket.socketpair()
        listener = stack.enter_context(socket.socket(socket.AF_UNIX))
        stack.enter_context(left)
        stack.enter_context(right)
        gone = Path("/dev/shm") / f"pvrd-test-{os.getpid()}"
        gone.write_bytes(b"x" * 100)
        no_name = os.open(gone, os.O_RDONLY)
        gone.unlink()
        big = folder / "big"
        with big.open("wb") as file:
            file.truncate(1 << 43)
        empty = folder / "empty"
        empty.touch()
        os.mkfifo(folder / "fifo")
        kinds = {
            "a pipe": ends[0], "a pipe's other end": ends[1],
            "a socket": os.dup(left.fileno()), "a listener": os.dup(listener.fileno()),
            "a folder": os.open(folder, os.O_RDONLY), "zeros": os.open("/dev/zero", os.O_RDWR),
            "random": os.open("/dev/urandom", os.O_RDONLY), "null": os.open("/dev/null", os.O_RDWR),
            "a path": os.open(big, os.O_PATH), "a large file": os.open(big, os.O_RDONLY),
            "a fifo": os.open(folder / "fifo", os.O_RDONLY | os.O_NONBLOCK),
            "empty": os.open(empty, os.O_RDONLY), "write-only": os.open(big, os.O_WRONLY),
            "an epoll": os.dup(stack.enter_context(select.epoll()).fileno()),
            "an eventfd": os.eventfd(1), "a process": os.pidfd_open(os.getpid()),
            "proc": os.open("/proc/self/maps", os.O_RDONLY),
            "a memfd that cannot be sealed": memfd(100, None), "not sealed": memfd(100, 0),
            "sealed otherwise": memfd(100, fds.SEAL_GROW | fds.SEAL_WRITE),
            "sparse": memfd(1 << 43, fds.SEAL_SHRINK), "nothing": memfd(0, fds.SEAL_SHRINK),
            "tmpfs without a name": no_name,
        }  # fmt: skip
        for fd in kinds.values():
            stack.callback(os.close, fd)
        yield kinds


@pytest.mark.bus
def test_files_of_the_wrong_kind(start: Any, callers: Any, tmp_path: Path, until: Any) -> None:
    daemon = start({"limits.bytes": 1 << 20, "limits.model_bytes": 1 << 20})
    caller = callers()
    caller.state("gpu")
    before = daemon.fds()
    with wrong(tmp_path) as kinds:
        for kind, fd in kinds.items():
            for member, signature, body in (
                ("Upscale", "ha{sv}", [0, {}]), ("AddModel", "hsa{sv}", [0, "x", {}]),
                ("Upscale", "ha{sv}", [0, {"stream": V("b", True)}]),
            ):  # fmt: skip
                name, text = caller.fails(member, signature, body, [fd])
                assert name in ("InvalidArgument", "QuotaExceeded"), (kind, member, name, text)
    assert list((daemon.folder / "state" / "pvrd" / "models").glob("*")) == []
    assert list((daemon.folder / "state" / "pvrd" / "models").glob(".*")) == []
    until(lambda: daemon.fds() <= before)


def test_a_file_that_becomes_shorter_while_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(bytes(5 << 20))
    with path.open("r+b") as file, (tmp_path / "y").open("w+b") as target:
        size = fds.source_size(file.fileno(), "the file", 1 << 30)
        with pytest.raises(InvalidArgument, match="ended at 1048576 of 5242880 bytes"):
            fds.copy(file.fileno(), target.fileno(), size,
                     lambda _: os.truncate(path, 1 << 20), threading.Event())  # fmt: skip


def test_a_file_that_grows_while_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(bytes(2 << 20))
    with path.open("r+b") as file, (tmp_path / "y").open("w+b") as target:
        size = fds.source_size(file.fileno(), "the file", 1 << 30)
        fds.copy(file.fileno(), target.fileno(), size,
                 lambda _: os.truncate(path, 9 << 20), threading.Event())  # fmt: skip
        assert os.fstat(target.fileno()).st_size == 2 << 20


# In the daemon's place of a file on a server that is gone: what looks at DEAD waits for WAKE, a
# pipe that nobody writes to.
DEAD = """
import os

real = os.fstat

def fstat(fd):
    status = real(fd)
    if str(status.st_ino) == os.environ["DEAD"]:
        open(os.environ["WAKE"], "rb").close()
    return status

os.fstat = fstat
"""


@pytest.mark.bus
@pytest.mark.parametrize(
    ("member", "signature", "more"),
    [("Upscale", "ha{sv}", []), ("AddModel", "hsa{sv}", ["far"])],
)
def test_a_file_that_does_not_answer_holds_up_its_own_call_alone(
    start: Any, callers: Any, until: Any, tmp_path: Path, member: str, signature: str,
    more: list[str],
) -> None:  # fmt: skip
    code, wake, far = tmp_path / "code", tmp_path / "wake", tmp_path / "far"
    code.mkdir()
    (code / "sitecustomize.py").write_text(DEAD)
    os.mkfifo(wake)
    far.write_bytes(b"GGUF")
    daemon = start(
        PYTHONPATH=os.pathsep.join([str(code), str(ROOT)]), DEAD=str(far.stat().st_ino),
        WAKE=str(wake),
    )  # fmt: skip
    asks, others = callers(), callers()
    others.state("gpu")
    before = daemon.fds()
    with far.open("rb") as file:
        call = asks.connection.call(NAME, PATH, MANAGER, member, signature, [0, *more, {}],
                                    [file.fileno()], LONG)  # fmt: skip
        waiting = asks.loop.create_task(call)
        asks.run(asyncio.sleep(0))
        assert others.call("ListModels")
        assert not waiting.done()
        with pytest.raises(BusError, match="does not answer within 5 s") as caught:
            asks.run(waiting)
    assert caught.value.name == f"{NAME}.Error.Timeout"
    writer = os.open(wake, os.O_RDWR)
    until(lambda: daemon.fds() <= before, "no descriptor left")
    os.close(writer)


NAMES = [
    "", ".", "..", "../x", "../../etc/passwd", "/etc/passwd", "a/../b", "a\\b", ".hidden", "-rf",
    "a b", "a\nb", "a\0b", "A", "ä", "x/model.gguf", "%2e%2e", "a" * 65, "a\u202eb",
    "~root", "$(id)", "`id`", "con:", "a*",
]  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_names_that_want_to_be_paths(name: str) -> None:
    with pytest.raises(InvalidArgument):
        check_name(name)
    assert len(NAMES) == len(set(NAMES))


def test_folders_and_links_in_the_store(tmp_path: Path) -> None:
    """What lies among the models leads nowhere else, and nothing is waited for."""
    secret = tmp_path / "secret"
    secret.mkdir()
    (secret / "model.gguf").write_bytes(b"GGUF")
    state = tmp_path / "state"
    models = state / "models"
    for name, file in {"up": "../secret/model.gguf", "abs": str(secret / "model.gguf"),
                       "dots": "..", "none": "", "self": "."}.items():  # fmt: skip
        (models / name).mkdir(parents=True)
        (models / name / "model.toml").write_text(f'file = "{file}"\nkind = "text"\n')
    os.mkfifo(models / "pipe.gguf")
    (models / "loop.gguf").symlink_to(models / "loop.gguf")
    (models / "dir.gguf").mkdir()
    (models / "zero.gguf").symlink_to("/dev/zero")
    (models / "toml").mkdir()
    os.mkfifo(models / "toml" / "not-a-model.toml")
    paths = Paths(tmp_path / "etc", state, tmp_path / "cache")
    store = ModelStore(paths, config.load(paths))
    assert [m.name for m in store.all().values() if m.source in ("state", "file")] == []
    for name in ("up", "abs", "dots"):
        with pytest.raises(Exception, match="no model"):
            store.remove(name)
    assert (secret / "model.gguf").exists()
