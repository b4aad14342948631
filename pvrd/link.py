# SPDX-License-Identifier: Apache-2.0
"""A worker's process and the socket to it: executed here, or a unit that systemd starts."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import signal
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pvrd import beside
from pvrd.errors import DeviceLost
from pvrd.workers import protocol

MAX_QUEUE = 4096  # messages that a worker has not read
MESSAGES_A_TURN = 64
STARTED_S = 30.0  # for the kernel to execute a worker's program


class Link:
    """The pvrd end of the worker protocol.

    `on_message` gets each message (fds that it does not take are closed), `on_end` one sentence
    when the worker is gone or talks nonsense; nothing comes after that.
    """

    def __init__(
        self,
        sock: socket.socket,
        on_message: Callable[[protocol.Received], None],
        on_end: Callable[[str], None],
    ) -> None:
        self._sock = sock
        self._on_message = on_message
        self._on_end = on_end
        self._queue: deque[tuple[bytes, list[int], str]] = deque()
        self._loop = asyncio.get_running_loop()
        self._open = True
        sock.setblocking(False)
        self._loop.add_reader(sock, self._readable)

    def send(self, message: Mapping[str, Any], fds: Sequence[int] = (), lane: str = "") -> None:
        """Queues a message; `fds` are duplicated at once and stay the caller's. The copies are
        closed in the lane where there is one: on some file systems a close waits for a server."""
        if not self._open:
            return
        if len(self._queue) >= MAX_QUEUE:
            self._loop.call_soon(self._end, "it does not read")
            return
        data = protocol.encode(message)
        copies: list[int] = []
        try:
            for fd in fds:
                copies.append(os.dup(fd))
        except OSError:
            _close(copies)
            raise
        self._queue.append((data, copies, lane))
        if len(self._queue) == 1:
            self._flush()

    def close(self) -> None:
        """Ends the connection, which ends the worker; no on_end."""
        if not self._open:
            return
        self._open = False
        self._loop.remove_reader(self._sock)
        self._loop.remove_writer(self._sock)
        self._sock.close()
        for _, fds, lane in self._queue:
            _close(fds, lane)
        self._queue.clear()

    def _end(self, reason: str) -> None:
        if self._open:
            self.close()
            self._on_end(reason)

    def _flush(self) -> None:
        while self._queue:
            data, fds, lane = self._queue[0]
            try:
                protocol.send_raw(self._sock, data, fds)
            except (BlockingIOError, InterruptedError):
                self._loop.add_writer(self._sock, self._flush)
                return
            except OSError:
                # What it said before it died still counts: the reader sees the end of file.
                self._loop.remove_writer(self._sock)
                for _, left, where in self._queue:
                    _close(left, where)
                self._queue.clear()
                return
            _close(fds, lane)
            self._queue.popleft()
        self._loop.remove_writer(self._sock)

    def _readable(self) -> None:
        for _ in range(MESSAGES_A_TURN):
            try:
                received = protocol.recv(self._sock)
            except (BlockingIOError, InterruptedError):
                return
            except protocol.ProtocolError as e:
                self._end(f"it talks nonsense: {e}")
                return
            except OSError as e:
                self._end(f"the socket failed: {e.strerror}")
                return
            if received is None:
                self._end("it ended")
                return
            try:
                self._on_message(received)
            finally:
                received.close()
            if not self._open:
                return


def _close(fds: list[int], lane: str = "") -> None:
    for fd in fds:
        if lane:
            beside.sure(lane, functools.partial(os.close, fd))
        else:
            os.close(fd)
    fds.clear()


class Process:
    """A worker's process, by pidfd: a signal never meets another process of the same number."""

    def __init__(self, pid: int, child: subprocess.Popen[bytes] | None) -> None:
        self.pid = pid
        self._child = child
        self._loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[str] = self._loop.create_future()
        try:
            self._pidfd = os.pidfd_open(pid)
        except OSError:
            self._pidfd = -1
            self._settle("it ended")
            return
        self._loop.add_reader(self._pidfd, self._exited)

    def kill(self) -> None:
        """SIGKILL; no error when it is gone."""
        if self._pidfd >= 0:
            with contextlib.suppress(OSError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def forget(self) -> None:
        """Stops watching; for the end of the daemon."""
        if self._pidfd >= 0:
            self._loop.remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = -1

    def _exited(self) -> None:
        self.forget()
        how = "it ended"
        if self._child is not None:
            code = self._child.wait()
            how = f"it was killed by signal {-code}" if code < 0 else f"it ended with status {code}"
        self._settle(how)

    def _settle(self, how: str) -> None:
        if not self.ended.done():
            self.ended.set_result(how)


async def spawn(kind: str, program: Sequence[str]) -> tuple[socket.socket, Process]:
    """Executes the worker program with one end of a socketpair; beside the loop, since it takes
    until the kernel has read the program and found a CPU for it.

    Raises:
        DeviceLost: it cannot be executed. Timeout: nor in STARTED_S.
    """
    what = "the program of the worker"
    made = await beside.ask(
        f"{kind} worker", what, lambda: _executed(kind, program), _undone, STARTED_S
    )
    return made[0], Process(made[1].pid, made[1])


def _undone(made: tuple[socket.socket, subprocess.Popen[bytes]]) -> None:
    """Ends a worker that nobody waits for any more."""
    made[0].close()
    made[1].kill()
    made[1].wait()


def _executed(kind: str, program: Sequence[str]) -> tuple[socket.socket, subprocess.Popen[bytes]]:
    ours, theirs = protocol.pair()
    # -P: the worker is ours, whatever lies in the folder that pvrd was started in.
    command = [*(program or (sys.executable, "-P", "-m", "pvrd.workers"))]
    command += ["--kind", kind, "--fd", str(theirs.fileno())]
    root = str(Path(__file__).resolve().parent.parent)
    path = os.environ.get("PYTHONPATH", "")
    environment = {**os.environ, "PYTHONPATH": f"{root}:{path}" if path else root}
    environment.pop("NOTIFY_SOCKET", None)  # it speaks for itself to nobody
    try:
        child = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()], env=environment,
            start_new_session=True,
        )  # fmt: skip
    except OSError as e:
        ours.close()
        raise DeviceLost(f"{command[0]} cannot be executed: {e.strerror}") from None
    finally:
        theirs.close()
    return ours, child


def connect(path: str) -> socket.socket:
    """Connects to a worker's unit. Its pid comes with its hello, from the kernel (SCM_CREDENTIALS).

    Raises:
        DeviceLost: the socket is not there or full.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        sock.connect(path)
    except OSError as e:
        sock.close()
        raise DeviceLost(f"{path} does not answer: {e.strerror or e}") from None
    return sock
