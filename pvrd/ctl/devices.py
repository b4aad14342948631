# SPDX-License-Identifier: Apache-2.0
"""Lists the devices that do the work, one worker each."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from pvrd.ctl import common, errors, output

if TYPE_CHECKING:
    import argparse


def arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `pvrctl devices`."""
    parser.add_argument(
        "-v", "--verbose", action="store_true", help="features, limits and properties too"
    )


def run(args: argparse.Namespace) -> int:
    """Runs `pvrctl devices`."""
    with common.client(args) as client:
        devices = client.properties().get("Devices", [])
    if args.json:
        output.emit_json(devices)
        return errors.OK
    rows = [
        [
            str(device.get("kind", "")),
            str(device.get("state", "")),
            str(device.get("pid") or "-"),
            str(device.get("generation", "")),
            str(device.get("name") or "-"),
            str(device.get("driver") or "-"),
        ]
        for device in devices
    ]
    sys.stdout.write(
        output.plain(output.table(rows, ("DEVICE", "STATE", "PID", "GENERATION", "NAME", "DRIVER")))
    )
    for device in devices:
        if device.get("reason"):
            sys.stdout.write(output.plain(f"\n{device['kind']}: {device['reason']}\n"))
        if args.verbose:
            sys.stdout.write(output.plain("\n" + details(device)))
    return errors.OK


def details(device: dict[str, Any]) -> str:
    """Features, limits and properties, a line each."""
    features = ", ".join(map(str, device.get("features", []))) or "none"
    lines = [f"{device.get('kind', '')} features: {features}"]
    for group in ("limits", "properties"):
        for key, value in sorted(device.get(group, {}).items()):
            lines.append(f"{device.get('kind', '')} {group}.{key}: {value}")
    return "\n".join(lines) + "\n"
