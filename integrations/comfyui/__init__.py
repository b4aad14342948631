# SPDX-License-Identifier: Apache-2.0
"""ComfyUI nodes that have pvrd do the work. Copy or link this folder into ComfyUI/custom_nodes."""

from .nodes import PvrdText, PvrdUpscale

NODE_CLASS_MAPPINGS = {"PvrdUpscale": PvrdUpscale, "PvrdText": PvrdText}
NODE_DISPLAY_NAME_MAPPINGS = {"PvrdUpscale": "Upscale (pvrd)", "PvrdText": "Text (pvrd)"}

__all__ = ["NODE_CLASS_MAPPINGS", "NODE_DISPLAY_NAME_MAPPINGS"]
