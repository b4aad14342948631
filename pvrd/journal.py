# SPDX-License-Identifier: Apache-2.0
"""The record of a text job: a memfd that a worker's successor goes on from. Never on disk."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Mapping
from typing import Any

from pvrd import fds
from pvrd.workers.protocol import JOURNAL_ALIGN


class Journal:
    """Header (a JSON line padded to JOURNAL_ALIGN), then an i32 for each recorded token.

    `reader` is a descriptor for workers that cannot write.
    """

    def __init__(self, header: Mapping[str, Any]) -> None:
        line = json.dumps(header, ensure_ascii=False).encode("utf-8", "replace")
        self.header_bytes = -(-(len(line) + 1) // JOURNAL_ALIGN) * JOURNAL_ALIGN
        self._fd = fds.memfd("pvrd-journal")
        self.reader = -1
        self.count = 0
        try:
            os.pwrite(self._fd, line.ljust(self.header_bytes - 1) + b"\n", 0)
            self.reader = fds.read_only(self._fd)
        except BaseException:
            self.close()
            raise

    def append(self, token: int) -> None:
        """Records the next token."""
        offset = self.header_bytes + 4 * self.count
        os.pwrite(self._fd, struct.pack("<i", token), offset)
        self.count += 1

    def close(self) -> None:
        """Lets go of it. A second time is no error."""
        for fd in (self._fd, self.reader):
            if fd >= 0:
                os.close(fd)
        self._fd = self.reader = -1
