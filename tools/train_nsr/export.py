# SPDX-License-Identifier: Apache-2.0
"""Folded weights of a luma network (train.py) and what chroma.py learned -> a model file.

    PYTHONPATH=. python tools/train_nsr/export.py nsr-fast.npz CHROMA... nsr-fast.pvrm

The chroma files, of the luma's scale, may hold filters (left, centre [scale^2, 5, 5]) and networks
(left.conv0.weight ..., left.base, the same for centre). Where no filters were learned, they are
bicubic. engine/video/network.py says how the file is made up.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from engine import pvrm
from engine.video.network import SITINGS, maps
from engine.video.plain import bicubic_filters

Arrays = Mapping[str, npt.NDArray[Any]]


def network(
    net: Arrays, prefix: str, scale: int, skips: list[list[int]]
) -> tuple[dict[str, int], dict[str, npt.NDArray[Any]]]:
    """Sizes {channels, blocks} and blobs of a network whose arrays have this prefix."""
    count = sum(1 for k in net if k.startswith(f"{prefix}conv") and k.endswith(".weight"))
    blobs = {}
    for i in range(count):
        weight, bias, slope = (net[f"{prefix}conv{i}.{k}"] for k in ("weight", "bias", "slope"))
        if i == count - 1:
            # Nobody reads the maps that fill up.
            more = maps(scale) - len(weight)
            weight = np.pad(weight, ((0, more), (0, 0), (0, 0), (0, 0)))
            bias, slope = np.pad(bias, (0, more)), np.ones(maps(scale), np.float32)
        if any(b == i for _, b in skips):
            blobs[f"{prefix}skip{i}"] = slope
            slope = np.ones_like(slope)
        # [cout, cin, 3, 3] -> [cin][9][cout]
        blobs[f"{prefix}conv{i}"] = np.concatenate(
            [weight.transpose(1, 2, 3, 0).ravel(), bias, slope]
        )
    blobs[f"{prefix}base"] = net[f"{prefix}base"].reshape(scale * scale, 25)
    return {"channels": len(net[f"{prefix}conv0.weight"]), "blocks": count - 2}, blobs


def export(weights: Path, chroma: list[Path], out: Path) -> None:
    """Writes the model file; its name is the file's."""
    net: Arrays = dict(np.load(weights))
    learned: Arrays = {k: v for path in chroma for k, v in np.load(path).items()}
    scale = int(net.get("scale", np.array(2)))
    skips = np.asarray(net.get("skip", ())).reshape(-1, 2).tolist()
    sizes, blobs = network(net, "", scale, skips)
    metadata: dict[str, Any] = {
        "kind": "video",
        "arch": "nsr",
        "name": out.stem,
        "scale": scale,
        **sizes,
        "licence": "Apache-2.0",
    }
    if skips:
        metadata["skips"] = skips
    for siting in SITINGS:
        filters = learned.get(siting, bicubic_filters(scale, siting))
        blobs[f"chroma.{siting}"] = filters.reshape(scale * scale, 25)
        if f"{siting}.conv0.weight" in learned:
            named = {f"chroma.{k}": v for k, v in learned.items()}
            metadata["chroma"], more = network(named, f"chroma.{siting}.", scale, [])
            blobs |= more
    if "int8" in net:
        metadata["int8"] = float(net["int8"])
    blobs["chroma.plain"] = bicubic_filters(scale).reshape(scale * scale, 25)
    arrays = {name: blob.astype("<f4") for name, blob in blobs.items()}
    pvrm.write(out, metadata, [pvrm.array_blob(name, a) for name, a in arrays.items()])


if __name__ == "__main__":
    first, *middle, last = (Path(a) for a in sys.argv[1:])
    export(first, middle, last)
