# SPDX-License-Identifier: Apache-2.0
"""The nodes: IMAGE -> IMAGE and STRING -> STRING, by ComfyUI's contract (INPUT_TYPES,
RETURN_TYPES, FUNCTION, CATEGORY). An IMAGE is a tensor [batch, height, width, channels] of floats,
0..1. Nothing of torch is used but to hand back what came as a tensor."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from pvrd.client import Client
from pvrd.errors import PvrdError

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]
U16 = npt.NDArray[np.uint16]
TIERS = ["fast", "balanced", "quality"]
DEFAULT = "default"
_TOP = 65535.0
_UNIT = 256.0  # a step of 8 bits
_HIGH = 720  # rows from which on pvrd takes frames for BT.709


def _matrix(height: int) -> tuple[F64, F64]:
    """R, G, B of 0..1 -> sample values of Y, Cb, Cr, limited range: what the networks know, and by
    that matrix by which networks of colours read them again. Rows and what is added."""
    kr, kb = (0.2126, 0.0722) if height >= _HIGH else (0.299, 0.114)
    y = np.array([kr, 1 - kr - kb, kb])
    u = (np.array([0.0, 0.0, 1.0]) - y) / (2 * (1 - kb))
    v = (np.array([1.0, 0.0, 0.0]) - y) / (2 * (1 - kr))
    return np.stack([219 * y, 224 * u, 224 * v]) * _UNIT, np.array([16, 128, 128]) * _UNIT


def _models(kind: str) -> list[str]:
    """What pvrd has, for a menu; nothing without a daemon, which may come later."""
    with contextlib.suppress(PvrdError), Client() as client:
        return [str(m["name"]) for m in client.models() if m["kind"] == kind]
    return []


def _watched(total: int) -> Iterator[None]:
    """Tells ComfyUI of each step of `total`, and ends with its exception when the user cancels."""
    try:
        from comfy.model_management import throw_exception_if_processing_interrupted as look
        from comfy.utils import ProgressBar
    except ImportError:  # outside of ComfyUI
        while True:
            yield
    bar = ProgressBar(total)
    while True:
        look()
        bar.update(1)
        yield


def _array(image: Any) -> F32:
    """A tensor, or an array, as an array [batch, height, width, channels]."""
    if hasattr(image, "detach"):
        image = image.detach().cpu().float().numpy()  # numpy knows no bfloat16
    made = np.asarray(image, np.float32)
    if made.ndim != 4 or made.shape[3] not in (1, 3, 4) or not made.size:
        raise ValueError(
            f"an IMAGE is [batch, height, width, 1, 3 or 4 channels], not {made.shape}"
        )
    return np.nan_to_num(made)


def _like(image: Any, made: F32) -> Any:
    if not hasattr(image, "detach"):
        return made
    import torch

    return torch.from_numpy(np.ascontiguousarray(made))


def _grey(picture: F32) -> U16:
    """[height, width] as samples."""
    made: U16 = np.rint(np.clip(picture, 0, 1) * _TOP).astype(np.uint16)
    return made


def _planes(picture: F32) -> list[U16]:
    """[height, width, 3] as Y, Cb, Cr."""
    rows, added = _matrix(len(picture))
    made = np.rint(np.clip(picture, 0, 1) @ rows.T + added).astype(np.uint16)
    return [made[..., n] for n in range(3)]


def _colours(planes: Any, height: int) -> F32:
    """Y, Cb, Cr as [height, width, 3]. height: of what was enlarged."""
    rows, added = _matrix(height)
    samples = np.stack([np.asarray(p, np.float64) for p in planes], -1)
    return np.clip((samples - added) @ np.linalg.inv(rows).T, 0, 1).astype(np.float32)


def _enlarged(client: Client, images: F32, settings: Mapping[str, Any], steps: Any) -> F32:
    """Images of 1 or 3 channels through one video session, several under way at once."""
    grey = images.shape[3] == 1
    options = {
        **settings, "width": images.shape[2], "height": images.shape[1], "depth": 16,
        "pixel": "gray" if grey else "i444", "full_range": grey, "siting": "centre",
        "unchanged": "off", "slots": min(4, len(images)),
    }  # fmt: skip
    frames = ([_grey(i[..., 0])] if grey else _planes(i) for i in images)
    out: list[F32] = []
    with client.open_video(options) as session:
        for _, planes in session.enlarge(frames):
            if grey:
                out.append((np.asarray(planes[0], np.float32) / np.float32(_TOP))[..., None])
            else:
                out.append(_colours(planes, images.shape[1]))
            next(steps)
    return np.stack(out).astype(np.float32)


class PvrdUpscale:
    """Enlarges images by pvrd's networks, on the GPU that it owns or the CPU."""

    CATEGORY = "image/upscaling"
    FUNCTION = "upscale"
    RETURN_TYPES = ("IMAGE",)
    RETURN_NAMES = ("image",)
    DESCRIPTION = "Enlarges images with pvrd, the accelerator daemon of this machine."

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        """The inputs; the models are those that pvrd has now."""
        names = TIERS + [name for name in _models("video") if name not in TIERS]
        scale = {"default": 2.0, "min": 1.0, "max": 8.0, "step": 0.1}
        return {
            "required": {
                "image": ("IMAGE",),
                "scale": ("FLOAT", scale),
                "model": (names, {"default": "quality"}),
            },
            "optional": {
                "device": (["auto", "gpu", "cpu"], {"default": "auto"}),
                "priority": ("INT", {"default": 5, "min": 0, "max": 11}),
            },
        }

    def upscale(
        self, image: Any, scale: float, model: str, device: str = "auto", priority: int = 5
    ) -> tuple[Any]:
        """[B, H, W, C] -> [B, scale * H, scale * W, C]. Alpha is enlarged beside the colours.

        Raises:
            PvrdError: what pvrd says, in a sentence.
        """
        images = _array(image)
        settings = {"scale": scale, "model": model, "device": device, "priority": priority}
        colours, alpha = images[..., :3], images[..., 3:]
        steps = _watched(len(images) * (2 if alpha.size else 1))
        with Client() as client:
            made = _enlarged(client, colours, settings, steps)
            if alpha.size:
                made = np.concatenate([made, _enlarged(client, alpha, settings, steps)], -1)
        return (_like(image, made),)


