# SPDX-License-Identifier: Apache-2.0
"""The daemon's start and end: without a GPU, with another configuration, wrongly called, without a
bus, under a service manager.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pvrd import __version__
from pvrd.bus_values import V, plain
from pvrd.config import ConfigError, Paths, load
from tests.buses import started_bus

pytestmark = pytest.mark.bus
ROOT = Path(__file__).resolve().parents[2]


def test_no_gpu(start: Any, callers: Any, lines: Any) -> None:
    start(arguments=["--absent", "no_render_node"])
    caller = callers()
    assert caller.get("State") == "cpu"
    assert caller.get("Reason") == "there is no render node"
    assert caller.get("Devices")[0]["code"] == "no_render_node"
    name, text = caller.fails("OpenText", "a{sv}", [caller.options(device="gpu")])
    assert (name, "render node" in text) == ("DeviceLost", True)
    got = lines(caller.generate(caller.open_text(), "x", max_tokens=3)).rest()
    assert got[-1]["device"] == "cpu"
    facts = plain(caller.call("GetDiagnostics").body[0])
    gpu = next(f for f in facts if f["topic"] == "gpu")
    assert (gpu["status"], gpu["code"]) == ("warning", "no_render_node")
    assert gpu["remedy"]


def test_a_worker_that_never_says_hello(start: Any, callers: Any, lines: Any) -> None:
    start({"deadlines.hello_s": 3.0}, arguments=["--dumb"])  # the CPU worker has as long
    caller = callers()
    assert caller.get("State") == "cpu"
    got = lines(caller.generate(caller.open_text(), "x", max_tokens=3)).rest()
    assert got[-1]["device"] == "cpu"


def test_configuration_over_the_bus(start: Any, callers: Any, lines: Any) -> None:
    daemon = start()
    caller = callers()
    caller.state("gpu")
    session = caller.open_text()
    caller.call("SetConfig", "a{sv}", [{"gpu.enabled": V("b", False)}])
    caller.state("cpu")
    assert "gpu.enabled" in caller.get("Reason")
    assert plain(caller.call("GetConfig").body[0])["gpu.enabled"] is False
    got = lines(caller.generate(session, "still here", max_tokens=3)).rest()
    assert got[-1]["device"] == "cpu"
    # It is kept.
    again = start(folder=daemon.folder)
    caller = callers()
    assert caller.get("State") == "cpu"
    caller.call("SetConfig", "a{sv}", [{"gpu.enabled": V("b", True)}])
    caller.state("gpu")
    assert again.stop() == 0


def test_what_the_configuration_names_in_vain_is_told(
    start: Any, callers: Any, tmp_path: Path
) -> None:
    start({
        "models.text": "fake-x2", "models.video": "gone", "access.accounts": ["0", "no such one"],
        "models.paths": [str(tmp_path), str(tmp_path / "none"), "~/models", __file__],
    })  # fmt: skip
    caller = callers()
    facts = plain(caller.call("GetDiagnostics").body[0])
    told = {f["message"]: f["code"] for f in facts if f["status"] == "warning" and f["remedy"]}
    wanted = {
        "models.text names fake-x2, which is for video": "no_such_model",
        "models.video names gone, which is not there": "no_such_model",
        f"models.paths names {tmp_path}/none: No such file or directory": "no_folder",
        "models.paths names ~/models: No such file or directory": "no_folder",
        f"models.paths names {__file__}: Not a directory": "no_folder",
        "access.accounts names no such one, which is no account here": "no_account",
    }
    assert wanted.items() <= told.items()
    assert not any(f"{tmp_path}:" in message for message in told)
    name, text = caller.fails("OpenText", "a{sv}", [{}])
    assert (name, text.partition(";")[0]) == (
        "UnknownModel", "models.text names fake-x2, which is for video",
    )  # fmt: skip
    assert caller.open_text(model="fake-text")


def test_a_configuration_without_an_end(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="it has more than 1 MiB"):
        load(Paths(tmp_path, tmp_path, tmp_path), Path("/dev/zero"))


def test_hangup_keeps_sessions(start: Any, callers: Any, lines: Any, until: Any) -> None:
    daemon = start()
    caller = callers()
    caller.state("gpu")
    session = caller.open_text()
    config = daemon.folder / "pvrd.toml"
    good = config.read_text()
    config.write_text(good + "[limits]\nsessions = 1\nsesions = 2\n")
    daemon.process.send_signal(signal.SIGHUP)
    until(lambda: plain(caller.call("GetConfig").body[0])["limits.sessions"] == 1)
    assert "there is no key limits.sesions" in daemon.text()
    codes = [fact["code"] for fact in plain(caller.call("GetDiagnostics").body[0])]
    assert ("unknown_key" in codes, "bad_config" in codes) == (True, False)
    assert caller.fails("OpenText", "a{sv}", [{}])[0] == "QuotaExceeded"
    config.write_text(good + "[limits]\nsessions = 'many'\n")
    daemon.process.send_signal(signal.SIGHUP)
    until(lambda: "limits.sessions is an integer" in daemon.text())
    facts = plain(caller.call("GetDiagnostics").body[0])
    (told,) = [fact for fact in facts if fact["code"] == "bad_config"]
    assert (told["status"], told["topic"]) == ("failed", "config")
    assert told["message"].endswith("pvrd.toml: limits.sessions is an integer")
    assert len(lines(caller.generate(session, "x", max_tokens=3)).rest()) == 5


def run_pvrd(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "pvrd", *arguments],
        capture_output=True, text=True, timeout=60, check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT), **env},
    )  # fmt: skip


def test_wrong_starts(bus: str, tmp_path: Path, start: Any) -> None:
    start()
    bad = tmp_path / "bad.toml"
    bad.write_text("[gpu]\nenabled = 'perhaps'\n")
    broken = tmp_path / "broken.toml"
    broken.write_text("[gpu\n")
    plain_socket = tmp_path / "socket"
    cases = [
        (["--bus", bus], {}, "another pvrd"),
        (["--bus", f"unix:path={tmp_path}/none"], {}, "No such file"),
        (["--bus", "elsewhere"], {}, "elsewhere"),
        (["--bus", "user"], {"DBUS_SESSION_BUS_ADDRESS": "", "XDG_RUNTIME_DIR": ""}, "no user bus"),
        (["--bus", bus, "--config", str(bad)], {}, "gpu.enabled is true or false"),
        (["--bus", bus, "--config", str(broken)], {}, "broken.toml"),
        (["--bus", bus, "--config", str(tmp_path / "none")], {}, "no such file"),
    ]
    for arguments, env, word in cases:
        got = run_pvrd(*arguments, XDG_STATE_HOME=str(tmp_path), **env)
        assert got.returncode == 1
        assert word in got.stderr
        assert len(got.stderr.splitlines()) == 1, got.stderr
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(plain_socket))
        listener.listen()
        # Somebody who is no bus: it ends the connection.
        process = subprocess.Popen(
            [sys.executable, "-m", "pvrd", "--bus", f"unix:path={plain_socket}"],
            stderr=subprocess.PIPE, env={**os.environ, "PYTHONPATH": str(ROOT)}, text=True,
        )  # fmt: skip
        listener.accept()[0].close()
        _, err = process.communicate(timeout=60)
        assert process.returncode == 1
        assert len(err.splitlines()) == 1
    assert run_pvrd("--version").stdout.strip() == f"pvrd {__version__}"
    assert run_pvrd("--frob").returncode == 2


def test_losing_the_bus(tmp_path: Path, until: Any, fake: list[str]) -> None:
    config = tmp_path / "pvrd.toml"
    config.write_text(f"[workers]\nprogram = {fake}\n")
    log = tmp_path / "log"
    with started_bus() as bus, log.open("wb") as file:
        pvrd = subprocess.Popen(
            [sys.executable, "-m", "pvrd", "--bus", bus.address, "--config", str(config)],
            stderr=file,
            env={**os.environ, "PYTHONPATH": str(ROOT), "XDG_STATE_HOME": str(tmp_path)},
        )
        until(lambda: "ready, " in log.read_text())
        bus.process.kill()
    assert pvrd.wait(30) == 1
    assert "the bus is gone" in log.read_text()


def test_notifications_and_memory(start: Any, callers: Any, tmp_path: Path, until: Any) -> None:
    path = tmp_path / "notify"
    heard: list[str] = []
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.bind(str(path))
        sock.settimeout(30)
        daemon = start(NOTIFY_SOCKET=str(path), WATCHDOG_USEC="400000")
        caller = callers()
        while not any("READY=1" in h for h in heard) or heard.count("WATCHDOG=1") < 3:
            heard.append(sock.recv(4096).decode())
        assert caller.get("State") == "gpu"
        statistics = plain(caller.call("GetStatistics").body[0])
        assert statistics["rss_bytes"] < 40 << 20
        assert statistics["gpu"]["rss"] == 12345
        assert statistics["gpu"]["submissions"] == 5
        assert statistics["gpu"]["times_ms"] == {"compute": 2.5, "queue": 1.0}
        assert daemon.stop() == 0
        sock.setblocking(False)
        while not any("STOPPING=1" in h for h in heard):
            heard.append(sock.recv(4096).decode())
    ready = next(h for h in heard if "READY=1" in h)
    assert "STATUS=gpu" in ready


def test_the_workers_end_with_the_daemon(start: Any, callers: Any, until: Any) -> None:
    daemon = start()
    caller = callers()
    caller.state("gpu")
    pids = [d["pid"] for d in caller.get("Devices")]
    daemon.process.kill()
    daemon.process.wait()
    until(lambda: not any(os.path.exists(f"/proc/{pid}/fd/0") for pid in pids))
