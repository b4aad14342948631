# SPDX-License-Identifier: Apache-2.0
"""A network from a PyTorch checkpoint (.pth, .safetensors): spandrel finds out which architecture
its weights are of, PyTorch writes that as ONNX, and engine/importers/onnx.py reads it.

Both packages are large and only needed here, so they are imported when a checkpoint comes. A .pth
file is read with spandrel's restricted unpickler, which makes tensors and nothing else.
"""

from __future__ import annotations

import os
import tempfile
import warnings
from pathlib import Path
from typing import Any

from engine.errors import BadModel, UnsupportedModel
from engine.importers import onnx
from engine.video.convnet_graph import Net

INSTALL = "Checkpoints are read with PyTorch and spandrel: pip install 'pvrd[pth]'"
_SIDE = 64  # samples of the input that the network is followed with


def load(path: Path) -> Net:
    """The network of a checkpoint.

    Raises:
        UnsupportedModel: the packages are missing, the architecture is unknown, or it has operators
            that are not run (named with their nodes).
        BadModel: damaged.
    """
    try:
        import spandrel
        import torch
    except ImportError as e:
        raise UnsupportedModel(f"{INSTALL} (missing: {e.name}).") from None
    try:
        found: Any = spandrel.ModelLoader("cpu").load_from_file(path)
    except spandrel.UnsupportedModelError:
        raise UnsupportedModel(f"{path.name}: spandrel knows no such architecture.") from None
    except Exception as e:
        # Whatever is wrong in a file ends in some error of the libraries that read it.
        said = str(e).splitlines()[0] if str(e) else type(e).__name__
        raise BadModel(f"{path.name} cannot be read: {said[:200]}") from None
    if not isinstance(found, spandrel.ImageModelDescriptor):
        raise UnsupportedModel(f"{path.name} is no network that makes a picture of a picture.")
    sample = torch.zeros(1, found.input_channels, _SIDE, _SIDE)
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the exporter, about itself
        target = Path(folder, "network.onnx")
        try:
            with torch.no_grad():
                torch.onnx.export(
                    found.model.eval().float(),
                    (sample,),
                    str(target),
                    opset_version=17,
                    dynamo=False,
                )
        except Exception as e:
            said = str(e).splitlines()[0] if str(e) else type(e).__name__
            raise UnsupportedModel(
                f"{path.name} ({found.architecture.name}) cannot be written as ONNX: {said[:200]}"
            ) from None
        fd = os.open(target, os.O_RDONLY | os.O_CLOEXEC)
        try:
            return onnx.load(fd)
        finally:
            os.close(fd)
