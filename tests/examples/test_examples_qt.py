# SPDX-License-Identifier: Apache-2.0
"""The Qt example in a headless Weston; docs/qt_summary.png is a picture that such a run made.
`make check-long` installs PySide6."""

from __future__ import annotations

import os
import platform
import sys
from pathlib import Path

import pytest

from tests.examples.weston import ROOT, check_cancelling, check_summary

pytestmark = [pytest.mark.bus, pytest.mark.long]

COMMAND = [sys.executable, str(ROOT / "examples/qt_summary.py")]
ENV = {"QT_QPA_PLATFORM": "wayland", "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}


@pytest.fixture(autouse=True)
def _qt() -> None:
    if platform.machine() not in ("x86_64", "aarch64"):
        pytest.skip(f"PySide6 has no wheel for {platform.machine()}")


def test_a_summary_in_qt(tmp_path: Path) -> None:
    check_summary(COMMAND, ENV, tmp_path / "picture.png")


def test_cancelling() -> None:
    check_cancelling(COMMAND, ENV)
