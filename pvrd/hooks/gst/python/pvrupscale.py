# SPDX-License-Identifier: Apache-2.0
"""GStreamer's Python loader finds the element `pvrupscale` here: GST_PLUGIN_PATH is the folder
above `python`. It runs in the system's Python, which needs PyGObject and gst-python; pvrd,
dbus_next and numpy come from there or from where this file (not a link to it) lies."""

import sys
from importlib.util import find_spec
from pathlib import Path

_root = Path(__file__).resolve().parents[4]
if find_spec("pvrd") is None:
    sys.path.append(str(_root))
if find_spec("dbus_next") is None or find_spec("numpy") is None:
    _version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    sys.path.append(str(_root / ".venv/lib" / _version / "site-packages"))

from gi.repository import Gst  # noqa: E402

from pvrd.hooks.gstreamer import PvrUpscale  # noqa: E402

__gstelementfactory__ = ("pvrupscale", Gst.Rank.NONE, PvrUpscale)