class PvrdText:
    """Writes text by a model of pvrd's: a prompt made longer, a caption put in order."""

    CATEGORY = "utils/text"
    FUNCTION = "write"
    RETURN_TYPES = ("STRING",)
    RETURN_NAMES = ("text",)
    DESCRIPTION = "Has a language model of pvrd's answer, on this machine."

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        """The inputs; the models are those that pvrd has now."""
        seed = {"default": 0, "min": 0, "max": 0xFFFFFFFFFFFFFFFF, "control_after_generate": True}
        return {
            "required": {
                "prompt": ("STRING", {"multiline": True, "default": ""}),
                "model": ([DEFAULT, *_models("text")], {"default": DEFAULT}),
                "max_tokens": ("INT", {"default": 256, "min": 1, "max": 32768}),
                "temperature": ("FLOAT", {"default": 0.7, "min": 0.0, "max": 2.0, "step": 0.05}),
                "seed": ("INT", seed),
            },
            "optional": {
                "system": ("STRING", {"multiline": True, "default": ""}),
                "device": (["auto", "gpu", "cpu"], {"default": "auto"}),
            },
        }

    def write(
        self, prompt: str, model: str, max_tokens: int, temperature: float, seed: int,
        system: str = "", device: str = "auto",
    ) -> tuple[str]:  # fmt: skip
        """The answer to the prompt.

        Raises:
            PvrdError: what pvrd says, in a sentence.
        """
        talk = [{"role": "system", "content": system}] if system.strip() else []
        talk.append({"role": "user", "content": prompt})
        wanted = {"model": None if model == DEFAULT else model, "device": device}
        settings = {"max_tokens": max_tokens, "temperature": temperature, "seed": seed}
        steps = _watched(max_tokens)
        pieces = []
        with Client() as client, client.open_text(wanted) as session:
            stream = session.chat(talk, settings)
            try:
                for event in stream:
                    pieces.append(str(event.get("text", "")))
                    if event.get("type") == "token":
                        next(steps)
            finally:
                stream.close()  # cancels what is under way
        return ("".join(pieces),)
