# SPDX-License-Identifier: Apache-2.0
"""Accounts of services, which no seat and no login speaks for."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.buses import write_config
from tests.pvrd.conftest import LONG, environment

pytestmark = pytest.mark.bus


@pytest.mark.parametrize("admitted", [False, True])
def test_a_service_account_is_admitted_by_configuration(
    bus: str, caller: Any, stranger: Any, fake: Any, tmp_path: Path, until: Any, admitted: bool
) -> None:
    """A system bus without polkit, which would see no session of such an account anyway."""
    models, config, log = tmp_path / "models", tmp_path / "pvrd.toml", tmp_path / "log"
    models.mkdir()
    (models / "fake text.gguf").write_bytes(b"GGUF and no more")
    visitor = stranger("privileged")
    settings = {
        "workers.program": fake, "sensors.system": False, "models.paths": [str(models)],
        "access.accounts": ["no-such-account", str(visitor.uid)] if admitted else [],
    }  # fmt: skip
    write_config(config, settings)
    env = environment(
        tmp_path, DBUS_SYSTEM_BUS_ADDRESS=bus, STATE_DIRECTORY=str(tmp_path / "state"),
        CACHE_DIRECTORY=str(tmp_path / "cache"),
    )  # fmt: skip
    with log.open("wb") as file:
        daemon = subprocess.Popen(
            [sys.executable, "-m", "pvrd", "--bus", "system", "--config", str(config)],
            stderr=file, cwd=tmp_path, env=env,
        )  # fmt: skip
    try:
        until(lambda: "ready, " in log.read_text(), "readiness")
        said = visitor.go()
        for what in ("priority", "hold"):
            assert said[what].partition(":")[0] == ("" if admitted else "NotAuthorized"), said
        for what in ("config", "model"):
            assert said[what].startswith("NotAuthorized"), said
    finally:
        daemon.terminate()
        assert daemon.wait(LONG) == 0
    assert "Traceback" not in log.read_text()
