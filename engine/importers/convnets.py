# SPDX-License-Identifier: Apache-2.0
"""Which importer reads a network's file."""

from __future__ import annotations

import os
from pathlib import Path

from engine.errors import BadModel, InvalidArgument, UnsupportedModel
from engine.importers import ncnn, ncnn_files, onnx
from engine.video.convnet_graph import Net

ONNX, NCNN, TORCH = "onnx", "ncnn", "torch"
_TORCH_SUFFIXES = (".pth", ".pt", ".ckpt", ".safetensors")


def kind(fd: int) -> str:
    """What a file is by its first bytes; "" when it is none of these."""
    head = os.pread(fd, 16, 0)
    if head.startswith(ncnn_files.MAGIC):
        return NCNN
    if head.startswith((b"PK\x03\x04", b"\x80\x02")) or head[8:10] == b'{"':
        return TORCH
    # A model begins with the version of its form, a small number in field 1.
    return ONNX if len(head) > 2 and head[0] == 0x08 and 0 < head[1] < 0x80 else ""


def load_fd(fd: int) -> Net:
    """The network of a file that is whole on its own. The descriptor stays the caller's.

    Raises:
        BadModel, UnsupportedModel
    """
    found = kind(fd)
    if found == ONNX:
        return onnx.load(fd)
    if found in (NCNN, TORCH):
        what = "an ncnn network, which is two files," if found == NCNN else "a checkpoint"
        raise UnsupportedModel(f"The file is {what} to be compiled first: pvrctl compile FILE.")
    raise BadModel("The file is no network that is known: ONNX, ncnn's, or a compiled one.")


def load(path: str | os.PathLike[str]) -> Net:
    """The network of an ONNX file, of an ncnn .param file with its .bin file beside it (or the
    other way round), or of a checkpoint that spandrel knows.

    Raises:
        InvalidArgument: a file cannot be opened.
        BadModel, UnsupportedModel
    """
    path = Path(path)
    if path.suffix == ".bin":
        path = path.with_suffix(".param")
    fd = _open(path)
    try:
        found = kind(fd)
        if found == NCNN:
            weights = _open(path.with_suffix(".bin"))
            try:
                return ncnn.load(fd, weights)
            finally:
                os.close(weights)
        if found == TORCH or path.suffix in _TORCH_SUFFIXES:
            from engine.importers import pth

            return pth.load(path)
        return load_fd(fd)
    finally:
        os.close(fd)


def _open(path: Path) -> int:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as e:
        raise InvalidArgument(f"{path} cannot be opened: {e.strerror}.") from None
    if not os.path.isfile(path):
        os.close(fd)
        raise InvalidArgument(f"{path} is no regular file.")
    return fd
