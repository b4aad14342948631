# SPDX-License-Identifier: Apache-2.0
"""udev's events of GPUs, power supplies and thermal zones, as the kernel sends them.

A DRM device that its driver gave up sends a change event with WEDGED=: what would bring it back,
each of `none` (nothing has to be done), `rebind` (of the driver), `bus-reset`, `vendor-specific`,
or `unknown`. Source: the kernel's Documentation/gpu/drm-uapi.rst, "Device wedging".
"""

from __future__ import annotations

import asyncio
import importlib
import os
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

SUBSYSTEMS = ("drm", "power_supply", "thermal")
_EVENTS_A_TURN = 64  # so that a storm of events leaves the loop to others


@dataclass(frozen=True)
class DeviceEvent:
    """Something happened to a GPU."""

    action: str  # add, remove or wedged
    node: str  # /dev/dri/renderD128 or /dev/dri/card0
    parent: str  # the device behind it: 0000:01:00.0, fd000000.gpu; "" when it is gone already
    driver: str = ""
    recovery: tuple[str, ...] = ()  # of wedged: rebind, bus-reset, …; () is none needed


class Udev:
    """Watches; `on_device` gets events of GPUs, `on_power` and `on_thermal` that theirs changed."""

    def __init__(
        self,
        on_device: Callable[[DeviceEvent], None],
        on_power: Callable[[], None],
        on_thermal: Callable[[], None],
    ) -> None:
        self._on_device = on_device
        self._on_power = on_power
        self._on_thermal = on_thermal
        self._monitor: Any = None
        self.absent = "it was not started"  # why nothing is watched; "" when it is
        self.events = 0
        self.source = "udev"

    def start(self) -> None:
        """Listens; `absent` says why it cannot."""
        try:
            # Here and not above: it loads libudev, which a small system may lack.
            pyudev = importlib.import_module("pyudev")
            monitor = _listen(pyudev, "udev")
            self.source = "udev"
            if not _hears(monitor.fileno()):
                # No udevd (a container, a small board): libudev listens to nobody then.
                monitor = _listen(pyudev, "kernel")
                self.source = "the kernel, without udevd"
        except ImportError as e:
            self.absent = f"libudev cannot be loaded: {e}"
            return
        except OSError as e:
            self.absent = f"udev cannot be watched: {e.strerror or e}"
            return
        self._monitor = monitor
        self.absent = ""
        asyncio.get_running_loop().add_reader(monitor.fileno(), self._readable)

    def stop(self) -> None:
        """Listens no more."""
        if self._monitor is None:
            return
        asyncio.get_running_loop().remove_reader(self._monitor.fileno())
        self._monitor = None  # the socket closes with it
        self.absent = "it was stopped"

    def _readable(self) -> None:
        for _ in range(_EVENTS_A_TURN):
            if self._monitor is None:
                return
            try:
                device = self._monitor.poll(timeout=0)
            except OSError:
                # Events were lost (ENOBUFS): whatever they said is read anew.
                self._on_power()
                self._on_thermal()
                return
            if device is None:
                return
            self.events += 1
            self._take(device)

    def _take(self, device: Any) -> None:
        if device.subsystem == "power_supply":
            self._on_power()
        elif device.subsystem == "thermal":
            self._on_thermal()
        elif device.subsystem == "drm":
            event = drm_event(device)
            if event is not None:
                self._on_device(event)


def _listen(pyudev: Any, source: str) -> Any:
    monitor = pyudev.Monitor.from_netlink(pyudev.Context(), source=source)
    for subsystem in SUBSYSTEMS:
        monitor.filter_by(subsystem)
    monitor.start()
    return monitor


def _hears(fd: int) -> bool:
    """Is the netlink socket in a multicast group?"""
    with socket.socket(fileno=os.dup(fd)) as sock:
        return sock.family != socket.AF_NETLINK or bool(sock.getsockname()[1])


def drm_event(device: Any) -> DeviceEvent | None:
    """What an event of the subsystem drm says of a GPU; None when it says nothing (a display)."""
    properties = device.properties
    node = device.device_node or ""
    if not node and properties.get("DEVNAME"):
        node = "/dev/" + str(properties["DEVNAME"]).removeprefix("/dev/")
    # Out of the path: where the device is gone, libudev's parent is the next one that is left.
    parent = device.parent
    name = _parent_of(device.device_path) or (parent.sys_name if parent is not None else "")
    driver = (parent.driver or "") if parent is not None and parent.sys_name == name else ""
    action = device.action
    if "WEDGED" in properties:
        methods = [m.strip() for m in str(properties["WEDGED"]).split(",")]
        recovery = tuple(m for m in methods if m and m != "none")
        return DeviceEvent("wedged", node, name, driver, recovery)
    if action in ("add", "remove") and node.startswith("/dev/dri/"):
        return DeviceEvent(action, node, name, driver)
    return None


def _parent_of(path: str) -> str:
    """The device's name out of /devices/…/0000:01:00.0/drm/renderD128."""
    before, found, _ = path.partition("/drm/")
    return before.rsplit("/", 1)[-1] if found else ""
