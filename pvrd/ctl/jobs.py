# SPDX-License-Identifier: Apache-2.0
"""Lists your sessions and jobs: what they are, where they run, at which place they wait."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pvrd.ctl import common, errors, output

if TYPE_CHECKING:
    import argparse

HEAD = ("SESSION", "JOB", "KIND", "MODEL", "DEVICE", "PRI", "SHARE", "STATE", "DONE", "TIME")


def arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `pvrctl jobs`."""
    parser.add_argument("-a", "--all", action="store_true", help="those of all users")


def run(args: argparse.Namespace) -> int:
    """Runs `pvrctl jobs`."""
    with common.client(args) as client:
        found = client.jobs(args.all)
    if args.json:
        output.emit_json(found)
    elif found:
        sys.stdout.write(words(found, args.all))
    else:
        sys.stdout.write("No sessions and no jobs.\n")
    return errors.OK


def words(found: Sequence[Mapping[str, Any]], whose: bool = False) -> str:
    """The table for people; `whose`: with the users' numbers."""
    rows = [[*row(job), *([str(job.get("uid", ""))] if whose else [])] for job in found]
    return output.plain(output.table(rows, (*HEAD, "UID") if whose else HEAD))


def row(job: Mapping[str, Any]) -> list[str]:
    """A job or session in cells."""
    state = str(job.get("state", ""))
    if position := job.get("position"):
        state += f" (place {position})"
    share, frames, tokens = (int(job.get(key, 0)) for key in ("share", "frames", "tokens"))
    done = f"{frames} frames" if frames else f"{tokens} tokens" if tokens else "-"
    return [
        str(job.get("session", "")).rpartition("/")[2] or "-",
        str(job.get("job") or "-"),
        str(job.get("kind", "")),
        str(job.get("model", "")),
        str(job.get("device") or "-"),
        str(job.get("priority", "")),
        f"{share} %" if share else "-",
        state,
        done,
        f"{float(job.get('seconds', 0.0)):.1f} s",
    ]
