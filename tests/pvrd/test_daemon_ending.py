# SPDX-License-Identifier: Apache-2.0
"""What pvrd says of a worker that ends by itself."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest

pytestmark = pytest.mark.bus
QUITTER = "import os, sys; os.close(int(sys.argv[sys.argv.index('--fd') + 1])); sys.exit(7)"


def test_how_a_worker_ended_is_its_own_exit_status(
    start: Callable[..., Any], until: Callable[..., None]
) -> None:
    daemon = start({"workers.program": [sys.executable, "-c", QUITTER]})
    until(lambda: "the cpu worker is gone" in daemon.text(), "the end")
    assert "the cpu worker is gone: it ended with status 7" in daemon.text()
    assert "killed by signal" not in daemon.text()
