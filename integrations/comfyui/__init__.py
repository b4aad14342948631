# SPDX-License-Identifier: Apache-2.0
"""ComfyUI nodes that have pvrd do the work. Link or copy this folder into ComfyUI/custom_nodes."""

import importlib.util
import sys
from pathlib import Path


def _bring_client() -> None:
    """Makes `pvrd` importable where it is not installed, from the sources that this folder is
    linked to. It alone comes in by that, none of the folders beside it.

    Raises:
        ImportError: there is none.
    """
    if "pvrd" in sys.modules or importlib.util.find_spec("pvrd") is not None:
        return
    init = Path(__file__).resolve().parents[2] / "pvrd/__init__.py"
    if not init.is_file():
        raise ImportError(
            "the Python package pvrd is missing: link this folder out of pvrd's sources, or "
            "install pvrd for ComfyUI's Python"
        )
    spec = importlib.util.spec_from_file_location("pvrd", init)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["pvrd"] = module
    spec.loader.exec_module(module)


_bring_client()

from .nodes import PvrdText, PvrdUpscale  # noqa: E402

NODE_CLASS_MAPPINGS = {"PvrdUpscale": PvrdUpscale, "PvrdText": PvrdText}
NODE_DISPLAY_NAME_MAPPINGS = {"PvrdUpscale": "Upscale (pvrd)", "PvrdText": "Text (pvrd)"}

__all__ = ["NODE_CLASS_MAPPINGS", "NODE_DISPLAY_NAME_MAPPINGS"]
