# SPDX-License-Identifier: Apache-2.0
"""When the bus starts pvrd for a pvrctl, the prompt stays out of what the bus writes down."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.bus

_CONF = """<!DOCTYPE busconfig PUBLIC "-//freedesktop//DTD D-BUS Bus Configuration 1.0//EN"
 "http://www.freedesktop.org/standards/dbus/1.0/busconfig.dtd">
<busconfig><type>session</type><listen>unix:path={folder}/bus</listen><auth>EXTERNAL</auth>
<servicedir>{folder}</servicedir>
<policy context="default"><allow send_destination="*" eavesdrop="false"/>
<allow receive_sender="*"/><allow own="*"/><allow user="*"/></policy>
</busconfig>
"""


def test_the_bus_does_not_learn_the_prompt(tmp_path: Path) -> None:
    address = f"unix:path={tmp_path}/bus"
    (tmp_path / "bus.conf").write_text(_CONF.format(folder=tmp_path))
    fake = ROOT / "tests/ctl/fake_pvrd.py"
    (tmp_path / "org.pvrd.Pvrd1.service").write_text(
        f"[D-BUS Service]\nName=org.pvrd.Pvrd1\nExec={sys.executable} {fake} {address}\n"
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    log = tmp_path / "log"
    with log.open("wb") as err:
        command = ["dbus-daemon", f"--config-file={tmp_path}/bus.conf", "--nofork"]
        bus = subprocess.Popen(
            [*command, "--print-address", "--nosyslog"], stdout=subprocess.PIPE, stderr=err, env=env
        )
        try:
            assert bus.stdout is not None
            assert bus.stdout.readline()
            tool = [sys.executable, "-m", "pvrd.ctl.main", "--bus", address]
            done = subprocess.run(
                [*tool, "generate", "a secret wish"], env=env, capture_output=True, timeout=60
            )
        finally:
            bus.terminate()
            bus.wait()
            bus.stdout.close()
    assert done.returncode == 0, done.stderr
    written = log.read_text()
    assert "requested by" in written
    assert "pvrd.activate" in written
    assert "secret" not in written
