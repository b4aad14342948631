# SPDX-License-Identifier: Apache-2.0
"""Targets: compiled models. The header is fuzzed as JSON, with checksums that are right, and what
passes the checks is run on the CPU.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import struct
import zlib
from pathlib import Path
from typing import Any

from tests.fuzz.judge import file_of, refused
from tests.fuzz.models import tiny

ROOT = Path(__file__).resolve().parents[2]


@functools.cache
def compiled_parts(kind: str) -> tuple[dict[str, Any], bytes]:
    """The header of a compiled model, and its data area."""
    from engine import pvrm
    from engine.text import compiled

    if kind == "text":
        fd = os.memfd_create("pvrm")
        with file_of(tiny("F16")) as source, compiled.prepared(source) as (metadata, blobs):
            pvrm.write_fd(fd, metadata, blobs)
        data = os.pread(fd, 1 << 26, 0)
        os.close(fd)
    elif kind == "net":
        from engine.importers import convnets
        from engine.video import convnet
        from tests.engine.video.test_convnet_pipeline import file

        fd = os.memfd_create("pvrm")
        with file_of(file(3)) as source:
            pvrm.write_fd(fd, *convnet.compiled(convnets.load_fd(source), "f16", {"name": "x"}))
        data = os.pread(fd, 1 << 26, 0)
        os.close(fd)
    else:
        data = (ROOT / "engine/video/models/nsr-fast.pvrm").read_bytes()
    length = struct.unpack_from("<I", data, 12)[0]
    return json.loads(data[16 : 16 + length]), data[-(-(20 + length) // 4096) * 4096 :]


def pvrm_file(header: bytes, area: bytes) -> bytes:
    """A compiled model around a header, whatever that is."""
    front = b"PVRM1\0\0\0" + struct.pack("<II", 1, len(header)) + header
    front += struct.pack("<I", zlib.crc32(header))
    return front + bytes(-len(front) % 4096) + area


def pvrm(data: bytes) -> None:
    from engine.pvrm import Pvrm
    from engine.text import compiled
    from engine.video import kinds

    with refused(), file_of(data) as fd:
        Pvrm.open(fd)
        for inspect in (compiled.inspect, kinds.inspect):
            with refused():
                inspect(fd)


def pvrm_seeds() -> list[bytes]:
    parts = [compiled_parts(kind) for kind in ("text", "video")]
    return [pvrm_file(json.dumps(header).encode(), area) for header, area in parts]


def pvrm_text(data: bytes) -> None:
    """What passes the checks has to run without harm to memory: three tokens on the CPU."""
    from engine.backends.base import DeviceInfo, Limits
    from engine.backends.cpu import CpuBackend
    from engine.lower import lower
    from engine.lower_batch import NoBatch, lower_batch
    from engine.text.model import TextModel
    from engine.text.request import Request
    from tests.engine.test_engine_generate import run

    with refused(), file_of(pvrm_file(data, compiled_parts("text")[1])) as fd:
        backend = CpuBackend(1)
        model = TextModel.load(fd, "", backend)
        settings = {"max_tokens": 3, "temperature": 0, "context": 16}
        try:
            asked = Request.parse({"kind": "generate", "prompt": "w1", "settings": settings})
            run(model.state(16), asked)
            # A GPU is told more than a CPU: norms and gates inside of products.
            lower(model.graph, DeviceInfo("gpu", "a GPU", "none", False, Limits()), 16, 4).check()
            with contextlib.suppress(NoBatch):
                lower_batch(model.graph, backend.info, [16, 8])
        finally:
            model.close()


def pvrm_text_seeds() -> list[bytes]:
    return [json.dumps(compiled_parts("text")[0]).encode()]


def one_frame(pipeline: Any) -> None:
    """A black frame through a pipeline."""
    from engine.video.frames import empty

    pipeline.begin(empty(pipeline.format), empty(pipeline.out_format))
    while not pipeline.step():
        pass


def pvrm_video(data: bytes) -> None:
    from engine.backends.cpu import CpuBackend
    from engine.video.frames import FrameFormat
    from engine.video.network import VideoModel
    from engine.video.upscale import VideoPipeline

    with refused(), file_of(pvrm_file(data, compiled_parts("video")[1])) as fd:
        backend = CpuBackend(1)
        model = VideoModel.load(fd, backend)
        try:
            pipeline = VideoPipeline(backend, model, FrameFormat(20, 12))
            one_frame(pipeline)
        finally:
            model.close()


def pvrm_video_seeds() -> list[bytes]:
    return [json.dumps(compiled_parts("video")[0]).encode()]


def pvrm_net(data: bytes) -> None:
    """Somebody's network, compiled: what passes the checks makes a frame on the CPU."""
    from engine.backends.cpu import CpuBackend
    from engine.video.convnet import ConvModel
    from engine.video.convnet_run import ConvPipeline
    from engine.video.frames import FrameFormat

    with refused(), file_of(pvrm_file(data, compiled_parts("net")[1])) as fd:
        backend = CpuBackend(1)
        model = ConvModel.load(fd, backend)
        try:
            pipeline = ConvPipeline(backend, model, FrameFormat(20, 12))
            one_frame(pipeline)
            pipeline.close()
        finally:
            model.close()


def pvrm_net_seeds() -> list[bytes]:
    return [json.dumps(compiled_parts("net")[0]).encode()]
