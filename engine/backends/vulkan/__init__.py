# SPDX-License-Identifier: Apache-2.0
"""GPUs through Vulkan 1.2. `api` alone imports the package `vulkan`; `backend` has the backend's
own logic.
"""

from engine.backends.devices import NoDevice
from engine.backends.vulkan.backend import (
    VulkanBackend,
    VulkanExecutable,
    VulkanWeights,
    list_devices,
)

__all__ = ["NoDevice", "VulkanBackend", "VulkanExecutable", "VulkanWeights", "list_devices"]
