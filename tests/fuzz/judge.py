# SPDX-License-Identifier: Apache-2.0
"""What a target may do with bytes: accept them, or refuse them with an error that users read."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator


@contextlib.contextmanager
def file_of(data: bytes) -> Iterator[int]:
    fd = os.memfd_create("fuzz")
    try:
        os.write(fd, data)
        yield fd
    finally:
        os.close(fd)


@contextlib.contextmanager
def refused() -> Iterator[None]:
    """The errors that users read."""
    from engine.errors import PvrError
    from pvrd.errors import PvrdError

    try:
        yield
    except (PvrError, PvrdError) as e:
        if strict or not str(e):  # an error without a sentence is a finding
            raise RuntimeError("refused") from e


strict = False  # seeds are to be accepted
