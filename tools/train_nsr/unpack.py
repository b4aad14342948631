# SPDX-License-Identifier: Apache-2.0
"""What export.py put into a model file, taken out again: the weights to go on from.

    PYTHONPATH=. python tools/train_nsr/unpack.py MODEL.pvrm LUMA.npz [CHROMA.npz]

LUMA.npz is what train.py starts from; CHROMA.npz what export.py takes for chroma.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import numpy.typing as npt

from engine.pvrm import Pvrm
from engine.video.network import CHROMA_INPUTS, SITINGS

Arrays = dict[str, Any]


def network(
    file: Pvrm, prefix: str, sizes: dict[str, Any], inputs: int, skips: list[list[int]]
) -> Arrays:
    """The layers of a network whose blobs have this prefix, named as train.py names them."""
    scale, channels, count = file.metadata["scale"], sizes["channels"], sizes["blocks"] + 2
    phases = scale * scale
    out: Arrays = {}

    def floats(name: str) -> npt.NDArray[np.float32]:
        return file.blob(prefix + name).view("<f4").astype(np.float32)

    for i in range(count):
        blob, cin = floats(f"conv{i}"), channels if i else inputs
        cout = len(blob) // (9 * cin + 2)
        weight = blob[: 9 * cin * cout].reshape(cin, 3, 3, cout).transpose(3, 0, 1, 2)
        bias, slope = blob[9 * cin * cout :].reshape(2, cout)
        if any(b == i for _, b in skips):
            slope = floats(f"skip{i}")
        keep = phases if i == count - 1 else cout
        out[f"{prefix}conv{i}.weight"] = np.ascontiguousarray(weight[:keep])
        out[f"{prefix}conv{i}.bias"], out[f"{prefix}conv{i}.slope"] = bias[:keep], slope[:keep]
    out[f"{prefix}base"] = floats("base").reshape(phases, 5, 5)
    return out


def luma(file: Pvrm) -> Arrays:
    """scale, skip, conv<i>.weight ... and base of the luma network."""
    skips = [list(pair) for pair in file.metadata.get("skips", [])]
    head: Arrays = {
        "scale": np.array(file.metadata["scale"], np.int32),
        "skip": np.array(skips, np.int32).reshape(-1, 2),
    }
    if "int8" in file.metadata:
        head["int8"] = np.array(file.metadata["int8"])
    return head | network(file, "", file.metadata, 1, skips)


def chroma(file: Pvrm) -> Arrays:
    """The filters left and centre, and with them the networks where the model has some."""
    scale = file.metadata["scale"]
    out: Arrays = {"scale": np.array(scale, np.int32)}
    for siting in SITINGS:
        filters = file.blob(f"chroma.{siting}").view("<f4").astype(np.float32)
        out[siting] = filters.reshape(scale * scale, 5, 5)
        if "chroma" in file.metadata:
            sizes = file.metadata["chroma"]
            named = network(file, f"chroma.{siting}.", sizes, CHROMA_INPUTS, [])
            out |= {k.removeprefix("chroma."): v for k, v in named.items()}
    return out


if __name__ == "__main__":
    model = Pvrm.open(sys.argv[1])
    np.savez(sys.argv[2], **luma(model))
    if len(sys.argv) > 3:
        np.savez(sys.argv[3], **chroma(model))
