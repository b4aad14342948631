# SPDX-License-Identifier: Apache-2.0
"""What is recorded into command buffers: dispatches, copies, and the barriers between them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from engine.backends.vulkan.api.binding import call, vk
from engine.backends.vulkan.api.memory import Placed


@dataclass(frozen=True)
class Layout:
    """How a kernel is fed: binding 0 uniform, `count` storage buffers after it, push constants."""

    handle: Any
    sets: Any
    count: int


@dataclass(frozen=True)
class Dispatch:
    """One recorded call. `fence_off`: what was dispatched before has to be seen by it."""

    pipeline: Any
    layout: Layout
    descriptors: Any
    push: bytes
    groups: tuple[int, int, int]
    fence_off: bool


@dataclass(frozen=True)
class Copy:
    """Bytes from one buffer to another."""

    source: Placed
    at: int
    target: Placed
    to: int
    nbytes: int


@contextmanager
def recording(cmd: Any, flags: int = 0) -> Iterator[None]:
    """Around what is recorded into a command buffer."""
    begin = vk.VkCommandBufferBeginInfo(flags=flags)
    call("vkBeginCommandBuffer", vk.vkBeginCommandBuffer, cmd, begin)
    yield
    call("vkEndCommandBuffer", vk.vkEndCommandBuffer, cmd)


def record(cmd: Any, calls: Sequence[Dispatch]) -> None:
    """Records calls that see what was submitted before, and whose results the host can read. It may
    stand in a submission several times.
    """
    compute, host = vk.VK_PIPELINE_STAGE_COMPUTE_SHADER_BIT, vk.VK_PIPELINE_STAGE_HOST_BIT
    with recording(cmd, vk.VK_COMMAND_BUFFER_USAGE_SIMULTANEOUS_USE_BIT):
        barrier(cmd, compute, compute, vk.VK_ACCESS_UNIFORM_READ_BIT)
        dispatch(cmd, calls)
        barrier(cmd, compute, host)


def dispatch(cmd: Any, calls: Sequence[Dispatch]) -> None:
    """The calls alone, with the barriers between them, in a recording that has begun."""
    compute = vk.VK_PIPELINE_STAGE_COMPUTE_SHADER_BIT
    point, shader = vk.VK_PIPELINE_BIND_POINT_COMPUTE, vk.VK_SHADER_STAGE_COMPUTE_BIT
    current: Any = None
    for one in calls:
        if one.fence_off:
            barrier(cmd, compute, compute)
        if current is not one.pipeline:
            current = one.pipeline
            vk.vkCmdBindPipeline(cmd, point, current)
        sets = [one.descriptors]
        vk.vkCmdBindDescriptorSets(cmd, point, one.layout.handle, 0, 1, sets, 0, None)
        if one.push:
            push = vk.ffi.from_buffer(one.push)
            vk.vkCmdPushConstants(cmd, one.layout.handle, shader, 0, len(one.push), push)
        vk.vkCmdDispatch(cmd, *one.groups)


def carry(cmd: Any, copies: Sequence[Copy], up: bool) -> None:
    """Records copies that do not meet one another: `up`, to what is dispatched next; else of what
    was, to the host. It may be recorded anew.
    """
    compute = vk.VK_PIPELINE_STAGE_COMPUTE_SHADER_BIT
    transfer, host = vk.VK_PIPELINE_STAGE_TRANSFER_BIT, vk.VK_PIPELINE_STAGE_HOST_BIT
    with recording(cmd):
        barrier(cmd, compute, transfer)
        for c in copies:
            region = vk.VkBufferCopy(c.at, c.to, c.nbytes)
            vk.vkCmdCopyBuffer(cmd, c.source.handle, c.target.handle, 1, [region])
        barrier(cmd, transfer, compute if up else host)


def barrier(cmd: Any, before: int, after: int, more: int = 0) -> None:
    """What comes after sees what was written before. `more`: what else it reads, as it may be
    parameter words that the sequence before has written.
    """
    transfer, host = vk.VK_PIPELINE_STAGE_TRANSFER_BIT, vk.VK_PIPELINE_STAGE_HOST_BIT
    writes = {transfer: vk.VK_ACCESS_TRANSFER_WRITE_BIT}
    reads = {
        transfer: vk.VK_ACCESS_TRANSFER_READ_BIT | vk.VK_ACCESS_TRANSFER_WRITE_BIT,
        host: vk.VK_ACCESS_HOST_READ_BIT,
    }
    shader = vk.VK_ACCESS_SHADER_READ_BIT | vk.VK_ACCESS_SHADER_WRITE_BIT
    memory = vk.VkMemoryBarrier(
        srcAccessMask=writes.get(before, vk.VK_ACCESS_SHADER_WRITE_BIT),
        dstAccessMask=reads.get(after, shader) | more,
    )
    vk.vkCmdPipelineBarrier(cmd, before, after, 0, 1, [memory], 0, None, 0, None)
