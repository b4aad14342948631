# SPDX-License-Identifier: Apache-2.0
"""Folded weights (train.py) and chroma filters (chroma.py) -> a model file.

PYTHONPATH=. python tools/train_nsr/export.py nsr-fast.npz chroma.npz
engine/video/models/nsr-fast.pvrm
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from engine import pvrm
from engine.video.plain import bicubic_filters


def export(weights: Path, chroma: Path, out: Path) -> None:
    """Writes the model file; its name is the file's."""
    net, filters = np.load(weights), np.load(chroma)
    convs = sorted(k for k in net.files if k.endswith(".weight"))
    blobs = []
    for i in range(len(convs)):
        w = net[f"conv{i}.weight"]  # [cout, cin, 3, 3] -> [cin][9][cout]
        parts = [w.transpose(1, 2, 3, 0).ravel(), net[f"conv{i}.bias"], net[f"conv{i}.slope"]]
        blobs.append(pvrm.array_blob(f"conv{i}", np.concatenate(parts).astype("<f4")))
    blobs.append(pvrm.array_blob("base", net["base"].astype("<f4").reshape(4, 25)))
    for siting in ("left", "centre"):
        data = filters[siting].astype("<f4").reshape(4, 25)
        blobs.append(pvrm.array_blob(f"chroma.{siting}", data))
    blobs.append(pvrm.array_blob("chroma.plain", bicubic_filters().reshape(4, 25)))
    metadata = {
        "kind": "video",
        "arch": "nsr",
        "name": out.stem,
        "scale": 2,
        "channels": int(net["conv0.weight"].shape[0]),
        "blocks": len(convs) - 2,
        "licence": "Apache-2.0",
    }
    pvrm.write(out, metadata, blobs)


if __name__ == "__main__":
    export(*(Path(a) for a in sys.argv[1:4]))
