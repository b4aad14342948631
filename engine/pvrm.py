# SPDX-License-Identifier: Apache-2.0
"""The compiled model: a header and checksummed, page-aligned blobs, mapped and used as they lie.

File: `PVRM1\\0\\0\\0`, u32 version, u32 bytes of the header, the header (JSON, UTF-8), u32 CRC-32
of the header, then the blobs, each at a multiple of ALIGN from the data area, which begins at the
first multiple of ALIGN after that. The header is the caller's metadata plus `tensors`: a list of
{name, format, shape, offset (from the data area), nbytes, crc32}. Little-endian throughout. Text
and video models share this form.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import json
import mmap
import os
import stat
import struct
import tempfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from engine.errors import BadModel, PvrError

Bytes = npt.NDArray[np.uint8]
Progress = Callable[[float], None]
_T = TypeVar("_T")

MAGIC = b"PVRM1\0\0\0"
VERSION = 1
ALIGN = 4096
MAX_HEADER = 16 << 20
LARGE = 2 << 20  # bytes of a large page, where CPUs have pages of 4 KiB
_PREFIX = struct.Struct("<8sII")


@dataclass(frozen=True)
class Blob:
    """A blob to be written. `chunks()` yields its bytes in order, `nbytes` in sum (buffers of any
    kind).
    """

    name: str
    format: str
    shape: tuple[int, ...]
    nbytes: int
    chunks: Callable[[], Iterable[Any]]


@dataclass(frozen=True)
class Entry:
    """A blob in a file; `offset` counts from the start of the file."""

    name: str
    format: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int
    crc32: int


def array_blob(
    name: str, data: npt.NDArray[Any], fmt: str = "f32", shape: Sequence[int] | None = None
) -> Blob:
    """A Blob of an array that is in memory already. `shape` None: the array's own."""
    flat = np.ascontiguousarray(data).reshape(-1).view(np.uint8)
    return Blob(
        name, fmt, tuple(data.shape if shape is None else shape), flat.nbytes, lambda: [flat]
    )


def is_compiled(fd: int) -> bool:
    """Whether a descriptor's file says that it is a compiled model; a folder never is."""
    regular = stat.S_ISREG(os.fstat(fd).st_mode)
    return regular and os.pread(fd, len(MAGIC), 0) == MAGIC


