# SPDX-License-Identifier: Apache-2.0
"""Pictures in the real worker program, on the CPU."""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.workers.conftest import Peer
from tests.workers.rings import MODEL, Ring, Start, ring, worker

__all__ = ["ring", "worker"]  # fixtures


def picture(size: tuple[int, int] = (24, 18)) -> bytes:
    out = io.BytesIO()
    ramp = np.linspace(0, 255, size[0] * size[1] * 3).astype(np.uint8).reshape(size[1], size[0], 3)
    Image.fromarray(ramp).save(out, "png")
    return out.getvalue()


def send_picture(worker: Peer, data: bytes, job: str = "1", **settings: Any) -> int:
    source = os.memfd_create("source", os.MFD_CLOEXEC)
    os.write(source, data)
    result = os.memfd_create("result", os.MFD_CLOEXEC)
    settings = {"scale": 2, "models": ["m"], "format": "", **settings}
    worker.send("picture", [source, result], job=job, settings=settings)
    os.close(source)
    return result


def test_picture(worker: Peer) -> None:
    result = send_picture(worker, picture())
    done = worker.expect("picture.done")
    assert (done["job"], done["width"], done["height"], done["format"]) == ("1", 48, 36, "png")
    assert done["bytes"] == os.fstat(result).st_size
    assert done["stats"]["tiles"] >= 1
    with os.fdopen(result, "rb") as f, Image.open(f) as image:
        assert image.size == (48, 36)


def test_jpeg_is_asked_for(worker: Peer) -> None:
    result = send_picture(worker, picture(), format="jpeg")
    assert worker.expect("picture.done")["format"] == "jpeg"
    assert os.pread(result, 2, 0) == b"\xff\xd8"
    os.close(result)


@pytest.mark.parametrize("data", [b"", b"no picture", picture()[:60]])
def test_damaged_picture_is_one_sentence(worker: Peer, data: bytes) -> None:
    os.close(send_picture(worker, data))
    error = worker.error()
    assert (error["job"], error["error"]) == ("1", "InvalidArgument")
    os.close(send_picture(worker, picture(), "2"))
    assert worker.expect("picture.done")["job"] == "2"


def test_cancelled_picture(peer: Start) -> None:
    worker = peer(threads=1, faults=["cpu:slow:20"])
    worker.load(MODEL, kind="video")
    os.close(send_picture(worker, picture((320, 320)), tile=32))
    worker.expect("picture.progress")
    worker.send("cancel", job="1")
    error = worker.error()
    assert (error["job"], error["error"]) == ("1", "Cancelled")
    worker.send("stats")
    assert worker.recv()["jobs"] == 0


def test_text_model_is_no_video_model(worker: Peer, ring: Ring, tiny: Path) -> None:
    worker.load(tiny, key="t")
    worker.send("video.open", [ring.fd], **ring.message(models=["t"]))
    assert worker.error()["error"] == "UnsupportedModel"
    os.close(send_picture(worker, picture(), models=["t"]))
    assert worker.error()["error"] == "UnsupportedModel"
    worker.text("2", "Hello", model="m")
    assert worker.error()["error"] == "UnsupportedModel"
