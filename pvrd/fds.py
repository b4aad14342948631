# SPDX-License-Identifier: Apache-2.0
"""memfds, seals, pipes, and files that a caller passes: those are read with pread, never mapped."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import os
import stat
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from pvrd import beside
from pvrd.errors import InvalidArgument, OutOfMemory, QuotaExceeded

F_ADD_SEALS = 1033
F_GET_SEALS = 1034
SEAL_SEAL, SEAL_SHRINK, SEAL_GROW, SEAL_WRITE = 1, 2, 4, 8
_CHUNK = 1 << 20

_T = TypeVar("_T")


def memfd(name: str, size: int = 0, seals: int = 0) -> int:
    """An anonymous file of `size` bytes, sealed.

    Raises:
        OutOfMemory: the system does not give it.
    """
    try:
        fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except OSError as e:
        raise OutOfMemory(f"there is no room for a file in memory: {e.strerror}") from None
    try:
        os.ftruncate(fd, size)
        if seals:
            fcntl.fcntl(fd, F_ADD_SEALS, seals)
    except OSError as e:
        os.close(fd)
        raise OutOfMemory(f"there is no room for {size} bytes: {e.strerror}") from None
    return fd


def seal(fd: int, seals: int) -> bool:
    """Adds seals; False when the file is still mapped for writing or sealed against it."""
    try:
        fcntl.fcntl(fd, F_ADD_SEALS, seals)
    except OSError:
        return False
    return True


def read_only(fd: int) -> int:
    """Another descriptor of the same file, for reading alone and with an offset of its own."""
    return os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)


def source_size(fd: int, what: str, limit: int) -> int:
    """Size of a file that a caller passed, after checking that it is one that may be read.

    Raises:
        InvalidArgument: no regular file, not readable, empty, or a memfd that can still shrink.
        QuotaExceeded: longer than `limit`.
    """
    try:
        flags = fcntl.fcntl(fd, fcntl.F_GETFL)
        status = os.fstat(fd)
    except OSError as e:
        raise InvalidArgument(f"{what}: the file descriptor is bad: {e.strerror}") from None
    if not stat.S_ISREG(status.st_mode):
        raise InvalidArgument(f"{what}: the file descriptor is no regular file and no memfd")
    if flags & os.O_PATH or flags & os.O_ACCMODE == os.O_WRONLY:
        raise InvalidArgument(f"{what}: the file is not open for reading")
    try:
        seals = fcntl.fcntl(fd, F_GET_SEALS)
    except OSError:
        seals = -1  # an ordinary file
    # A file on tmpfs answers too, with SEAL alone, but has a name.
    if seals >= 0 and not seals & SEAL_SHRINK and not (seals == SEAL_SEAL and status.st_nlink):
        raise InvalidArgument(f"{what}: the memfd is not sealed against shrinking")
    if not status.st_size:
        raise InvalidArgument(f"{what}: the file is empty")
    if status.st_size > limit:
        raise QuotaExceeded(f"{what}: {status.st_size} bytes are more than the {limit} allowed")
    return status.st_size


async def looked_at(fd: int, what: str, limit: int, uid: int) -> tuple[int, bytes]:
    """source_size and the first four bytes, beside the loop, for the file may lie where nothing
    answers any more. What hangs holds up the same user's next files alone.

    Raises:
        Timeout: it does not answer. Else as source_size.
    """

    def look() -> tuple[int, bytes]:
        size = source_size(fd, what, limit)
        try:
            return size, os.pread(fd, 4, 0)
        except OSError as e:
            raise InvalidArgument(f"{what} cannot be read: {e.strerror}") from None

    return await beside.ask(f"files of {uid}", what, look)


def copy(
    source: int, target: int, size: int, seen: Callable[[bytes], None], stop: threading.Event
) -> None:
    """Copies the first `size` bytes with pread and pwrite; `seen` gets each piece. For a thread.

    Raises:
        InvalidArgument: the source is shorter or cannot be read.
        QuotaExceeded: no room where the target lies.
    """
    done = 0
    while done < size and not stop.is_set():
        try:
            piece = os.pread(source, min(_CHUNK, size - done), done)
        except OSError as e:
            raise InvalidArgument(f"the file cannot be read: {e.strerror}") from None
        if not piece:
            raise InvalidArgument(f"the file ended at {done} of {size} bytes")
        view = memoryview(piece)
        while view:
            try:
                written = os.pwrite(target, view, done)
            except OSError as e:
                if e.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.ENOMEM):
                    raise QuotaExceeded(
                        f"there is no room for {size} bytes: {e.strerror} after {done}"
                    ) from None
                raise
            done += written
            view = view[written:]
        seen(piece)


async def in_thread(function: Callable[[], _T]) -> _T:
    """Runs something that may block in a thread of its own.

    Not in asyncio's pool: a caller's file on a file system that hangs would use it up for all.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[_T] = loop.create_future()

    def settle(value: Any, error: BaseException | None) -> None:
        if future.done():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(value)

    def run() -> None:
        value: Any = None
        error: BaseException | None = None
        try:
            value = function()
        except BaseException as e:
            error = e
        with contextlib.suppress(RuntimeError):  # the loop may have ended meanwhile
            loop.call_soon_threadsafe(settle, value, error)

    threading.Thread(target=run, daemon=True).start()
    return await future
