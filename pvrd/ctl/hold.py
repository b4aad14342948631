# SPDX-License-Identifier: Apache-2.0
"""Keeps the GPU free of pvrd's work and memory while a command runs, or until Ctrl-C."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from typing import TYPE_CHECKING

from pvrd.ctl import common, errors, output

if TYPE_CHECKING:
    import argparse

    from pvrd.client import Client

FREE_S = 5.0  # for the GPU's memory to be given back before the command starts
NOT_FOUND, NOT_EXECUTABLE = 127, 126  # as shells say it
# What is passed on to the command; SIGCHLD tells that it ended.
_PASSED = (
    signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2,
    signal.SIGALRM, signal.SIGWINCH,
)  # fmt: skip
_BY_KERNEL = 0x80  # si_code of a signal that a terminal sent: the command got it, too


def arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `pvrctl hold`."""
    import argparse

    parser.usage = "pvrctl hold [--reason TEXT] [-- COMMAND …]"
    parser.add_argument("--reason", metavar="TEXT", help="why, for all to see (the command's name)")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="what to run meanwhile")


def run(args: argparse.Namespace) -> int:
    """Runs `pvrctl hold`: the exit status of the command, 128 and the number for a signal."""
    command = args.command[1:] if args.command[:1] == ["--"] else args.command
    reason = args.reason or (os.path.basename(command[0]) if command else "pvrctl hold")
    with common.client(args) as client:
        pid = _gpu_pid(client)
        fd = client.hold(_printable(reason).strip()[:128] or "pvrctl hold")
        try:
            _wait_free(client, pid)
            return _follow(fd, command) if command else _wait(fd, args.json)
        finally:
            os.close(fd)


def _printable(text: str) -> str:
    return "".join(c if c.isprintable() else " " for c in text)


def _gpu_pid(client: Client) -> int:
    """The process of the GPU worker, 0 without one."""
    devices = client.properties()["Devices"]
    return next((int(d.get("pid", 0)) for d in devices if d.get("kind") == "gpu"), 0)


def _wait_free(client: Client, pid: int) -> None:
    """Waits until the GPU worker, `pid` before the hold, and so its memory is gone."""
    end = time.monotonic() + FREE_S
    while time.monotonic() < end:
        now = _gpu_pid(client)
        pid = now or pid
        if not now and not (pid and os.path.exists(f"/proc/{pid}")):
            return
        time.sleep(0.02)
    output.warn(f"The GPU is not free yet after {FREE_S:g} s.")


def _gone(fd: int, over: threading.Event) -> None:
    """Waits for the daemon's end of the hold to be closed, and says so unless it is `over`: then
    the daemon closed it because we leave. For a thread."""
    os.set_blocking(fd, True)
    try:
        while os.read(fd, 64):
            pass
    except OSError:
        return
    if not over.is_set():
        output.warn("The GPU is not held any more: pvrd ended.")


def _wait(fd: int, as_json: bool) -> int:
    """Holds until a signal comes or the daemon ends."""
    import select

    # A signal that comes just before select() is seen by its pipe.
    woken, wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    before = signal.set_wakeup_fd(wake)
    try:
        if not as_json:
            output.warn("The GPU is kept free; Ctrl-C ends it.")
        while fd not in select.select([fd, woken], [], [])[0]:
            os.read(woken, 64)
    except KeyboardInterrupt:
        return errors.OK
    finally:
        signal.set_wakeup_fd(before)
        os.close(wake)
        os.close(woken)
    raise errors.CtlError("The GPU is not held any more: pvrd ended.", errors.NO_DAEMON, "NoDaemon")


def _follow(fd: int, command: list[str]) -> int:
    """Runs the command to its end and passes signals on."""
    import subprocess

    watched = {*_PASSED, signal.SIGCHLD}
    over = threading.Event()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, watched)
    try:
        try:
            # One thread yet: the function runs alone in the child.
            child = subprocess.Popen(
                command, preexec_fn=lambda: signal.pthread_sigmask(signal.SIG_SETMASK, before)
            )
        except OSError as error:
            missing = isinstance(error, FileNotFoundError)
            text = f"{output.plain(command[0])} cannot be run: {os.strerror(error.errno or 0)}."
            raise errors.CtlError(text, NOT_FOUND if missing else NOT_EXECUTABLE) from error
        threading.Thread(target=_gone, args=(os.dup(fd), over), daemon=True).start()
        while child.poll() is None:
            told = signal.sigwaitinfo(watched)
            if told.si_signo != signal.SIGCHLD and told.si_code != _BY_KERNEL:
                child.send_signal(told.si_signo)
    finally:
        over.set()
        sys.stdout.flush()
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return child.returncode if child.returncode >= 0 else 128 - child.returncode
