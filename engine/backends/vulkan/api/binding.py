# SPDX-License-Identifier: Apache-2.0
"""The package `vulkan`, which no other file imports, and the way to call it.

What it needs from us: a struct that another points to has to stay in a local until the call
returns, since nesting by value drops the references; sizes are never VK_WHOLE_SIZE, which is -1
there and overflows; result codes that it does not know come out as KeyError.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from engine.errors import DeviceLost, OutOfMemory, PvrError

try:
    import vulkan

    vk: Any = vulkan
    why_not = ""  # a sentence, where it cannot be imported
except Exception as e:  # a sandbox may forbid cffi's callbacks (MemoryError)
    vk = None
    why_not = f"Vulkan cannot be used: {e}"
    if isinstance(e, OSError):  # the bindings speak of an SDK then
        why_not = "the Vulkan loader (libvulkan.so.1) is not installed"

# For tests: what the driver answers to a call, as the name of the package's exception; "" to let it
# do its work.
planned: Callable[[str], str] | None = None


def call(what: str, function: Callable[..., Any], *args: Any) -> Any:
    """Calls into Vulkan; every result code but success becomes an error of ours.

    Raises:
        DeviceLost, OutOfMemory, TimeoutError (VK_TIMEOUT), PvrError for all others.
    """
    try:
        if planned is not None and (answer := planned(what)):
            raise getattr(vk, answer)
        return function(*args)
    except vk.VkErrorDeviceLost as e:
        raise DeviceLost(f"the GPU was lost: {what}") from e
    except (vk.VkErrorOutOfHostMemory, vk.VkErrorOutOfDeviceMemory, vk.VkErrorOutOfPoolMemory) as e:
        raise OutOfMemory(f"the GPU has no memory left: {what}") from e
    except vk.VkTimeout as e:
        raise TimeoutError(what) from e
    except (vk.VkError, vk.VkException) as e:
        raise PvrError(f"{what} failed: {type(e).__name__}") from e
    except KeyError as e:
        raise PvrError(f"{what} failed with VkResult {e}") from e
