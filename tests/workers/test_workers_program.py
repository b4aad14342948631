# SPDX-License-Identifier: Apache-2.0
"""The worker program's beginning and end: hello, no device, lost device, nonsense from pvrd."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from pvrd.workers import __main__ as program
from pvrd.workers import protocol
from pvrd.workers.devices import cores
from tests.workers.conftest import ROOT, WAIT_S, Peer

Start = Callable[..., Peer]


def test_hello(peer: Start) -> None:
    worker = peer("cpu", threads=1)
    assert worker.hello["protocol"] == 1
    assert worker.hello["pid"] == worker.process.pid
    device = worker.hello["device"]
    assert (device["kind"], device["software"], device["properties"]["threads"]) == ("cpu", True, 1)
    assert worker.hello["reason"] == ""
    assert worker.close() == (0, "")


def test_without_a_device_it_says_why_and_waits_for_the_end(peer: Start) -> None:
    worker = peer("gpu", faults=["gpu:no_device"])
    assert worker.hello["device"] is None
    assert worker.hello["reason"]
    assert worker.hello["code"] == "failed"
    worker.send("ping", n=5)
    assert worker.expect("pong")["n"] == 5
    worker.send("stats")
    worker.send("ping", n=6)
    assert worker.recv() == {"t": "pong", "n": 6}
    assert worker.close() == (0, "")


def test_malformed_fault_is_no_device(peer: Start) -> None:
    worker = peer("cpu", faults=["cpu:melt"])
    assert worker.hello["device"] is None
    assert worker.hello["reason"].startswith("the device could not be opened: ")
    assert "melt" in worker.hello["reason"]


@pytest.mark.parametrize("fault", ["device_lost:9", "nan:9"])
def test_lost_device_is_told_and_is_the_end(peer: Start, tiny: Path, fault: str) -> None:
    worker = peer("cpu", threads=1, faults=[f"cpu:{fault}"])
    worker.load(tiny)
    worker.text("1", "Hello", max_tokens=20)
    tokens = worker.until("dying")
    assert tokens.pop()["reason"]
    assert [m["n"] for m in tokens if m["t"] == "text.token"] == list(range(8))
    status, err = worker.ended()
    assert status == 1
    assert "Traceback" not in err
    assert "Hello" not in err


def test_exit_in_the_middle_is_an_end_of_file(peer: Start, tiny: Path) -> None:
    worker = peer("cpu", threads=1, faults=["cpu:exit:3"])
    worker.load(tiny)
    worker.text("1", "Hello", max_tokens=20)
    assert worker.ended()[0] == 9


def test_stuck_device_shows_as_silence(peer: Start, tiny: Path) -> None:
    worker = peer("cpu", threads=1, faults=["cpu:hang:3"])
    worker.load(tiny)
    worker.text("1", "Hello", max_tokens=20)
    worker.expect("text.token", n=1)
    worker.sock.settimeout(0.3)
    try:
        # What it said before it was stuck may still come.
        with contextlib.suppress(TimeoutError):
            while worker.recv():
                worker.send("ping", n=1)
        worker.send("ping", n=2)
        with pytest.raises(TimeoutError):
            worker.recv()
    finally:
        worker.process.kill()


def test_successor_has_no_faults(peer: Start, tiny: Path) -> None:
    worker = peer("cpu", generation=2, threads=1, faults=["cpu:exit:3"])
    worker.load(tiny)
    worker.text("1", "Hello", max_tokens=20)
    assert len(worker.answer("1")) == 21


def test_unknown_messages_are_passed_over(peer: Start) -> None:
    worker = peer()
    worker.send("dance", how="well")
    worker.send("ping", n=1)
    assert worker.recv() == {"t": "pong", "n": 1}


def test_nonsense_ends_it(peer: Start) -> None:
    worker = peer()
    protocol.send_raw(worker.sock, b"nonsense")
    status, err = worker.ended()
    assert status == 3
    assert "Traceback" not in err


def test_pings_are_answered_while_a_model_loads(peer: Start, tiny: Path) -> None:
    worker = peer()
    with tiny.open("rb") as f:
        for n in range(3):
            worker.send("load", [f.fileno()], model=f"m{n}", name="tiny", kind="text", cache="")
            worker.send("ping", n=n)
    pongs = [worker.expect("pong")["n"] for _ in range(3)]
    assert pongs == [0, 1, 2]


def run(*arguments: str, **options: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "pvrd.workers", *arguments],
        cwd=ROOT, capture_output=True, text=True, timeout=WAIT_S, check=False, **options,
    )  # fmt: skip


def test_wrong_calls() -> None:
    assert run().returncode == 2
    assert run("--kind", "tpu").returncode == 2
    done = run("--kind", "cpu")
    assert done.returncode == 2
    assert "pvrd starts this program" in done.stderr
    assert run("--kind", "cpu", "--fd", "0", stdin=subprocess.DEVNULL).returncode == 2


@pytest.mark.parametrize(
    "hello",
    [
        {"t": "ping", "n": 1},
        {"t": "hello", "protocol": 2, "kind": "cpu", "config": {}},
        {"t": "hello", "protocol": 1, "kind": "gpu", "config": {}},
    ],
)
def test_another_hello_is_refused(hello: dict[str, object]) -> None:
    ours, theirs = protocol.pair()
    with ours, theirs:
        protocol.send(ours, hello)
        done = run("--kind", "cpu", "--fd", str(theirs.fileno()), pass_fds=[theirs.fileno()])
    assert done.returncode == 3
    assert "Traceback" not in done.stderr


def test_socket_from_systemd() -> None:
    ours, theirs = protocol.pair()
    # What systemd does for Accept=yes: the socket is fd 3, and LISTEN_PID the program's.
    shell = 'exec 3<&"$1" && LISTEN_PID=$$ LISTEN_FDS=1 exec "$0" -m pvrd.workers --kind cpu'
    process = subprocess.Popen(
        ["/bin/bash", "-c", shell, sys.executable, str(theirs.fileno())],
        cwd=ROOT,
        pass_fds=[theirs.fileno()],
    )
    theirs.close()
    with ours:
        ours.settimeout(WAIT_S)
        protocol.send(ours, {"t": "hello", "protocol": 1, "kind": "cpu", "config": {"threads": 1}})
        received = protocol.recv(ours)
        assert received is not None
        assert received.message["pid"] == process.pid
    assert process.wait(WAIT_S) == 0


def test_threads() -> None:
    allowed = len(os.sched_getaffinity(0))
    assert cores({"threads": 1}).threads == 1
    assert cores({"threads": 1000}).threads == allowed
    assert 1 <= cores({}).threads <= allowed
    assert cores({"threads": 0, "reserve": 1}) == cores({})


@pytest.mark.parametrize(("cpus", "threads"), [({0}, "1"), ({0, 1}, "1")])
def test_a_gpu_in_software_leaves_a_core_free(
    cpus: set[int], threads: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two, which the CPU's worker may both have, too."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: cpus)
    monkeypatch.setattr(os, "environ", {})
    program._environment("gpu", {})
    assert os.environ["LP_NUM_THREADS"] == threads
