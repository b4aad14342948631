# SPDX-License-Identifier: Apache-2.0
"""pvr-agent --bus user|system|ADDRESS --every S --window: tells pvrd how the compositor fares.

Exit status: 0 after SIGTERM, 1 without a bus or when it is lost, 2 for a wrong call.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from collections.abc import Sequence

from pvrd import __version__, systemd
from pvrd.agent.program import serve
from pvrd.errors import StartError
from pvrd.objects import where


def _seconds(text: str) -> float:
    value = float(text)
    if not 0.2 <= value <= 60:
        raise argparse.ArgumentTypeError("0.2 to 60 seconds")
    return value


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the agent; the exit status."""
    parser = argparse.ArgumentParser(
        prog="pvr-agent",
        description="Measures refreshes that this session's compositor misses, and tells pvrd.",
    )
    parser.add_argument(
        "--bus", default=os.environ.get("PVRD_BUS") or "system", metavar="BUS",
        help="where pvrd is: system (the default), user, or an address (unix:path=…)",
    )  # fmt: skip
    parser.add_argument(
        "--every", type=_seconds, default=3.0, metavar="S",
        help="seconds from one measurement to the next while pvrd works (3)",
    )  # fmt: skip
    parser.add_argument(
        "--window", action="store_true",
        help="allow a window of one transparent pixel where the compositor has no layer shell",
    )  # fmt: skip
    parser.add_argument("--version", action="version", version=f"pvr-agent {__version__}")
    args = parser.parse_args(argv)
    try:
        return asyncio.run(serve(args.bus, args.every, args.window))
    except StartError as e:
        systemd.log(systemd.ERROR, str(e))
    except KeyboardInterrupt:
        return 130
    except Exception as e:
        systemd.log(systemd.ERROR, f"pvr-agent met a fault of its own: {where(e)}")
    return 1


if __name__ == "__main__":
    sys.exit(main())
