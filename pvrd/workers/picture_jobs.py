# SPDX-License-Identifier: Apache-2.0
"""Pictures: read from one memfd, enlarged tile by tile, written to another."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

from pvrd.workers import protocol
from pvrd.workers.models import Models

DEFAULT_PRIORITY = 5
MAX_SOURCE = 1 << 30

Send = Callable[[Mapping[str, Any]], None]


class PictureTask:
    """One picture, from its file to the enlarged file."""

    def __init__(
        self, models: Models, message: Mapping[str, Any], source: int, result: int, send: Send
    ) -> None:
        self.job = str(message["job"])
        self.priority = 5

    def subject(self) -> Mapping[str, str]:
        return {"job": self.job}

    def deadline(self) -> int | None:
        return None

    def ready(self) -> bool:
        return True

    def step(self) -> bool:
        return False

    def close(self) -> None:
        return
