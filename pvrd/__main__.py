# SPDX-License-Identifier: Apache-2.0
"""pvrd --bus user|system|ADDRESS --config FILE: the daemon.

Exit status: 0 after SIGTERM, 1 when it cannot start or loses the bus, 2 for a wrong call.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import sys
from collections.abc import Sequence
from pathlib import Path

from pvrd import __version__, systemd
from pvrd.daemon import serve
from pvrd.errors import StartError
from pvrd.objects import where
from pvrd.promptness import stand_in_front


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the daemon; the exit status."""
    parser = argparse.ArgumentParser(
        prog="pvrd", description="Serves text and video models on the GPU or the CPU over D-Bus."
    )
    parser.add_argument(
        "--bus", default="user", metavar="BUS",
        help="user (the default), system, or the address of a private bus (unix:path=…)",
    )  # fmt: skip
    parser.add_argument(
        "--config", type=Path, metavar="FILE", help="instead of the usual configuration files"
    )
    parser.add_argument("--version", action="version", version=f"pvrd {__version__}")
    args = parser.parse_args(argv)
    gc.freeze()  # what is there now stays: no need to look at it again
    stand_in_front()
    try:
        return asyncio.run(serve(args.bus, args.config))
    except StartError as e:
        systemd.log(systemd.ERROR, str(e))
    except KeyboardInterrupt:
        return 130
    except Exception as e:
        systemd.log(systemd.ERROR, f"pvrd met a fault of its own: {where(e)}")
    return 1


if __name__ == "__main__":
    sys.exit(main())
