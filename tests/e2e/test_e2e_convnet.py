# SPDX-License-Identifier: Apache-2.0
"""Somebody's network, from its file to an enlarged picture and an enlarged clip."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.buses import ROOT
from tests.daemons import Daemon
from tests.engine import networks
from tests.engine.networks import node

pytestmark = pytest.mark.bus

Start = Callable[..., Daemon]
SCALE = 4


def network() -> bytes:
    """x4: the nearest neighbour, with red and blue changed over."""
    swap = np.eye(3, dtype=np.float32)[[2, 1, 0]].reshape(3, 3, 1, 1)
    scales = np.array([1, 1, SCALE, SCALE], np.float32)
    nodes = [node("Conv", "x w", "a"), node("Resize", "a - scales", "y", mode="nearest")]
    return networks.onnx(nodes, {"w": swap, "scales": scales})


def ncnn_network(folder: Path) -> Path:
    """The same as a pair of files; the path of one."""
    swap = np.eye(3, dtype=np.float32)[[2, 1, 0]]
    lines = ["7767517", "3 3", "Input in 0 1 data", "Convolution c 1 1 data a 0=3 1=1 5=0 6=9"]
    lines.append(f"Interp i 1 1 a y 0=1 1={SCALE}.0 2={SCALE}.0")
    (folder / "swap.param").write_text("\n".join(lines) + "\n")
    (folder / "swap.bin").write_bytes(bytes(4) + swap.tobytes())
    return folder / "swap.param"


def pvrctl(daemon: Daemon, *arguments: str, fails: bool = False) -> Any:
    done = subprocess.run(
        [sys.executable, "-m", "pvrd.ctl.main", "--json", *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT), "PVRD_BUS": daemon.address},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert bool(done.returncode) is fails, done.stderr
    return json.loads(done.stdout.splitlines()[-1]) if done.stdout else None


@pytest.mark.parametrize("source", ["onnx", "ncnn"])
def test_add_a_network_and_use_it(daemon: Start, tmp_path: Path, source: str) -> None:
    running = daemon({"gpu.enabled": False, "cpu.threads": 2})
    running.client().close()
    file = tmp_path / "net.onnx"
    file.write_bytes(network())
    if source == "ncnn":
        file = ncnn_network(tmp_path)
    pvrctl(running, "models", "add", str(file), "--name", "swap", "--licence", "CC0")
    (listed,) = (m for m in pvrctl(running, "models") if m["name"] == "swap")
    assert (listed["kind"], listed["arch"], listed["licence"]) == ("video", "convnet", "CC0")

    small = np.random.default_rng(1).integers(0, 256, (9, 13, 3), np.uint8)
    data = io.BytesIO()
    Image.fromarray(small).save(data, "PNG")
    (tmp_path / "in.png").write_bytes(data.getvalue())
    pictures = [str(tmp_path / name) for name in ("in.png", "out.png")]
    pvrctl(running, "upscale", "--model", "swap", "--scale", str(SCALE), *pictures)
    large = np.asarray(Image.open(pictures[1]))
    want = small[:, :, ::-1].repeat(SCALE, 0).repeat(SCALE, 1)
    assert np.abs(large.astype(int) - want).max() <= 1

    clips = [tmp_path / name for name in ("in.y4m", "out.y4m")]
    planes = [np.full((8, 16), 120), np.full((4, 8), 90), np.full((4, 8), 160)]
    frame = b"FRAME\n" + b"".join(p.astype(np.uint8).tobytes() for p in planes)
    clips[0].write_bytes(b"YUV4MPEG2 W16 H8 F25:1 Ip C420mpeg2\n" + 3 * frame)
    pvrctl(running, "upscale", "--model", "swap", "--scale", str(SCALE), *map(str, clips))
    head, _, rest = clips[1].read_bytes().partition(b"\n")
    assert b"W64 H32" in head
    out = np.frombuffer(rest[len(b"FRAME\n") :][: 64 * 32 * 3 // 2], np.uint8)
    y, u, v = out[: 64 * 32], out[64 * 32 : 64 * 40], out[64 * 40 :]
    # Luma and chroma of the colour with red and blue changed over, by BT.601.
    assert (np.ptp(y), np.ptp(u), np.ptp(v)) == (0, 0, 0)
    assert [int(p[0]) for p in (y, u, v)] == swapped(120, 90, 160)


def swapped(y: int, u: int, v: int) -> list[int]:
    kr, kb = 0.299, 0.114
    luma, cb, cr = (y - 16) / 219, (u - 128) / 224, (v - 128) / 224
    blue, red = luma + 2 * (1 - kr) * cr, luma + 2 * (1 - kb) * cb
    green = (luma - kr * blue - kb * red) / (1 - kr - kb)
    red, green, blue = (min(max(c, 0), 1) for c in (red, green, blue))
    luma = kr * red + (1 - kr - kb) * green + kb * blue
    cb, cr = (blue - luma) / (2 * (1 - kb)), (red - luma) / (2 * (1 - kr))
    return [round(luma * 219 + 16), round(cb * 224 + 128), round(cr * 224 + 128)]


def test_what_is_no_network_is_refused(daemon: Start, tmp_path: Path) -> None:
    running = daemon({"gpu.enabled": False})
    running.client().close()
    file = tmp_path / "bad.onnx"
    w = np.zeros((3, 3, 1, 1), np.float32)
    file.write_bytes(networks.onnx([node("Softmax", "x", "a"), node("Conv", "a w", "y")], {"w": w}))
    error = pvrctl(running, "models", "add", str(file), fails=True)
    assert error["error"] == "UnsupportedModel"
    assert "Softmax (node /a)" in error["message"]
    file.write_bytes(file.read_bytes()[:-7])
    assert pvrctl(running, "models", "add", str(file), fails=True)["error"] == "BadModel"
