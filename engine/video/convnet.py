# SPDX-License-Identifier: Apache-2.0
"""Other people's networks: the compiled file, and the model on a device.

File (.pvrm): metadata {kind "video", arch "convnet", compiler, name, scale, colours, format f16|q8,
network (convnet_graph.Net.to_json), licence} and one blob `weights` (convnet_pack). It serves every
size and every device; what changed in the network since its source is in the network's log.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping
from typing import Any

from engine import memory, pvrm
from engine.backends.base import Backend
from engine.errors import BadModel, PvrError, UnsupportedModel
from engine.importers import convnets
from engine.importers.source import checksum
from engine.pvrm import Blob, Pvrm
from engine.video import convnet_pack
from engine.video.convnet_colour import plane_filters
from engine.video.convnet_graph import Net
from engine.video.convnet_layout import aligned, layout
from engine.video.convnet_lower import Plan, plan
from engine.video.convnet_passes import optimised

ARCH = "convnet"
COMPILER = 1  # goes up whenever compiled models of before must not be used any more
WEIGHTS = "weights"
Progress = Callable[[float], None]


def prepared(net: Net) -> Net:
    """An imported network after everything that is done to it, ready to be packed.

    Raises:
        UnsupportedModel: sizes that are not run.
    """
    return aligned(optimised(net))


def compiled(net: Net, fmt: str, named: Mapping[str, Any]) -> tuple[dict[str, Any], list[Blob]]:
    """Metadata and blobs of an imported network's file; `named`: name, licence.

    Raises:
        UnsupportedModel: weights or sizes that are not run.
    """
    ready = prepared(net)
    made = layout(ready)
    _, nbytes = convnet_pack.offsets(convnet_pack.sizes(ready, made, fmt))
    metadata = {
        "kind": "video",
        "arch": ARCH,
        "compiler": COMPILER,
        **named,
        "scale": ready.scale,
        "colours": ready.colours,
        "format": fmt,
        "network": ready.to_json(),
    }
    blob = Blob(WEIGHTS, fmt, (nbytes,), nbytes, lambda: convnet_pack.chunks(ready, made, fmt))
    return metadata, [blob]


def write(
    path: str | os.PathLike[str],
    net: Net,
    fmt: str,
    named: Mapping[str, Any],
    progress: Progress | None = None,
) -> None:
    """Compiles an imported network into a file.

    Raises:
        UnsupportedModel: as `compiled`. PvrError: the file cannot be written.
    """
    metadata, blobs = compiled(net, fmt, named)
    pvrm.write(path, metadata, blobs, progress)


class ConvModel:
    """A network on a device, shared by its sessions."""

    def __init__(self, file: Pvrm, backend: Backend) -> None:
        """Raises:
        BadModel, UnsupportedModel: as `inspect`.
        """
        self.info, self.plan = _describe(file)
        self.file, self.backend = file, backend
        blobs = {WEIGHTS: file.blob(WEIGHTS), "planes": plane_filters(self.scale)}
        self.weights = backend.weights(blobs)
        self.info["nbytes"] = self.weights.nbytes()

    @classmethod
    def load(
        cls,
        source: int | str,
        backend: Backend,
        progress: Progress | None = None,
        cache: str = "",
        force: bool = False,
    ) -> ConvModel:
        """Opens a compiled file, or an ONNX file by way of the compiled model `cache`, by
        descriptor (which stays the caller's) or path.

        It is compiled when the cache lacks it or was made from another file, or with `force`; cache
        "" or one that cannot be written: into memory (`info["uncached"]` says why).

        Raises:
            BadModel, UnsupportedModel, OutOfMemory
        """
        if not isinstance(source, int):
            fd = os.open(source, os.O_RDONLY | os.O_CLOEXEC)
            try:
                return cls.load(fd, backend, progress, cache, force)
            finally:
                os.close(fd)
        tell = progress or (lambda _: None)
        reason = ""
        if pvrm.is_compiled(source):
            file = Pvrm.open(source, verify=True)
        else:
            file, reason = _from_source(source, cache, tell, force)
        model = cls(file, backend)
        if reason:
            model.info["uncached"] = reason
        tell(1.0)
        return model

    @property
    def scale(self) -> int:
        return self.plan.scale

    @property
    def colours(self) -> int:
        """1: it sees luma; 3: red, green and blue."""
        return self.plan.net.colours

    def close(self) -> None:
        self.weights.close()


def _from_source(fd: int, cache: str, tell: Progress, force: bool) -> tuple[Pvrm, str]:
    """The compiled form of an ONNX file, and why it is not in the cache ("" when it is)."""
    mark = checksum(fd)
    if cache and not force:
        with contextlib.suppress(OSError, PvrError):
            found = Pvrm.open(cache, verify=True)
            if found.metadata.get("source") == mark and found.metadata.get("compiler") == COMPILER:
                _describe(found)
                return found, ""
    metadata, blobs = compiled(convnets.load_fd(fd), "f16", {"name": "", "source": mark})
    reason = "there is no cache"
    if cache:
        try:
            pvrm.write(cache, metadata, blobs, tell)
            return Pvrm.open(cache), ""
        except PvrError as e:
            if type(e) is not PvrError:
                raise  # what is wrong with the model would be wrong in memory, too
            reason = str(e)
    memory.admit({"compiled model": sum(b.nbytes for b in blobs)})
    held = os.memfd_create("pvrm", os.MFD_CLOEXEC)
    try:
        pvrm.write_fd(held, metadata, blobs, tell)
        return Pvrm.open(held), reason
    finally:
        os.close(held)


def is_convnet(file: Pvrm) -> bool:
    """Is a compiled file such a network?"""
    return file.metadata.get("arch") == ARCH


def inspect(fd: int) -> dict[str, Any]:
    """What a compiled file (each blob of which is checked) or an ONNX file is as a model.

    Raises:
        BadModel, UnsupportedModel
    """
    if pvrm.is_compiled(fd):
        return _describe(Pvrm.open(fd, verify=True))[0]
    return _info({}, plan(prepared(convnets.load_fd(fd)), "f16"))


def _describe(file: Pvrm) -> tuple[dict[str, Any], Plan]:
    m = file.metadata
    if m.get("kind") != "video" or m.get("arch") != ARCH:
        raise UnsupportedModel("The file is no compiled network.")
    if m.get("compiler") != COMPILER:
        raise UnsupportedModel("The network was compiled by another version: compile it again.")
    fmt = m.get("format")
    if fmt not in convnet_pack.FORMATS:
        raise BadModel(f"The compiled network has weights of the format {fmt!r}.")
    made = plan(Net.from_json(m.get("network")), fmt)
    weights = file.blob(WEIGHTS)
    if weights.nbytes != made.nbytes:
        raise BadModel(f"The network's weights have {weights.nbytes} bytes, not {made.nbytes}.")
    return _info(m, made), made


def _info(metadata: Mapping[str, Any], made: Plan) -> dict[str, Any]:
    return {
        "kind": "video",
        "arch": ARCH,
        "name": str(metadata.get("name", "")),
        "scale": made.scale,
        "colours": made.net.colours,
        "format": made.fmt,
        "licence": str(metadata.get("licence", "")),
        "radius": made.radius,
        "nbytes": made.nbytes,
    }
