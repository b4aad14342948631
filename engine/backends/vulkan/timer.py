# SPDX-License-Identifier: Apache-2.0
"""How long a submission took by the device's own clock: a timestamp before it and one after."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from engine.errors import PvrError


class Timer:
    """Two recordings to put around those of a submission, and what they found.

    `vk` and `call` are api's, `before` and `after` empty command buffers of a family with
    timestamps of so many valid `bits`, `period` the nanoseconds of a tick.
    """

    def __init__(
        self,
        vk: Any,
        call: Callable[..., Any],
        stack: ExitStack,
        dev: Any,
        recordings: tuple[Any, Any],
        bits: int,
        period: float,
    ) -> None:
        self._vk, self._call, self._dev = vk, call, dev
        self.before, self.after = recordings
        self._mask, self._seconds = (1 << bits) - 1, period * 1e-9
        info = vk.VkQueryPoolCreateInfo(queryType=vk.VK_QUERY_TYPE_TIMESTAMP, queryCount=2)
        self._pool = call("vkCreateQueryPool", vk.vkCreateQueryPool, dev, info, None)
        stack.callback(vk.vkDestroyQueryPool, dev, self._pool, None)
        begin = vk.VkCommandBufferBeginInfo()
        stages = (vk.VK_PIPELINE_STAGE_TOP_OF_PIPE_BIT, vk.VK_PIPELINE_STAGE_BOTTOM_OF_PIPE_BIT)
        for i, (cmd, stage) in enumerate(zip(recordings, stages, strict=True)):
            call("vkBeginCommandBuffer", vk.vkBeginCommandBuffer, cmd, begin)
            if i == 0:
                vk.vkCmdResetQueryPool(cmd, self._pool, 0, 2)
            vk.vkCmdWriteTimestamp(cmd, stage, self._pool, i)
            call("vkEndCommandBuffer", vk.vkEndCommandBuffer, cmd)

    def elapsed(self) -> float | None:
        """Seconds between the two, after the submission was waited for; None if they are not there
        (then the wall clock has to do).
        """
        vk = self._vk
        ticks = vk.ffi.new("uint64_t[2]")
        what, get = "vkGetQueryPoolResults", vk.vkGetQueryPoolResults
        wide = vk.VK_QUERY_RESULT_64_BIT
        try:
            self._call(what, get, self._dev, self._pool, 0, 2, 16, ticks, 8, wide)
        except (PvrError, vk.VkNotReady):
            return None
        return float((ticks[1] - ticks[0]) & self._mask) * self._seconds
