# SPDX-License-Identifier: Apache-2.0
"""The compiled model file: what was written is read, what is damaged is refused, nothing
half-written stays.
"""

from __future__ import annotations

import os
import resource
import signal
import zlib
from pathlib import Path

import numpy as np
import pytest

from engine import pvrm
from engine.errors import BadModel, PvrError
from engine.pvrm import Blob, Pvrm, array_blob


def blobs() -> list[Blob]:
    rng = np.random.default_rng(0)
    return [
        array_blob("a", rng.integers(0, 255, 5000, np.uint8), "bytes"),
        Blob("b", "f32", (2, 3), 24, lambda: [np.arange(3, dtype="<f4"), b"\1" * 12]),
        array_blob("empty", np.empty(0, np.uint8), "bytes"),
    ]


def test_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "mit Leerzeichen 模型.pvrm"
    seen: list[float] = []
    pvrm.write(path, {"kind": "x", "n": [1, 2]}, blobs(), seen.append)
    model = Pvrm.open(path, verify=True)
    assert model.metadata == {"kind": "x", "n": [1, 2]}
    assert list(model) == ["a", "b", "empty"]
    assert model.entries["b"].shape == (2, 3)
    assert model.entries["b"].offset % pvrm.ALIGN == 0
    np.testing.assert_array_equal(model.blob("b")[:12].view("<f4"), [0, 1, 2])
    assert bytes(model.blob("b")[12:]) == b"\1" * 12
    assert not model.blob("a").flags.writeable
    assert seen == sorted(seen)
    assert seen[-1] <= 1
    with pytest.raises(BadModel, match="lacks c"):
        model.blob("c")


def test_descriptor(tmp_path: Path) -> None:
    fd = os.memfd_create("t")
    pvrm.write_fd(fd, {"kind": "x"}, blobs())
    model = Pvrm.open(fd)
    os.close(fd)  # the mapping does not need it
    assert model.blob("a").nbytes == 5000


def test_every_damaged_byte_of_the_header_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "m.pvrm"
    pvrm.write(path, {"kind": "x"}, blobs())
    good = path.read_bytes()
    end = 16 + int.from_bytes(good[12:16], "little") + 4
    for at in range(0, end, 3):
        damaged = bytearray(good)
        damaged[at] ^= 0x41
        path.write_bytes(damaged)
        with pytest.raises(BadModel):
            Pvrm.open(path)


def test_damaged_and_cut_data(tmp_path: Path) -> None:
    path = tmp_path / "m.pvrm"
    pvrm.write(path, {"kind": "x"}, blobs())
    good = path.read_bytes()
    offset = Pvrm.open(path).entries["a"].offset
    damaged = bytearray(good)
    damaged[offset + 77] ^= 1
    path.write_bytes(damaged)
    model = Pvrm.open(path)
    assert bytes(model.blob("b")[12:]) == b"\1" * 12
    with pytest.raises(BadModel, match="checksum of a"):
        model.blob("a")
    with pytest.raises(BadModel, match="checksum of a"):
        Pvrm.open(path, verify=True)
    for size in (0, 5, 16, 40, offset, offset + 4999):
        path.write_bytes(good[:size])
        with pytest.raises(BadModel):
            Pvrm.open(path)


def test_another_version(tmp_path: Path) -> None:
    path = tmp_path / "m.pvrm"
    pvrm.write(path, {}, [])
    data = bytearray(path.read_bytes())
    data[8] = 9
    path.write_bytes(data)
    with pytest.raises(BadModel, match="version 9"):
        Pvrm.open(path)