def _align(n: int) -> int:
    return -(-n // ALIGN) * ALIGN


def _data_start(header: int) -> int:
    return _align(_PREFIX.size + header + 4)


def _header(metadata: Mapping[str, Any], blobs: Sequence[Blob], crcs: Sequence[int]) -> bytes:
    tensors = []
    offset = 0
    for blob, crc in zip(blobs, crcs, strict=True):
        tensors.append(
            {
                "name": blob.name,
                "format": blob.format,
                "shape": list(blob.shape),
                "offset": offset,
                "nbytes": blob.nbytes,
                # As eight hex digits, so that the header's length is known before the data is.
                "crc32": f"{crc:08x}",
            }
        )
        offset += _align(blob.nbytes)
    text = json.dumps({**metadata, "tensors": tensors}, separators=(",", ":")).encode()
    if len(text) > MAX_HEADER:
        raise BadModel("The model's description is too large to be compiled.")
    return text


def _write_all(fd: int, data: Any, offset: int) -> None:
    view = memoryview(data).cast("B")
    while view:
        done = os.pwrite(fd, view, offset)
        view, offset = view[done:], offset + done


class _Pages:
    """Writes what comes in order in whole large pages, each at a multiple of its size: so Linux
    keeps them in its cache (ext4 from 6.16, XFS, …), and maps them as such. A core reads up to a
    third more bytes a second from them than from many small ones.
    """

    def __init__(self, fd: int, offset: int) -> None:
        self._fd, self._at = fd, offset
        self._held, self._from = memoryview(bytearray(LARGE)), offset

    def put(self, data: memoryview) -> None:
        while data:
            inside = self._at % LARGE
            part = data[: LARGE - inside]
            data = data[len(part) :]
            if len(part) == LARGE:
                _write_all(self._fd, part, self._at)
                self._from += LARGE
            else:
                self._held[inside : inside + len(part)] = part
            self._at += len(part)
            if not self._at % LARGE:
                self.flush()

    def flush(self) -> None:
        begin = self._from % LARGE
        _write_all(self._fd, self._held[begin : begin + self._at - self._from], self._from)
        self._from = self._at


def write_fd(
    fd: int, metadata: Mapping[str, Any], blobs: Sequence[Blob], progress: Progress | None = None
) -> None:
    """Writes a compiled model into an empty file. `progress` gets 0..1 now and then.

    Raises:
        OSError: as the file system says it.
        ValueError: a blob's chunks do not add up to its nbytes, or two blobs share a name.
    """
    if len({b.name for b in blobs}) != len(blobs):
        raise ValueError("two blobs share a name")
    crcs = [0] * len(blobs)
    header = _header(metadata, blobs, crcs)
    start = _data_start(len(header))
    total = start + sum(_align(b.nbytes) for b in blobs)
    # A disk that is too small says so now and not in the middle.
    os.posix_fallocate(fd, 0, total)
    offset = start
    pages = _Pages(fd, start)
    for i, blob in enumerate(blobs):
        at = offset
        for chunk in blob.chunks():
            view = memoryview(chunk).cast("B")
            if at + len(view) > offset + blob.nbytes:
                raise ValueError(f"blob {blob.name} has more than {blob.nbytes} bytes")
            crcs[i] = zlib.crc32(view, crcs[i])
            pages.put(view)
            at += len(view)
            if progress:
                progress((at - start) / max(1, total - start))
        if at != offset + blob.nbytes:
            raise ValueError(f"blob {blob.name} has {at - offset} bytes, not {blob.nbytes}")
        offset += _align(blob.nbytes)
        pages.put(memoryview(bytes(offset - at)))
    pages.flush()
    header = _header(metadata, blobs, crcs)
    _write_all(fd, header + struct.pack("<I", zlib.crc32(header)), _PREFIX.size)
    # The magic comes last: a file that was not finished is no model.
    _write_all(fd, _PREFIX.pack(MAGIC, VERSION, len(header)), 0)


def _umask() -> int:
    """The process's, without the moment of another that os.umask would make."""
    with open("/proc/self/status", encoding="ascii", errors="replace") as file:
        for line in file:
            if line.startswith("Umask:"):
                return int(line.split()[1], 8)
    return 0o077


def write(
    path: str | os.PathLike[str],
    metadata: Mapping[str, Any],
    blobs: Sequence[Blob],
    progress: Progress | None = None,
) -> None:
    """Writes a compiled model to a path: there is the whole file, or what was there before.

    Raises:
        PvrError: the file cannot be written (disk full, no permission); nothing is left behind.
        ValueError: as write_fd.
    """
    path = os.fspath(path)
    if os.path.exists(path) and not os.path.isfile(path):  # a device would be replaced
        raise PvrError(f"The compiled model cannot be written to {path}: it is no regular file.")
    try:
        fd, temp = tempfile.mkstemp(prefix=".pvrm-", dir=os.path.dirname(path) or ".")
    except OSError as e:
        raise PvrError(f"The compiled model cannot be written to {path}: {e.strerror}.") from None
    try:
        write_fd(fd, metadata, blobs, progress)
        os.fchmod(fd, 0o666 & ~_umask())
        os.replace(temp, path)
    except BaseException as e:
        os.unlink(temp)
        if isinstance(e, OSError) and e.errno not in (None, errno.EINTR):
            raise PvrError(
                f"The compiled model cannot be written to {path}: {e.strerror}."
            ) from None
        raise
    finally:
        os.close(fd)


class Pvrm:
    """A compiled model, mapped. Views of its blobs stay valid as long as someone holds them."""

    def __init__(self, metadata: dict[str, Any], entries: dict[str, Entry], data: Bytes) -> None:
        self.metadata = metadata
        self.entries = entries
        self._data = data
        self._checked: set[str] = set()
        self._read: dict[Any, Any] = {}
        self._own: tuple[str, bytes] | None = None  # path and mark of what may be noted
        self.whole = False  # `own`, and noted before

    @classmethod
    def open(
        cls, source: str | os.PathLike[str] | int, verify: bool = False, own: bool = False
    ) -> Pvrm:
        """Opens a path, or a file descriptor (which stays the caller's). `verify` checks every blob
        at once. `own`: a path that nobody else writes to; blobs that were found whole before
        (`note_whole`) are not summed up again until the file is written to or the machine starts.

        Raises:
            BadModel: no compiled model, another version, damaged or cut short.
            OSError: the path cannot be opened.
        """
        fd = source if isinstance(source, int) else os.open(source, os.O_RDONLY | os.O_CLOEXEC)
        try:
            size = os.fstat(fd).st_size
            prefix = os.pread(fd, _PREFIX.size, 0)
            if len(prefix) < _PREFIX.size:
                raise BadModel("The file is too short for a compiled model.")
            magic, version, length = _PREFIX.unpack(prefix)
            if magic != MAGIC:
                raise BadModel("The file is no compiled model.")
            if version != VERSION:
                raise BadModel(f"The compiled model has version {version}, not {VERSION}.")
            text = os.pread(fd, min(length, MAX_HEADER) + 4, _PREFIX.size)
            crc = text[length:]
            if len(crc) != 4 or zlib.crc32(text[:length]) != int.from_bytes(crc, "little"):
                raise BadModel("The compiled model's header is damaged.")
            metadata, entries = _parse(text[:length], size)
            mark = _mark(fd) if own else b""
            whole = own and _note(fd) == mark
            mapped = mmap.mmap(fd, size, prot=mmap.PROT_READ)
            with contextlib.suppress(OSError):  # what is read from disk comes in large pages, too
                mapped.madvise(mmap.MADV_HUGEPAGE)
        finally:
            if not isinstance(source, int):
                os.close(fd)
        model = cls(metadata, entries, np.frombuffer(mapped, np.uint8))
        if whole:
            model.whole = True
            model._checked.update(entries)
        elif own and not isinstance(source, int):
            model._own = os.fspath(source), mark
        if verify:
            for name in entries:
                model.blob(name)
        return model

    def blob(self, name: str) -> Bytes:
        """The bytes of a blob, read-only, no copy; its checksum is compared the first time.

        Raises:
            BadModel: there is none of that name, or it is damaged.
        """
        entry = self.entries.get(name)
        if entry is None:
            raise BadModel(f"The compiled model lacks {name}.")
        view = self._data[entry.offset : entry.offset + entry.nbytes]
        if name not in self._checked:
            if zlib.crc32(view.data) != entry.crc32:
                raise BadModel(f"The compiled model is damaged: the checksum of {name} is wrong.")
            self._checked.add(name)
        return view

    def note_whole(self) -> None:
        """Sums up what was not yet, and keeps at the file that all of it is whole, where that can
        be kept: the next start is 0.2 s sooner for each 700 MB.

        Raises:
            BadModel: a blob is damaged.
        """
        if self._own is None:
            return
        for name in self.entries:
            self.blob(name)
        path, mark = self._own
        # Another file may stand there by now; its mark is another.
        with contextlib.suppress(OSError):  # a file system without attributes, or read-only
            os.setxattr(path, _NOTE, mark)
        self._own = None

    def once(self, reader: Callable[[Pvrm], _T]) -> _T:
        """What `reader` makes of the file; it is asked once, all get the same. What it raises."""
        if reader not in self._read:
            self._read[reader] = reader(self)
        found: _T = self._read[reader]
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries)


