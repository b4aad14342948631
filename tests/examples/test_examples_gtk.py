# SPDX-License-Identifier: Apache-2.0
"""The GTK example in a headless Weston; docs/gtk_summary.png is a picture that such a run made."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.examples.weston import ROOT, check_cancelling, check_summary

pytestmark = pytest.mark.bus

SITE = Path(sys.prefix) / f"lib/python{sys.version_info[0]}.{sys.version_info[1]}/site-packages"
COMMAND = ["/usr/bin/python3", str(ROOT / "examples/gtk_summary.py")]
ENV = {
    "GDK_BACKEND": "wayland", "GSK_RENDERER": "cairo", "GSETTINGS_BACKEND": "memory",
    "GTK_A11Y": "none", "PYTHONPATH": f"{ROOT}:{SITE}",
}  # fmt: skip


def test_a_summary_in_gtk(tmp_path: Path) -> None:
    check_summary(COMMAND, ENV, tmp_path / "picture.png")


def test_cancelling() -> None:
    check_cancelling(COMMAND, ENV)
