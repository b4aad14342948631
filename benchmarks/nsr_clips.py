# SPDX-License-Identifier: Apache-2.0
"""Frames of real video for measuring: decoded by ffmpeg, made smaller, sent through a codec."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
Planes = list[Bytes]  # luma, Cb, Cr of 4:2:0, siting left
NAMES = ("bikes", "bigbuckbunny", "carphone_pristine")
FRAMES, EVERY = 17, 8  # so many frames of a clip; each EVERY-th is measured
CODEC = ("-c:v", "libx264", "-preset", "medium", "-crf", "28")


def found(folder: Path) -> list[Path]:
    """The clips in a folder."""
    return [p for p in (folder / f"{name}.mp4" for name in NAMES) if p.exists()]


def _ffmpeg(*arguments: str, data: bytes = b"") -> bytes:
    command = ["ffmpeg", "-v", "error", "-y", *arguments]
    return subprocess.run(command, input=data, stdout=subprocess.PIPE, check=True).stdout


def _split(raw: bytes, width: int, height: int) -> list[Planes]:
    """Frames of packed I420."""
    flat = np.frombuffer(raw, np.uint8).reshape(-1, width * height * 3 // 2)
    n = width * height
    half = (height // 2, width // 2)
    return [
        [f[:n].reshape(height, width), *(c.reshape(half) for c in f[n:].reshape(2, -1))]
        for f in flat
    ]


def _size(clip: Path) -> tuple[int, int]:
    wanted = ["-select_streams", "v", "-show_entries", "stream=width,height", "-of", "csv=p=0"]
    out = subprocess.check_output(["ffprobe", "-v", "error", *wanted, str(clip)], text=True)
    width, height = (int(n) for n in out.strip().rstrip(",").split(","))
    return width, height


def frames(clip: Path, scale: int) -> list[Planes]:
    """The first frames, cut so that 1/scale of the size is even."""
    width, height = _size(clip)
    raw = _ffmpeg(
        *("-i", str(clip), "-frames:v", str(FRAMES), "-f", "rawvideo", "-pix_fmt", "yuv420p", "-")
    )
    w, h = (n // (2 * scale) * 2 * scale for n in (width, height))
    return [
        [f[0][:h, :w], *(c[: h // 2, : w // 2] for c in f[1:])] for f in _split(raw, width, height)
    ]


def _cubic(x: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    x = np.abs(x)
    near = (1.5 * x - 2.5) * x * x + 1
    far = ((-0.5 * x + 2.5) * x - 4) * x + 2
    return np.where(x <= 1, near, np.where(x < 2, far, 0.0))


def reduced(x: npt.NDArray[np.float64], scale: int, offset: float) -> npt.NDArray[np.float64]:
    """1/scale of the last axis by MATLAB's antialiased cubic, borders mirrored; sample k is taken
    at scale * k + offset.
    """
    taps = np.arange(-2 * scale, 2 * scale + 1) + int(offset)
    weights = _cubic((taps - offset) / scale)
    size = x.shape[-1]
    index = np.arange(size // scale)[:, None] * scale + taps
    index = np.where(index < 0, -1 - index, np.where(index >= size, 2 * size - 1 - index, index))
    return np.asarray(x[..., index] @ (weights / weights.sum()))


def smaller(frame: Sequence[Bytes], scale: int) -> Planes:
    """A frame of 1/scale of the size; chroma keeps its siting."""
    out = []
    middle = (scale - 1) / 2
    for i, plane in enumerate(frame):
        across = middle if i == 0 else middle / 2
        x = reduced(plane.astype(np.float64), scale, across)
        x = reduced(x.T, scale, middle).T
        out.append(np.clip(np.rint(x), 0, 255).astype(np.uint8))
    return out


def coded(clip: Sequence[Planes]) -> list[Planes]:
    """The frames after H.264."""
    height, width = clip[0][0].shape
    raw = b"".join(p.tobytes() for frame in clip for p in frame)
    layout = ("-f", "rawvideo", "-pix_fmt", "yuv420p")
    with tempfile.TemporaryDirectory() as folder:
        file = f"{folder}/clip.mkv"
        source = (*layout, "-s", f"{width}x{height}", "-r", "25", "-i", "-")
        _ffmpeg(*source, *CODEC, file, data=raw)
        return _split(_ffmpeg("-i", file, *layout, "-"), width, height)
