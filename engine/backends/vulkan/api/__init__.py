# SPDX-License-Identifier: Apache-2.0
"""Vulkan 1.2 as far as compute needs it: `instance` what is there, `device` one that is opened,
`memory` its buffers, `commands` what is recorded for it.

`binding` alone imports the package `vulkan`; outside this folder nothing calls a driver but by what
stands here, and the neighbours that are handed `vk` and `call`.
"""

from engine.backends.vulkan.api.binding import vk
from engine.backends.vulkan.api.commands import Copy, Dispatch, Layout, carry, record
from engine.backends.vulkan.api.device import Device
from engine.backends.vulkan.api.instance import Instance, memory_types
from engine.backends.vulkan.api.memory import Placed

__all__ = [
    "Copy",
    "Device",
    "Dispatch",
    "Instance",
    "Layout",
    "Placed",
    "carry",
    "memory_types",
    "record",
    "vk",
]
