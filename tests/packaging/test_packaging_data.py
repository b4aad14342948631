# SPDX-License-Identifier: Apache-2.0
"""Units, policies and the sample configuration, read as their readers read them."""

from __future__ import annotations

import re
import subprocess
import tomllib
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from pvrd.config import KEYS, check

TREE = Path(__file__).resolve().parents[2]
# By `systemd-analyze security`, 0 to 10
UNITS = {"pvrd.service": 1.0, "pvrd-worker-gpu@.service": 0.8, "pvrd-worker-cpu@.service": 0.6}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A root folder with the units and the programs that they name."""
    units = tmp_path / "etc/systemd/system"
    units.mkdir(parents=True)
    (tmp_path / "usr/bin").mkdir(parents=True)
    for unit in (TREE / "systemd").glob("*.s*"):
        if unit.suffix in (".service", ".socket"):
            text = re.sub("@(bindir|libexecdir)@", "/usr/bin", unit.read_text())
            (units / unit.name).write_text(text)
    for name in ("pvrd", "pvrd-worker"):
        (tmp_path / "usr/bin" / name).write_text("#!/bin/sh\n")
        (tmp_path / "usr/bin" / name).chmod(0o755)
    return tmp_path


@pytest.mark.parametrize("unit", UNITS)
def test_exposure_is_small(root: Path, unit: str) -> None:
    said = subprocess.run(
        ["systemd-analyze", "security", "--offline=true", f"--root={root}", "--no-pager", unit],
        capture_output=True,
        text=True,
        check=True,
    )
    assert not re.search(r"Unknown|ignoring", said.stderr), said.stderr
    figure = re.search(r"Overall exposure level for \S+: ([0-9.]+)", said.stdout)
    assert figure
    assert float(figure[1]) <= UNITS.get(unit, 1.5)


def test_devices_are_named_one_by_one() -> None:
    def lines(unit: str, key: str) -> list[str]:
        text = (TREE / "systemd" / unit).read_text()
        return [line.partition("=")[2] for line in text.splitlines() if line.startswith(key + "=")]

    for unit in ("pvrd.service", "pvrd-worker-gpu@.service", "pvrd-worker-cpu@.service"):
        assert lines(unit, "DevicePolicy") == ["closed"]
        allowed = lines(unit, "DeviceAllow")
        assert bool(allowed) == ("gpu" in unit)
        assert not [d for d in allowed if "*" in d or d.split()[1] not in ("r", "rw")]
        assert lines(unit, "PrivateDevices") == ([] if allowed else ["yes"])
    devices = lines("pvrd-worker-gpu@.service", "DeviceAllow")
    wanted = {"char-drm rw", "char-nvidia rw", "/dev/dma_heap/system r", "/dev/udmabuf rw"}
    assert wanted <= set(devices)


@pytest.mark.parametrize(("name", "verb"), [("pvr-agent", "enable"), ("pvr-http", "disable")])
def test_the_units_of_users_are_sound(tmp_path: Path, name: str, verb: str) -> None:
    text = (TREE / f"systemd/{name}.service").read_text()
    assert f"ExecStart=@bindir@/{name}\n" in text
    assert ("PartOf=graphical-session.target" in text) == (name == "pvr-agent")
    unit = tmp_path / f"{name}.service"
    unit.write_text(text.replace(f"@bindir@/{name}", "/bin/true"))
    said = subprocess.run(
        ["systemd-analyze", "verify", "--user", "--man=no", "--recursive-errors=no", unit],
        capture_output=True,
        text=True,
        check=False,
        env={"PATH": "/usr/bin:/bin", "XDG_RUNTIME_DIR": str(tmp_path), "HOME": str(tmp_path)},
    )
    assert f"{name}.service" not in said.stderr, said.stderr
    preset = (TREE / f"systemd/80-{name}.preset").read_text()
    assert f"{verb} {name}.service\n" in preset


def test_workers_end_with_pvrd_and_sockets_are_its_own() -> None:
    for kind in ("gpu", "cpu"):
        service = (TREE / f"systemd/pvrd-worker-{kind}@.service").read_text()
        socket = (TREE / f"systemd/pvrd-worker-{kind}.socket").read_text()
        assert "StopPropagatedFrom=pvrd.service" in service
        assert f"/pvrd-worker --kind {kind}\n" in service
        for line in (
            f"ListenSequentialPacket=/run/pvrd/worker-{kind}.socket",
            "Accept=yes",
            "SocketMode=0600",
            "SocketUser=pvrd",
            "PartOf=pvrd.service",
        ):
            assert line in socket


def test_polkit_actions_are_those_of_the_api_and_name_the_owner() -> None:
    actions = ET.parse(TREE / "dbus/org.pvrd.Pvrd1.policy").getroot().findall("action")
    section = (TREE / "docs/api.md").read_text().partition("\n## polkit\n")[2]
    named = set(re.findall(r"`(org\.pvrd\.Pvrd1\.[a-z-]+)`", section.partition("\n## ")[0]))
    assert {a.get("id") for a in actions} == named
    for action in actions:
        owner = {a.get("key"): a.text for a in action.findall("annotate")}
        # without it polkitd lets only root ask about a caller
        assert owner["org.freedesktop.policykit.owner"] == "unix-user:pvrd"
        assert action.findtext("defaults/allow_any") == "auth_admin"


def test_bus_files_name_the_bus_name() -> None:
    policy = ET.parse(TREE / "dbus/org.pvrd.Pvrd1.conf").getroot()
    assert [p.get("user") for p in policy if p.find("allow[@own]") is not None] == ["pvrd"]
    activation = (TREE / "dbus/org.pvrd.Pvrd1.service").read_text()
    assert "Name=org.pvrd.Pvrd1\n" in activation
    assert "SystemdService=pvrd.service" in activation


def test_sample_configuration_shows_every_key_with_its_default() -> None:
    text = (TREE / "systemd/pvrd.toml").read_text()
    # the lines in comments too: `#key = value`
    sample = tomllib.loads(re.sub(r"(?m)^#(?=[a-z_]+ = )", "", text))
    shown = {f"{part}.{key}": value for part, keys in sample.items() for key, value in keys.items()}
    for key, value in shown.items():
        kept = check(key, value)
        if not key.endswith("_socket"):
            assert kept == KEYS[key].default, key
    for_tests = ("deadlines.", "debug.", "workers.program")
    assert {key for key in KEYS if not key.startswith(for_tests)} == set(shown)


def test_sample_configuration_and_sockets_agree() -> None:
    workers = tomllib.loads((TREE / "systemd/pvrd.toml").read_text())["workers"]
    for kind in ("gpu", "cpu"):
        unit = (TREE / f"systemd/pvrd-worker-{kind}.socket").read_text()
        assert f"ListenSequentialPacket={workers[f'{kind}_socket']}\n" in unit
