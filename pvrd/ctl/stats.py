# SPDX-License-Identifier: Apache-2.0
"""Shows the counters of the daemon and of its devices."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from pvrd.ctl import common, errors, output

if TYPE_CHECKING:
    import argparse


def arguments(parser: argparse.ArgumentParser) -> None:
    """`pvrctl stats` has the global options alone."""


def run(args: argparse.Namespace) -> int:
    """Runs `pvrctl stats`."""
    with common.client(args) as client:
        counters = client.statistics()
    if args.json:
        output.emit_json(counters)
    else:
        sys.stdout.write(output.plain(output.table(list(rows(counters)))))
    return errors.OK


def rows(counters: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """The counters flat: `jobs.running`, 3; bytes and seconds with their unit."""
    for key, value in counters.items():
        name = prefix + key
        if key == "sensors":
            continue  # `pvrctl status` shows them
        if isinstance(value, dict):
            yield from rows(value, name + ".")
        elif isinstance(value, float):
            yield name, f"{value:.3f}".rstrip("0").rstrip(".")
        elif (
            isinstance(value, int)
            and not isinstance(value, bool)
            and ("bytes" in key or key == "rss")
        ):
            yield name, f"{value} ({output.size(value)})"
        else:
            yield name, str(value)