def test_large_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file is written in whole large pages but for its ends, whatever its blobs come in, and
    mapped so that it is read from disk in such, too.
    """
    writes: list[tuple[int, int]] = []  # offset, bytes
    real = os.pwrite

    def writing(fd: int, data: memoryview, offset: int) -> int:
        writes.append((offset, len(data)))
        return real(fd, data, offset)

    monkeypatch.setattr(os, "pwrite", writing)
    noise = np.random.default_rng(1).bytes(4 * pvrm.LARGE)
    sizes = [[3_000_001, 5], [7] * 3, [70_000] * 40, [pvrm.LARGE]]
    whole = [Blob(f"{i}", "bytes", (sum(s),), sum(s), lambda s=s: [noise[:n] for n in s])
             for i, s in enumerate(sizes)]  # fmt: skip
    path = tmp_path / "m.pvrm"
    pvrm.write(path, {}, whole)
    *data, last, _, _ = writes  # the header and the magic come at the end
    assert all((at + n) % pvrm.LARGE == 0 for at, n in data)
    assert sum(last) == path.stat().st_size
    model = Pvrm.open(path, verify=True)
    for blob in whole:
        assert bytes(model.blob(blob.name)) == b"".join(blob.chunks())
    mapped = Path("/proc/self/smaps").read_text().split(str(path), 1)[1]
    flags = next(line for line in mapped.splitlines() if line.startswith("VmFlags:"))
    has = Path("/sys/kernel/mm/transparent_hugepage").exists()
    assert ("hg" in flags.split()) == has


def test_full_disk_leaves_what_was_there(tmp_path: Path) -> None:
    """A limit on the size of files stands for the full disk: space is refused just so."""
    path = tmp_path / "m.pvrm"
    pvrm.write(path, {"kind": "old"}, [])
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (6000, before[1]))
    try:
        with pytest.raises(PvrError, match="cannot be written"):
            pvrm.write(path, {"kind": "new"}, blobs())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert Pvrm.open(path).metadata == {"kind": "old"}
    assert os.listdir(tmp_path) == ["m.pvrm"]


def test_no_folder(tmp_path: Path) -> None:
    with pytest.raises(PvrError, match="cannot be written"):
        pvrm.write(tmp_path / "none" / "m.pvrm", {}, [])


def test_wrong_sizes_are_a_fault_of_the_caller(tmp_path: Path) -> None:
    for chunks in ([b"12"], [b"1234", b"5"]):
        blob = Blob("x", "bytes", (4,), 4, lambda chunks=chunks: chunks)
        with pytest.raises(ValueError, match="blob x"):
            pvrm.write(tmp_path / "m.pvrm", {}, [blob])
    with pytest.raises(ValueError, match="share a name"):
        pvrm.write(tmp_path / "m.pvrm", {}, [blobs()[0], blobs()[0]])
    assert os.listdir(tmp_path) == []


def _count_sums(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes of each checksum from now on."""
    seen: list[int] = []
    real = zlib.crc32

    def counting(data: memoryview, *rest: int) -> int:
        seen.append(len(data))
        return real(data, *rest)

    monkeypatch.setattr(zlib, "crc32", counting)
    return seen


def test_own_files_are_summed_up_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "m.pvrm"
    pvrm.write(path, {"kind": "x"}, blobs())
    try:
        os.setxattr(path, "user.test", b"")
    except OSError:  # without attributes all is summed up each time
        monkeypatch.setattr(os, "setxattr", lambda file, name, value: kept.update({name: value}))
        monkeypatch.setattr(os, "getxattr", lambda file, name: kept.get(name, b""))
    kept: dict[str, bytes] = {}
    sums = _count_sums(monkeypatch)
    first = Pvrm.open(path, own=True)
    first.blob("a")
    Pvrm.open(path, own=True).blob("a")  # nothing is kept before all was looked at
    assert len(sums) == 4
    assert not first.whole
    first.note_whole()
    assert len(sums) == 4 + 2
    sums.clear()
    assert Pvrm.open(path, own=True).whole
    sums.clear()
    assert bytes(Pvrm.open(path, verify=True, own=True).blob("b")[12:]) == b"\1" * 12
    assert len(sums) == 1  # the header
    Pvrm.open(path, verify=True)  # a stranger's
    assert len(sums) == 2 + 3


@pytest.mark.parametrize("how", ["written", "replaced", "restarted"])
def test_what_was_whole_may_be_damaged_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    path = tmp_path / "m.pvrm"
    pvrm.write(path, {"kind": "x"}, blobs())
    model = Pvrm.open(path, own=True)
    model.note_whole()
    data = bytearray(path.read_bytes())
    at, data[model.entries["a"].offset] = os.stat(path), data[model.entries["a"].offset] ^ 1
    if how == "replaced":
        path.unlink()
    path.write_bytes(data)
    os.utime(path, ns=(at.st_atime_ns, at.st_mtime_ns + (how == "written")))
    if how == "restarted":
        monkeypatch.setattr(pvrm, "_boot", lambda: "another")
    with pytest.raises(BadModel, match="checksum of a"):
        Pvrm.open(path, verify=True, own=True)
