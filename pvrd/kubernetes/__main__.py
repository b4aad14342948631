# SPDX-License-Identifier: Apache-2.0
"""pvrd-device-plugin: offers shares of a node's pvrd to pods."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import re
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from pvrd.bus import BusAddress, BusError
from pvrd.errors import StartError

if TYPE_CHECKING:
    from pvrd.kubernetes.plugin import Resource

FOLDER = "/var/lib/kubelet/device-plugins"
PODS = "/run/pvrd-device-plugin"
DEFAULT = "pvrd.org/gpu=4"
_RESOURCE = re.compile(
    r"(?P<name>[a-z0-9]([a-z0-9.-]*[a-z0-9])?/[A-Za-z0-9]([\w.-]{0,40}[A-Za-z0-9])?)"
    r"=(?P<shares>\d{1,3})(,priority=(?P<priority>\d{1,2}))?"
)


def _arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="pvrd-device-plugin",
        description="Offers shares of this node's pvrd to pods, as a device plugin of kubelet's.",
        epilog="See docs/kubernetes.md.",
    )
    parser.add_argument("--bus", default=os.environ.get("PVRD_BUS") or "system", metavar="BUS")
    parser.add_argument(
        "--resource", action="append", metavar="NAME=SHARES[,priority=P]",
        help=f"what pods can ask for, again for more (default {DEFAULT}; priority 5, at most 11)",
    )  # fmt: skip
    parser.add_argument(
        "--uids", type=int, metavar="FIRST",
        help="each share is a user of its own for pvrd, from this number on (needs root)",
    )  # fmt: skip
    parser.add_argument(
        "--cpu", action="store_true", help="a pvrd that works on the CPU is healthy, too"
    )
    parser.add_argument("--kubelet", type=Path, default=Path(FOLDER), metavar="FOLDER")
    parser.add_argument("--pods", type=Path, default=Path(PODS), metavar="FOLDER")
    return parser


def resources(texts: list[str]) -> list[Resource]:
    """What the options ask for. All shares of all resources are equal parts of the GPU's time.

    Raises:
        StartError: an option that makes no sense.
    """
    from pvrd.kubernetes.plugin import Resource

    found = []
    for text in texts:
        match = _RESOURCE.fullmatch(text)
        shares = int(match["shares"]) if match else 0
        priority = int(match["priority"] or 5) if match else 0
        if match is None or not 1 <= shares <= 100 or priority > 11:
            raise StartError(f"{text!r} is no NAME=SHARES[,priority=P], 1-100 shares, P 0-11")
        found.append((match["name"], shares, priority))
    total = sum(shares for _, shares, _ in found)
    if total > 100 or len({name for name, _, _ in found}) < len(found):
        raise StartError("the resources have more than 100 shares in all, or one name twice")
    made, first = [], 0
    for name, shares, priority in found:
        made.append(Resource(name, shares, priority, 100 // total, first))
        first += shares
    return made


async def _run(args: argparse.Namespace) -> None:
    from pvrd.kubernetes.health import Health
    from pvrd.kubernetes.plugin import Plugin, serve
    from pvrd.kubernetes.pods import Pods

    wanted = resources(args.resource or [DEFAULT])
    address = BusAddress.parse(args.bus)
    if not args.kubelet.is_dir():
        raise StartError(f"there is no folder {args.kubelet}; does kubelet run here?")
    if args.uids is not None and (os.getuid() != 0 or not 0 < args.uids < 1 << 31):
        raise StartError("--uids needs root, and a number from 1 on")
    health = Health(address, ("gpu", "cpu") if args.cpu else ("gpu",))
    pods = Pods(args.pods, address.address, args.uids)
    pods.restore()
    work = asyncio.ensure_future(
        serve([Plugin(each, pods, health, args.kubelet) for each in wanted], health)
    )
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, work.cancel)
    try:
        with contextlib.suppress(asyncio.CancelledError):
            await work
    finally:
        pods.close()


def main() -> int:
    """The program. Exit codes: 0; 1 it cannot start, or kubelet refuses; 2 usage."""
    args = _arguments().parse_args()
    try:
        asyncio.run(_run(args))
    except ImportError as error:
        name = error.name or "grpcio"
        print(
            f"pvrd-device-plugin: {name} is not installed; pip install 'pvrd[kubernetes]'",
            file=sys.stderr,
        )
        return 1
    except (StartError, BusError) as error:
        print(f"pvrd-device-plugin: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
