# SPDX-License-Identifier: Apache-2.0
"""A client that behaves badly: python -m tests.faults.rude BUS HOW STATE, with the asks as JSON on
standard input. It says `there` when it is in the middle of its work, and does then what HOW says:
`sit` (to be killed), `deaf` (reads no more) or `garbage` (on every fd that it has). After that it
says `did` and sleeps until it is killed.
"""

from __future__ import annotations

import array
import contextlib
import fcntl
import json
import mmap
import os
import random
import signal
import socket
import sys

from pvrd.client import Client
from pvrd.errors import PvrdError
from tests.faults.work import BY_NAME, Ask, Work

F_SETPIPE_SZ, F_ADD_SEALS, SEAL_SHRINK = 1031, 1033, 2


def main() -> None:
    bus, how, name = sys.argv[1:]
    asks = [Ask(*ask) for ask in json.loads(sys.stdin.readline())]
    client = Client(bus)
    work = Work(client, BY_NAME[name], asks)
    work.open()
    if work.state.running:
        work.start(**({"top5": True, "logprobs": 20} if how == "deaf" else {}))
        if how == "deaf":
            for text in work.texts:
                fcntl.fcntl(text.fd, F_SETPIPE_SZ, 4096)
        work.follow(work.begun)
    print("there", flush=True)
    if how == "garbage":
        garbage(client, work)
    print("did", flush=True)
    while True:
        signal.pause()


def garbage(client: Client, work: Work) -> None:
    """Noise into everything: pipes, sockets, rings, files that are handed over, the bus itself."""
    draw = random.Random(1)
    noise = [draw.randbytes(n) for n in (1, 63, 64, 65, 4096)]
    for text in work.texts:
        for data in noise:
            with contextlib.suppress(OSError):
                os.write(text.fd, data)
    for video in work.videos:
        for slot in range(video.video.slots):
            for piece in (p for plane in video.video.output(slot) for p in plane):
                piece[:] = draw.randbytes(len(piece))
        sock = video.video._socket
        fds = array.array("i", [0, 1, 2])
        for data in noise:
            with contextlib.suppress(OSError):
                sock.sendmsg([data], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fds)])
            with contextlib.suppress(OSError):
                sock.send(data)
    for size in (0, 100, 1 << 20):
        fd = os.memfd_create("noise", os.MFD_ALLOW_SEALING)
        os.write(fd, draw.randbytes(size))
        for seals in (0, SEAL_SHRINK):
            fcntl.fcntl(fd, F_ADD_SEALS, seals)
            with contextlib.suppress(PvrdError):
                progress, result = client.upscale(fd, {})
                os.close(result)
                list(progress)
            with contextlib.suppress(PvrdError):
                list(client.add_model(fd, "noise", {}))
        os.close(fd)
    with contextlib.suppress(PvrdError):
        held = client.hold("noise")
        with contextlib.suppress(OSError):
            os.write(held, noise[2])
        with contextlib.suppress(OSError, ValueError):
            mmap.mmap(held, 64)
        os.close(held)
    connection = client._connection
    assert connection is not None
    with contextlib.suppress(OSError):
        connection._wire._sock.send(noise[4])


if __name__ == "__main__":
    main()
