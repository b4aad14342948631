# SPDX-License-Identifier: Apache-2.0
"""Has the bus start pvrd, on behalf of another program: `python -m pvrd.activate ADDRESS`.

A bus writes the command line of whoever makes it start a service into the journal. That of pvrctl
may hold a prompt, which must not lie there; this program's holds nothing.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys

from pvrd.bus import BUS, BUS_PATH, BusAddress, BusError, Connection

NAME = "org.pvrd.Pvrd1"
START_S = 30.0


def activate(address: str) -> None:
    """Runs this module. That the start failed shows in the call that comes next."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    command = [sys.executable, "-m", "pvrd.activate", address]
    subprocess.run(
        command, env=env, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False
    )


async def _start(address: str) -> None:
    connection = await Connection.connect(BusAddress.parse(address))
    await connection.call(
        BUS, BUS_PATH, BUS, "StartServiceByName", "su", [NAME, 0], timeout=START_S
    )
    connection.close()


def main(argv: list[str]) -> int:
    """0 when pvrd has its name."""
    try:
        asyncio.run(_start(argv[1]))
    except (BusError, OSError, KeyboardInterrupt):
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))
