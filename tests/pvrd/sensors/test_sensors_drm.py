# SPDX-License-Identifier: Apache-2.0
"""Other programs' GPU time, out of a /proc and a /sys of the test's own."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pvrd.sensors import drm
from pvrd.sensors.drm import Client, Engine, Fdinfo, find_gpus, parse, share
from pvrd.sensors.reading import text
from pvrd.sensors.udev import DeviceEvent, drm_event

XE = """pos:\t0
flags:\t0100002
drm-driver:\txe
drm-client-id:\t3
drm-pdev:\t0000:03:00.0
drm-total-system:\t0
drm-cycles-rcs:\t28257900
drm-total-cycles-rcs:\t7655183225
drm-cycles-ccs:\t50
drm-total-cycles-ccs:\t100
drm-engine-capacity-ccs:\t4
"""


class Machine:
    """A machine with GPUs and processes that have them open."""

    def __init__(self, root: Path) -> None:
        self.proc, self.drm = root / "proc", root / "drm"
        (self.proc / "1" / "fd").mkdir(parents=True)
        self._root = root

    def gpu(self, name: str, driver: str, minor: int = 0) -> None:
        device = self._root / "devices" / name
        device.mkdir(parents=True)
        (device / "driver").symlink_to(f"../../drivers/{driver}")
        for node in (f"card{minor}", f"renderD{128 + minor}"):
            (self.drm / node).mkdir(parents=True)
            (self.drm / node / "device").symlink_to(device)

    def opens(self, pid: int, fd: int, node: str, client: int, ns: int, pdev: str = "") -> None:
        folder = self.proc / str(pid)
        for part in ("fd", "fdinfo"):
            (folder / part).mkdir(parents=True, exist_ok=True)
        link = folder / "fd" / str(fd)
        if not link.is_symlink():
            link.symlink_to(node)
        (folder / "fdinfo" / str(fd)).write_text(
            f"pos:\t0\ndrm-driver:\tv3d\ndrm-client-id:\t{client}\n"
            + (f"drm-pdev:\t{pdev}\n" if pdev else "")
            + f"drm-engine-render:\t{ns} ns\ndrm-engine-copy:\t0 ns\n"
        )

    def sensor(self, kernel: str = "6.12.0") -> Fdinfo:
        return Fdinfo(self.proc, self.drm, kernel)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def told(sensor: Fdinfo, now: float) -> tuple[Any, str]:
    sensor.read(now)
    (reading,) = sensor.readings(now)
    return reading.value, reading.source


def test_a_fdinfo_file() -> None:
    client = parse(XE)
    assert client is not None
    assert (client.driver, client.pdev, client.number) == ("xe", "0000:03:00.0", "3")
    assert client.engines == {"rcs": Engine(28257900, 7655183225, 1), "ccs": Engine(50, 100, 4)}
    assert parse("pos:\t0\nflags:\t02\n") is None
    assert parse("drm-driver:\tpowervr\n") is None
    odd = parse("drm-driver:\tx\ndrm-client-id:\t1\ndrm-engine-a:\t\ndrm-engine-b:\t² ns\n")
    assert odd is not None
    assert odd.engines == {}


def test_the_share_is_that_of_the_busiest_engine() -> None:
    def look(**engines: Engine) -> dict[str, Client]:
        return {"1": Client("x", "", "1", engines)}

    before = look(render=Engine(0), copy=Engine(100), video=Engine(0, 0, 2), rcs=Engine(0, 1000))
    after = look(
        render=Engine(250_000_000), copy=Engine(0), video=Engine(900_000_000, 0, 2),
        rcs=Engine(800, 2000),
    )  # fmt: skip
    # copy's counter began anew; video's two units were busy for 45 % in all; rcs counts cycles.
    assert share(before, after, 1.0) == pytest.approx(0.8)
    assert share({}, after, 1.0) == 0.0
    assert share(look(a=Engine(0)), look(a=Engine(10**12)), 1.0) == 1.0


def test_other_programs_count_once(machine: Machine) -> None:
    machine.gpu("fe000000.gpu", "v3d")
    render = "/dev/dri/renderD128"

    def frame(ns: int) -> None:
        machine.opens(100, 5, render, 1, ns)
        machine.opens(100, 6, render, 1, ns)  # a dup: the same client
        machine.opens(200, 5, "/dev/dri/card0", 2, ns // 2)
        machine.opens(300, 9, render, 3, 10 * ns)  # our worker
        machine.opens(400, 3, "/dev/null", 4, 10 * ns)

    sensor = machine.sensor()
    sensor.own([300])
    frame(0)
    assert told(sensor, 10.0) == (None, "it takes two looks; this was the first")
    frame(200_000_000)
    assert told(sensor, 11.0) == (0.3, "fdinfo of /dev/dri/renderD128, 2 clients")
    frame(600_000_000)
    assert told(sensor, 12.0)[0] == 0.6
    assert told(sensor, 12.1)[0] == 0.6  # too short a window: the last one stands
    assert sensor.readings(60.0)[0].value is None
    sensor.forget()
    assert told(sensor, 61.0)[0] is None


def test_new_clients_are_found_and_ended_ones_forgotten(machine: Machine) -> None:
    machine.gpu("fe000000.gpu", "v3d")
    sensor = machine.sensor()
    told(sensor, 0.0)
    machine.opens(100, 5, "/dev/dri/renderD128", 1, 0)
    told(sensor, 20.0)
    machine.opens(100, 5, "/dev/dri/renderD128", 1, 500_000_000)
    assert told(sensor, 21.0)[0] == 0.5
    (machine.proc / "100" / "fdinfo" / "5").unlink()
    assert told(sensor, 22.0)[0] == 0.0


def test_which_gpu_is_ours(machine: Machine) -> None:
    assert told(machine.sensor(), 0.0) == (None, f"{machine.drm} has no render node")
    machine.gpu("0000:01:00.0", "v3d", 0)
    machine.gpu("0000:02:00.0", "v3d", 1)
    assert [g.node for g in find_gpus(machine.drm)] == [
        "/dev/dri/renderD128", "/dev/dri/renderD129",
    ]  # fmt: skip
    sensor = machine.sensor()
    assert told(sensor, 0.0) == (None, "which of 2 GPUs is ours is not known")
    machine.opens(300, 4, "/dev/dri/renderD129", 7, 0)  # our worker shows it
    sensor.own([300])

    def frame(ns: int) -> None:
        machine.opens(100, 5, "/dev/dri/renderD128", 1, 5 * ns, "0000:01:00.0")
        machine.opens(200, 5, "/dev/dri/renderD129", 1, ns, "0000:02:00.0")

    frame(0)
    told(sensor, 1.0)
    frame(250_000_000)
    assert told(sensor, 2.0) == (0.25, "fdinfo of /dev/dri/renderD129, 1 clients")
    sensor.own([300], "/dev/dri/renderD128")  # and its hello says it
    told(sensor, 3.0)
    frame(350_000_000)
    assert told(sensor, 4.0)[0] == 0.5


@pytest.mark.parametrize(
    ("driver", "kernel", "off"),
    [
        ("pvrsrvkm", "6.6.0", "panic"),
        ("amdgpu", "5.19.12-arch1-1", "NULL"),
        ("amdgpu", "6.4.9", "NULL"),
        ("amdgpu", "6.12.0", ""),
        ("panthor", "6.13.4-rockchip", "CVE-2025-22100"),
        ("panthor", "6.15.0", ""),
        ("nvidia", "6.12.0", "proprietary"),
        ("powervr", "6.18.4", "tells no engine's time"),
        ("panfrost", "", ""),
    ],
)
def test_drivers_that_are_left_alone(
    machine: Machine, driver: str, kernel: str, off: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.gpu("gpu", driver)
    machine.opens(100, 5, "/dev/dri/renderD128", 1, 0)
    read: list[Path] = []
    monkeypatch.setattr(drm, "text", lambda path: read.append(path) or text(path))
    value, why = told(machine.sensor(kernel), 0.0)
    assert value is None
    assert off in why
    assert bool(off) != bool(read)  # not one file is opened


def test_others_that_may_not_be_read(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine.gpu("gpu", "v3d")
    denied = {str(machine.proc / "1" / "fd")}
    scan = os.scandir

    def scandir(path: Any) -> Any:
        if str(path) in denied:
            raise PermissionError(13, "Permission denied", str(path))
        return scan(path)

    monkeypatch.setattr(os, "scandir", scandir)
    sensor = machine.sensor()
    value, why = told(sensor, 0.0)
    assert value is None
    assert "no permission" in why
    # With some that may, what is known is said, and that it is not all.
    machine.opens(100, 5, "/dev/dri/renderD128", 1, 0)
    told(sensor, 20.0)
    machine.opens(100, 5, "/dev/dri/renderD128", 1, 400_000_000)
    value, source = told(sensor, 21.0)
    assert value == 0.4
    assert source.endswith(", 1 processes unreadable")


def test_others_that_are_not_even_listed(tmp_path: Path) -> None:
    """ProtectProc=invisible: no process of another user is in /proc."""
    machine = Machine(tmp_path)
    machine.gpu("gpu", "v3d")
    (machine.proc / "1" / "fd").rmdir()
    (machine.proc / "1").rmdir()
    assert "no permission" in told(machine.sensor(), 0.0)[1]


# -- udev's events


def event(action: str, path: str, parent: Any = None, **properties: str) -> Any:
    return SimpleNamespace(
        action=action, device_path=path, device_node=None, parent=parent, properties=properties
    )


def test_an_event_of_a_device_that_is_gone() -> None:
    """Its /sys is gone too: what the path says has to do."""
    bridge = SimpleNamespace(sys_name="pci0", driver="pcieport")  # what libudev finds instead
    path = "/devices/pci0/0000:01:00.0/drm/renderD128"
    got = drm_event(event("remove", path, bridge, DEVNAME="/dev/dri/renderD128"))
    assert got == DeviceEvent("remove", "/dev/dri/renderD128", "0000:01:00.0")
    assert drm_event(event("remove", "/devices/virtual/drm/ttm")) is None
    assert drm_event(event("change", "/devices/a/drm/card0", HOTPLUG="1")) is None


@pytest.mark.parametrize(
    ("word", "recovery"),
    [("none", ()), ("rebind,bus-reset", ("rebind", "bus-reset")), ("unknown", ("unknown",)),
     ("", ())],
)  # fmt: skip
def test_wedged(word: str, recovery: tuple[str, ...]) -> None:
    got = drm_event(event("change", "/devices/a/drm/card0", WEDGED=word))
    assert got == DeviceEvent("wedged", "", "a", "", recovery)
