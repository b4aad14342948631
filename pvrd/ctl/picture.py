# SPDX-License-Identifier: Apache-2.0
"""A PNG or JPEG picture through Manager.Upscale, by way of a sealed memfd."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from pvrd import fds
from pvrd.ctl import common, errors, output
from pvrd.y4m import write_all

if TYPE_CHECKING:
    import argparse

    from pvrd.client import Client
    from pvrd.ctl.target import Target

LARGEST = 1 << 30
_PIECE = 1 << 20


def sealed_copy(source: int, seen: bytes) -> int:
    """A memfd with `seen` and the rest of `source`, sealed; the caller closes it.

    Raises:
        CtlError: there is more than LARGEST.
    """
    memory = os.memfd_create("picture", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        total = 0
        piece = seen
        while piece:
            total += len(piece)
            if total > LARGEST:
                raise errors.CtlError(
                    f"The picture has more than {output.size(LARGEST)}.",
                    errors.BAD_INPUT,
                    "InvalidArgument",
                )
            write_all(memory, [memoryview(piece)])
            piece = os.read(source, _PIECE)
        fds.seal(memory, fds.SEAL_SHRINK | fds.SEAL_GROW | fds.SEAL_WRITE | fds.SEAL_SEAL)
    except BaseException:
        os.close(memory)
        raise
    return memory


def wishes(args: argparse.Namespace, wanted: str) -> dict[str, Any]:
    """The options of Upscale that every command has."""
    return {
        "scale": args.scale,
        "out_width": args.size and args.size[0],
        "out_height": args.size and args.size[1],
        "model": args.model,
        "format": wanted,
        "device": args.device,
        "priority": args.priority,
        "share": args.share,
    }


@contextlib.contextmanager
def enlarged(
    client: Client, picture: int, settings: dict[str, Any]
) -> Iterator[tuple[dict[str, Any], int]]:
    """Enlarges the picture in a sealed memfd: what the daemon says of it, and the memfd of the
    result.
    """
    meter = output.Progress("upscaling")
    progress, result = client.upscale(picture, settings)
    try:
        end: dict[str, Any] = {}
        for event in progress:
            if event.get("type") == "progress":
                done, total = float(event.get("done", 0)), float(event.get("total", 0))
                meter.update(done, total or None, "tiles")
            else:
                end = event
        meter.clear()
        yield end, result
    finally:
        meter.clear()
        progress.close()
        os.close(result)


def enlarge_picture(
    args: argparse.Namespace, source: int, seen: bytes, wanted: str, target: Target
) -> dict[str, Any]:
    """Enlarges the picture; returns the object of `--json upscale`, with one frame."""
    picture = sealed_copy(source, seen)
    settings = {
        **wishes(args, wanted),
        "tile": args.tile,
        "overlap": args.overlap,
        "tile_map": bool(args.debug_tiles),
        "precision": args.precision,
    }
    began = time.monotonic()
    try:
        with common.client(args) as client:
            with enlarged(client, picture, settings) as (end, result):
                copy(result, target)
            width, height = int(end.get("width", 0)), int(end.get("height", 0))
            device = str(end.get("device", ""))
            ms = round(float(end.get("ms", 1000 * (time.monotonic() - began))), 3)
            return {
                "frames": 1,
                "width": width,
                "height": height,
                "scale": None if args.size else common.number(args.scale),
                "model": end.get("model") or args.model or common.default_model(client, "video"),
                "device": device,
                "device_name": end.get("device_name") or common.device_name(client, device),
                "fps": round(1000 / ms, 3) if ms > 0 else 0.0,
                "ms_p50": ms,
                "ms_p99": ms,
                "tiles": end.get("tiles", 0),
                "tiles_reused": 0,
                "tiles_fallback": end.get("tiles_fallback", 0),
                "restarts": end.get("restarts", 0),
                "precision": end.get("precision", ""),
                "format": end.get("format", wanted),
                **({"tile_map": str(end.get("tile_map", ""))} if args.debug_tiles else {}),
            }
    finally:
        os.close(picture)


def copy(memory: int, target: Target) -> None:
    """What a memfd holds to the output."""
    offset = 0
    while piece := os.pread(memory, _PIECE, offset):
        target.write([memoryview(piece)])
        offset += len(piece)
