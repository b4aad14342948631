# SPDX-License-Identifier: Apache-2.0
"""Holds on the system bus: polkit decides, and without polkit nobody may."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pvrd.config import toml_value

pytestmark = pytest.mark.bus
ROOT = Path(__file__).resolve().parents[2]
LONG = 30.0
POLKIT, AUTHORITY = "org.freedesktop.PolicyKit1", "/org/freedesktop/PolicyKit1/Authority"
MOCK = "org.freedesktop.DBus.Mock"
# Debian's, which has the bindings that dbusmock needs.
PYTHON = "/usr/bin/python3"


def test_polkit_decides_about_holds(
    bus: str, caller: Any, fake: list[str], until: Any, tmp_path: Path
) -> None:
    config, log = tmp_path / "pvrd.toml", tmp_path / "log"
    config.write_text(f"[workers]\nprogram = {toml_value(fake)}\n[sensors]\nsystem = false\n")
    env = {
        **os.environ, "DBUS_SYSTEM_BUS_ADDRESS": bus, "PYTHONPATH": str(ROOT),
        "STATE_DIRECTORY": str(tmp_path / "state"), "CACHE_DIRECTORY": str(tmp_path / "cache"),
    }  # fmt: skip
    with log.open("wb") as file:
        daemon = subprocess.Popen(
            [sys.executable, "-m", "pvrd", "--bus", "system", "--config", str(config)],
            stderr=file, cwd=tmp_path, env=env,
        )  # fmt: skip
    mock = None
    try:
        until(lambda: "ready, " in log.read_text(), "readiness")
        caller.state("gpu")
        name, text = caller.fails("Hold", "sa{sv}", ["a game", {}])
        assert name == "NotAuthorized"
        assert "org.pvrd.Pvrd1.hold" in text
        mock = subprocess.Popen(
            [PYTHON, "-m", "dbusmock", "--system", "-t", "polkitd", "-p", "{}"],
            env=env, stdout=subprocess.DEVNULL,
        )  # fmt: skip
        until(lambda: caller.run(caller.connection.name_owner(POLKIT)), "polkit")
        assert caller.fails("Hold", "sa{sv}", ["a game", {}])[0] == "NotAuthorized"
        caller.run(
            caller.connection.call(
                POLKIT, AUTHORITY, MOCK, "SetAllowed", "as", [["org.pvrd.Pvrd1.hold"]]
            )
        ).close()
        reply = caller.call("Hold", "sa{sv}", ["a game", {}])
        fd = reply.fds.take(reply.body[0])
        caller.state("cpu")
        os.close(fd)
        caller.state("gpu")
    finally:
        for process in (daemon, mock):
            if process is not None:
                process.terminate()
                process.wait(LONG)
    assert "Traceback" not in log.read_text()
