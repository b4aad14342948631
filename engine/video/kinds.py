# SPDX-License-Identifier: Apache-2.0
"""Both kinds of video models: pvrd's own luma networks, and networks of other people."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from engine import pvrm
from engine.backends.base import Backend
from engine.pvrm import Pvrm
from engine.video import convnet, network
from engine.video.convnet import ConvModel
from engine.video.convnet_run import ConvPipeline
from engine.video.frames import FrameFormat
from engine.video.network import VideoModel
from engine.video.upscale import VideoPipeline

Model = VideoModel | ConvModel
Pipeline = VideoPipeline | ConvPipeline


def _own(fd: int) -> bool:
    """Is a file one of pvrd's own networks?"""
    return pvrm.is_compiled(fd) and not convnet.is_convnet(Pvrm.open(fd))


def load(
    fd: int,
    cache: str,
    backend: Backend,
    progress: Callable[[float], None] | None = None,
    force: bool = False,
) -> Model:
    """A model from its file (the descriptor stays the caller's); `cache` as ConvModel.load.

    Raises:
        BadModel, UnsupportedModel, OutOfMemory
    """
    if _own(fd):
        return VideoModel.load(fd, backend, progress)
    return ConvModel.load(fd, backend, progress, cache, force)


def inspect(fd: int) -> dict[str, Any]:
    """What a file is as a video model.

    Raises:
        BadModel, UnsupportedModel
    """
    return network.inspect(fd) if _own(fd) else convnet.inspect(fd)


def matrix_for(models: Sequence[Model]) -> str:
    """The matrix of pictures' planes: "rgb" (none) where all networks want red, green and blue."""
    colours = all(isinstance(m, ConvModel) and m.colours == 3 for m in models)
    return "rgb" if colours else ""


def pipeline(
    backend: Backend,
    model: Model,
    fmt: FrameFormat,
    tile: int = 0,
    overlap: int = 0,
    unchanged: str = "off",
) -> Pipeline:
    """What takes frames of a format through a model.

    Raises:
        InvalidArgument, OutOfMemory, Quarantined: as the pipelines.
    """
    if isinstance(model, ConvModel):
        return ConvPipeline(backend, model, fmt, tile, overlap, unchanged)
    return VideoPipeline(backend, model, fmt, tile, overlap, unchanged)
