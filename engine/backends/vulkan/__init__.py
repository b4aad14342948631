# SPDX-License-Identifier: Apache-2.0
"""GPUs through Vulkan 1.2. `api` calls the driver and alone imports the package `vulkan`; `backend`
is the device, `pipelines` its kernels, `recording` what is placed and recorded on it.
"""

from engine.backends.devices import NoDevice
from engine.backends.vulkan.backend import VulkanBackend, list_devices
from engine.backends.vulkan.recording import VulkanExecutable, VulkanWeights

__all__ = ["NoDevice", "VulkanBackend", "VulkanExecutable", "VulkanWeights", "list_devices"]
