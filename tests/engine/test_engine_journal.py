# SPDX-License-Identifier: Apache-2.0
"""The journal of a text job as a worker reads it, damaged ones too."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest

from engine.errors import InvalidArgument
from engine.text import journal
from engine.text.request import Request


def test_journal(tmp_path: Path) -> None:
    header = {"kind": "generate", "prompt": "é" * 3000, "settings": {"temperature": 0}}
    line = json.dumps(header, ensure_ascii=False).encode()
    size = -(-(len(line) + 1) // 4096) * 4096
    fd = os.memfd_create("journal")
    os.pwrite(fd, line.ljust(size - 1) + b"\n" + np.arange(5, dtype="<i4").tobytes(), 0)
    request, ids = journal.read(fd, 4)
    assert request == Request("generate", "é" * 3000, settings={"temperature": 0})
    assert ids == [0, 1, 2, 3]
    assert journal.read(fd, 0)[1] == []
    with pytest.raises(InvalidArgument, match="damaged"):
        journal.read(fd, 6)
    os.close(fd)


@pytest.mark.parametrize(
    "data", [b"", b"{", b"{}" * 9000, b"[1]\n", b"\xff\n", b"[" * 5000 + b"\n"]
)
def test_damaged_journal(data: bytes) -> None:
    fd = os.memfd_create("journal")
    os.write(fd, data)
    with pytest.raises(InvalidArgument):
        journal.read(fd, 0)
    os.close(fd)
