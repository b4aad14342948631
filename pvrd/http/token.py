# SPDX-License-Identifier: Apache-2.0
"""The token that every request has to bring: other users of the machine reach the port, too."""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
import tempfile
from pathlib import Path

from pvrd.errors import StartError


def path() -> Path:
    """$XDG_CONFIG_HOME/pvrd/http-token."""
    home = os.environ.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config")
    return Path(home) / "pvrd" / "http-token"


def read(file: Path, renew: bool = False) -> str:
    """The token in a file of mode 0600; made where there is none, or with `renew` anew.

    Raises:
        StartError: the file cannot be made, is another's, or others may read it.
    """
    try:
        if renew or not file.exists():
            _make(file, replace=renew)
        fd = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        with os.fdopen(fd) as opened:
            state = os.fstat(opened.fileno())
            if not stat.S_ISREG(state.st_mode) or state.st_uid != os.getuid():
                raise StartError(f"{file} is not a file of yours")
            if state.st_mode & 0o077:
                raise StartError(f"others may read {file}; give it a new token with --new-token")
            token = opened.read(4096).strip()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no text"
        raise StartError(f"the token in {file} cannot be had: {why}") from error
    if len(token) < 16 or not token.isascii() or not token.isprintable():
        raise StartError(f"{file} holds no token; remove it, or give --new-token")
    return token


def _make(file: Path, replace: bool) -> None:
    """Puts a token there in one step, so that two that start at once agree."""
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    fd, name = tempfile.mkstemp(dir=file.parent, prefix=".http-token-")  # mode 0600
    try:
        with os.fdopen(fd, "w") as opened:
            opened.write(f"pvr-{secrets.token_urlsafe(32)}\n")
        if replace:
            os.replace(name, file)
        else:
            with contextlib.suppress(FileExistsError):
                os.link(name, file)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name)
