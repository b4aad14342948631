# SPDX-License-Identifier: Apache-2.0
"""A device has one holder: the second says who; a successor waits for its predecessor's end."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from pvrd.workers import devices, holder

ROOT = Path(__file__).resolve().parents[2]

# Locks the node named on its command line and says so; ends when its input does.
_HOLD = """
import sys
from pvrd.workers import holder
print(holder.claim([sys.argv[1]], 0.0), flush=True)
sys.stdin.read()
"""


def hold(node: Path) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", _HOLD, str(node)],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "\n"
    return process


def end(process: subprocess.Popen[str]) -> None:
    process.communicate()


def test_the_second_names_the_first(tmp_path: Path) -> None:
    node = tmp_path / "renderD128"
    node.touch()
    first = hold(node)
    reason = holder.claim([str(node)], 0.0)
    assert reason in (
        f"another pvrd (process {first.pid}) holds {node}",
        f"another pvrd holds {node}",  # where the kernel hides the locks of others
    )
    end(first)
    assert holder.claim([str(node)], 30.0) == ""


def test_a_successor_waits(tmp_path: Path) -> None:
    node = tmp_path / "renderD128"
    node.touch()
    first = hold(node)
    first.kill()  # no wait in between: the successor may be sooner than the kernel
    assert holder.claim([str(node)], 30.0) == ""
    end(first)


def test_a_node_that_cannot_be_opened_holds_nobody_off(tmp_path: Path) -> None:
    assert holder.claim([str(tmp_path / "none")], 0.0) == ""


def test_nodes_of_one_device_alone(tmp_path: Path) -> None:
    targets = [
        "/dev/dri/renderD129",
        "/dev/nvidia0",
        "/dev/nvidiactl",
        "/dev/dri/card0",
    ]
    for i, target in enumerate(targets):
        (tmp_path / str(i)).symlink_to(target)
    assert holder.open_nodes(tmp_path) == {"/dev/dri/renderD129", "/dev/nvidia0"}


def test_a_worker_tells_of_the_holder(monkeypatch, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    """The backend is closed again and the code is doctor's."""
    closed = []

    class Backend:
        def __init__(self, **_: object) -> None:
            pass

        def close(self) -> None:
            closed.append(self)

    node = tmp_path / "renderD128"
    node.touch()
    first = hold(node)
    monkeypatch.setattr("engine.backends.vulkan.VulkanBackend", Backend)
    monkeypatch.setattr(holder, "open_nodes", lambda: {str(node)})
    monkeypatch.setattr(holder, "WAIT_S", 0.0)
    opened = devices.open_device("gpu", {})
    end(first)
    assert (opened.backend, opened.code) == (None, "busy")
    assert "another pvrd" in opened.reason
    assert len(closed) == 1
