# SPDX-License-Identifier: Apache-2.0
"""python -m pvrd.workers --kind gpu|cpu [--fd N]: the worker program.

The socket is fd N, or the one that systemd passes to a unit with Accept=yes. Exit status: 0 when
pvrd closed the socket, 1 when the device was lost, 2 for a wrong call, 3 when pvrd does not speak
this protocol.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import logging
import os
import select
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from pvrd.workers import protocol

LISTEN_FD = 3
HELLO_S = 10.0
PR_SET_PDEATHSIG = 1

log = logging.getLogger("pvrd.worker")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a worker until its peer goes away or its device is lost; the exit status."""
    args = _arguments(argv)
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    # Ctrl-C in a terminal reaches the whole process group; pvrd decides when its workers end.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        sock = _socket(args.fd)
    except (OSError, ValueError) as e:
        log.error("pvrd-worker: %s", e)
        return 2
    if args.fd is not None:
        _die_with_parent()
    try:
        hello = _hello(sock, args.kind)
    except protocol.ProtocolError as e:
        log.error("pvrd-worker: %s", e)
        return 3
    if hello is None:
        return 0
    _environment(args.kind, hello["config"])
    # Only now: libgomp and numpy's BLAS read the environment when they are loaded.
    from pvrd.workers.loop import Worker

    return Worker(sock, args.kind, int(hello["generation"]), hello["config"]).run()


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="pvrd-worker",
        description="Runs jobs for pvrd on one device; started by pvrd or systemd.",
    )
    parser.add_argument("--kind", choices=("gpu", "cpu"), required=True)
    parser.add_argument("--fd", type=int, help="connected SOCK_SEQPACKET socket (else systemd's)")
    return parser.parse_args(argv)


def _socket(fd: int | None) -> socket.socket:
    """The socket to pvrd.

    Raises:
        ValueError, OSError: there is none of the right kind.
    """
    if fd is None:
        if os.environ.get("LISTEN_PID") != str(os.getpid()) or os.environ.get("LISTEN_FDS") != "1":
            raise ValueError("no --fd and no socket from systemd; pvrd starts this program")
        fd = LISTEN_FD
    for name in ("LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES"):
        os.environ.pop(name, None)
    os.set_inheritable(fd, False)
    sock = socket.socket(fileno=fd)
    if sock.family != socket.AF_UNIX or sock.type != socket.SOCK_SEQPACKET:
        raise ValueError(f"fd {fd} is no SOCK_SEQPACKET socket")
    sock.setblocking(True)
    return sock


def _die_with_parent() -> None:
    """SIGKILL when pvrd dies: a worker stuck in a driver call would not see the end of file."""
    parent = os.getppid()
    if ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0) != 0:
        return
    if os.getppid() != parent:
        os._exit(0)


def _hello(sock: socket.socket, kind: str) -> Mapping[str, Any] | None:
    """pvrd's hello, None when it went away before.

    Raises:
        ProtocolError: anything else came, or nothing within HELLO_S.
    """
    if not select.select([sock], [], [], HELLO_S)[0]:
        raise protocol.ProtocolError("no hello")
    received = protocol.recv(sock)
    if received is None:
        return None
    received.close()
    hello = received.message
    if hello["t"] != "hello" or hello.get("protocol") != protocol.PROTOCOL:
        raise protocol.ProtocolError("the first message is no hello of protocol 1")
    if hello.get("kind", kind) != kind:
        raise protocol.ProtocolError(f"pvrd wants a {hello['kind']} worker, this is {kind}")
    return {"generation": hello.get("generation", 1), "config": dict(hello.get("config") or {})}


def _environment(kind: str, config: Mapping[str, Any]) -> None:
    from pvrd.workers.devices import cores

    chosen = cores(config)
    if kind == "cpu":
        # Before the first thread: all others inherit it.
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, chosen.cpus)
    os.environ["OMP_NUM_THREADS"] = str(chosen.threads)
    # llvmpipe's, should the GPU be that: else one a CPU, and none is left for the desktop. Of two
    # cores it takes one: the CPU's worker may have both.
    software = max(1, min(chosen.threads, len(os.sched_getaffinity(0)) - 1))
    os.environ.setdefault("LP_NUM_THREADS", str(software))
    # numpy's own BLAS threads would only take cores away from the kernels.
    os.environ["OPENBLAS_NUM_THREADS"] = "1"


if __name__ == "__main__":
    status = main()
    sys.stderr.flush()
    # Without the interpreter's shutdown: exit handlers of a driver that lost its device may hang.
    os._exit(status)