_NOTE = "user.pvrd.whole"


@functools.cache
def _boot() -> str:
    """This start of the machine."""
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


def _mark(fd: int) -> bytes:
    """What is another when the file was written to, is another file, or the machine was restarted
    (a disk may have lost what only memory had).
    """
    at = os.fstat(fd)
    return f"{_boot()} {at.st_dev} {at.st_ino} {at.st_size} {at.st_mtime_ns}".encode()


def _note(fd: int) -> bytes:
    try:
        return os.getxattr(fd, _NOTE)
    except OSError:
        return b""


def _parse(text: bytes, size: int) -> tuple[dict[str, Any], dict[str, Entry]]:
    """Metadata and entries of a header, with offsets from the start of the file.

    Raises:
        BadModel
    """
    start = _data_start(len(text))
    entries: dict[str, Entry] = {}
    try:
        metadata = json.loads(text)
        for t in metadata.pop("tensors"):
            entry = Entry(
                str(t["name"]),
                str(t["format"]),
                tuple(int(n) for n in t["shape"]),
                start + int(t["offset"]),
                int(t["nbytes"]),
                int(t["crc32"], 16),
            )
            if entry.nbytes < 0 or entry.offset < start or entry.offset % ALIGN:
                raise BadModel(f"The compiled model's entry {entry.name!r} is damaged.")
            if entry.offset + entry.nbytes > size:
                raise BadModel("The compiled model is cut short.")
            if entry.name in entries:
                raise BadModel(f"The compiled model has two blobs named {entry.name!r}.")
            entries[entry.name] = entry
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        raise BadModel("The compiled model's header is damaged.") from None
    return metadata, entries
