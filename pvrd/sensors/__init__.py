# SPDX-License-Identifier: Apache-2.0
"""What the machine is doing, for the governor: each sensor names its source or says why not."""

from pvrd.sensors.board import Sensors
from pvrd.sensors.compositor import Compositor
from pvrd.sensors.reading import Reading
from pvrd.sensors.udev import DeviceEvent

__all__ = ["Compositor", "DeviceEvent", "Reading", "Sensors"]
