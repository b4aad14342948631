# SPDX-License-Identifier: Apache-2.0
"""Reading the journal of a text job: its request and the ids that pvrd has recorded.

A JSON line, padded with spaces or followed by zeros up to a multiple of ALIGN, then i32 ids. pvrd
alone writes it. The file is read with pread: a sparse one costs nothing.
"""

from __future__ import annotations

import json
import os

import numpy as np

from engine.errors import InvalidArgument
from engine.text.request import Request

ALIGN = 4096
MAX_HEADER = 64 << 20


def read(fd: int, delivered: int) -> tuple[Request, list[int]]:
    """The request and its first `delivered` ids.

    Raises:
        InvalidArgument: damaged, or too short.
    """
    header = bytearray()
    while b"\n" not in header[-ALIGN:]:
        more = os.pread(fd, ALIGN, len(header))
        if not more or len(header) > MAX_HEADER:
            raise InvalidArgument("The journal of the job is damaged.")
        header += more
        if len(more) < ALIGN:
            break
    line, newline, _ = header.partition(b"\n")
    start = -(-(len(line) + 1) // ALIGN) * ALIGN
    raw = os.pread(fd, 4 * delivered, start) if delivered > 0 else b""
    try:
        data = json.loads(line)
    except (ValueError, RecursionError):
        data = None
    if not newline or not isinstance(data, dict) or len(raw) != 4 * max(0, delivered):
        raise InvalidArgument("The journal of the job is damaged.")
    return Request.parse(data), [int(i) for i in np.frombuffer(raw, "<i4")]
