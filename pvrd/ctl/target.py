# SPDX-License-Identifier: Apache-2.0
"""Where enlarged data goes: standard output, a device, or a regular file that appears only when it
is complete."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator, Sequence
from itertools import count
from typing import Self

from pvrd.ctl import errors, output
from pvrd.y4m import write_all

_NUMBERS = count()


class Target:
    """The output of a command. A regular file is written beside its name and renamed by finish();
    a device or a pipe is written to as it is. `source`: the input, which OUT must not be.

    Raises:
        CtlError: OUT is IN, or cannot be written.
    """

    def __init__(self, name: str, source: int | None = None) -> None:
        self.name = name
        self._fd = 1
        self._part = ""
        self._opened = False
        if name == "-":
            return
        with self._sentences():
            self._open(source)

    def _open(self, source: int | None) -> None:
        try:
            status: os.stat_result | None = os.stat(self.name)
        except FileNotFoundError:
            status = None
        if status and source is not None and os.path.samestat(status, os.fstat(source)):
            raise errors.CtlError("OUT is IN; name another file.", errors.USAGE, "InvalidArgument")
        if status and stat.S_ISDIR(status.st_mode):
            raise errors.CtlError(
                f"{output.plain(self.name)} is a directory.", errors.USAGE, "InvalidArgument"
            )
        if status and not stat.S_ISREG(status.st_mode):
            self._fd = os.open(self.name, os.O_WRONLY | os.O_CLOEXEC)
            self._opened = True
            return
        # A link stays a link: the file that it names is replaced. The name may be as long as names
        # can be.
        place = os.path.realpath(self.name)
        part = os.path.join(os.path.dirname(place), f".pvrctl-{os.getpid()}-{next(_NUMBERS)}.part")
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        self._fd = os.open(part, flags, stat.S_IMODE(status.st_mode) if status else 0o666)
        self._part, self._opened = part, True

    @contextlib.contextmanager
    def _sentences(self) -> Iterator[None]:
        try:
            yield
        except BrokenPipeError:
            raise
        except OSError as error:
            shown = "Standard output" if self.name == "-" else output.plain(self.name)
            what = (
                "the disk is full"
                if error.errno in (errno.ENOSPC, errno.EDQUOT)
                else os.strerror(error.errno or 0)
            )
            raise errors.CtlError(f"{shown} cannot be written: {what}.", errors.FAILED) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._opened:
            self._opened = False
            os.close(self._fd)
        if self._part:
            with contextlib.suppress(OSError):
                os.unlink(self._part)

    def write(self, pieces: Sequence[memoryview]) -> None:
        """Writes all of it.

        Raises:
            CtlError: the disk is full, or such.
            BrokenPipeError: nobody reads.
        """
        with self._sentences():
            write_all(self._fd, pieces)

    def finish(self) -> None:
        """What was written is complete: the file gets its name."""
        with self._sentences():
            if self._part:
                os.rename(self._part, os.path.realpath(self.name))
                self._part = ""
