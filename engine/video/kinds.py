# SPDX-License-Identifier: Apache-2.0
"""Both kinds of video models: pvrd's own luma networks, and networks of other people."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from engine import pvrm
from engine.backends.base import Backend
from engine.errors import InvalidArgument
from engine.pvrm import Pvrm
from engine.video import convnet, network
from engine.video.convnet import ConvModel
from engine.video.convnet_run import ConvPipeline
from engine.video.frames import FrameFormat, empty
from engine.video.network import VideoModel
from engine.video.upscale import VideoPipeline

Model = VideoModel | ConvModel
Pipeline = VideoPipeline | ConvPipeline
PRECISIONS = ("model", "f32", "int8", "auto")
# Instruction sets that add four products of bytes at once.
BYTE_ISAS = {"isa:avx512", "isa:dotprod"}
TRIAL = FrameFormat(320, 96, "gray")
TRIALS = 3


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


def precise(model: Model, precision: str) -> Model:
    """The model with its luma network in a precision: "f32", "int8", "auto", the faster one of
    these by a trial at the first time, or "model": in int8 where it was made for that and the CPU
    has instructions for it. Networks of other people stay as they are, and so do those
    that lose too much in int8 (`info["why_f32"]`).

    Raises:
        InvalidArgument: it is none of PRECISIONS.
    """
    if precision not in PRECISIONS:
        raise InvalidArgument(f"The precision is {', '.join(PRECISIONS)}, not {precision!r}.")
    if isinstance(model, ConvModel) or precision == "f32":
        return model
    if precision == "model":
        bytes_too = model.info["int8"] and BYTE_ISAS & model.backend.info.features
        return model.int8() if bytes_too else model
    other = model.int8()
    if precision == "int8" or other is model:
        return other
    if model.int8_faster is None:
        model.int8_faster = _trial_s(other) < _trial_s(model)
    return other if model.int8_faster else model


def _trial_s(model: VideoModel) -> float:
    """Seconds that a small frame takes."""
    source, target = empty(TRIAL), empty(TRIAL.scaled(model.scale))
    trial = VideoPipeline(model.backend, model, TRIAL)
    took = []
    for _ in range(TRIALS):
        began = time.perf_counter()
        trial.begin(source, target)
        while not trial.step():
            pass
        took.append(time.perf_counter() - began)
    trial.close()
    return min(took)


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
