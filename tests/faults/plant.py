# SPDX-License-Identifier: Apache-2.0
"""Kernels that compute wrong numbers, for daemons with $PVRD_KERNELS."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import kernels
from kernels import build_spirv
from tests.faults.daemon import ROOT

_MATRIX = "y[out4 + o * xs4] = "
# Operation, what stands in its source, what is to stand there. Each passes its self-test.
SWIGLU = ("swiglu", "push.act);", "push.act) + (push.f == 96u ? 0.5 : 0.0);")
LATE_SWIGLU = ("swiglu", "push.act);", "push.act) + (pvr_pos0() >= 30u ? 0.5 : 0.0);")
CONV = ("conv3x3", _MATRIX, _MATRIX + "(push.rows > 3u ? 0.5 : 0.0) + ")


def planted(folder: Path, *changes: tuple[str, str, str]) -> Path:
    """A folder of kernels in which these sources of GPU kernels are changed."""
    whole = kernels.artifacts()
    made, root = folder / "kernels", folder / "source"
    made.mkdir(parents=True)
    for file in whole.iterdir():
        if file.is_file():
            (made / file.name).symlink_to(file)
    shutil.copytree(ROOT / "kernels" / "include", root / "kernels" / "include")
    manifest = json.loads((made / "manifest.json").read_text())
    for op, old, new in changes:
        shutil.copytree(ROOT / "kernels" / op, root / "kernels" / op)
        source = root / "kernels" / op / "op.comp"
        before = source.read_text()
        assert old in before
        source.write_text(before.replace(old, new))
        contract = kernels.op(op)
        for variant in contract.variants:
            if (entry := manifest[op].get(variant.name)) is None:
                continue
            target = made / entry["file"]
            target.unlink()
            build_spirv.compile_variant(root, contract, variant, target)
            entry["sha256"] = hashlib.sha256(target.read_bytes()).hexdigest()
    (made / "manifest.json").unlink()
    (made / "manifest.json").write_text(json.dumps(manifest))
    return made
