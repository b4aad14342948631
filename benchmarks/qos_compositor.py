# SPDX-License-Identifier: Apache-2.0
"""A compositor of the benchmark's own: it draws offscreen by Vulkan, once a refresh.

    python -m benchmarks.qos_compositor [--frames N] [--settle N] [--budget MS] [--layers N]
        [--hz F] [--software]

A frame is a render pass over one target with so many blended layers (triangles around all of it)
that the device takes `--budget` for it when it is alone; that number is found before the frames
begin, unless `--layers` gives it. Frames begin by the absolute clock, each `1 / hz` after the one
before, or with the next refresh when the one before was not done by then, as a compositor does that
waits for its picture. The device's queue has the default priority. The process says what it does in
lines of JSON:

    {"t": "ready", "device": NAME, "layers": N, "alone_ms": F}
    {"t": "report", "missed_per_s": F, "latency_ms": F}     once a second: what an agent would see
    {"t": "begin"}                                          --settle frames are over: now they count
    {"t": "end", "took_ms": [F, …], "began_s": [F, …], "missed": N, "seconds": F}

`took_ms` is from a frame's submission (`began_s`) to its fence; `missed` counts refreshes without a
new frame.

Only this file of the benchmarks calls Vulkan by itself; the product draws nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from engine.backends.vulkan.draws import create, triangle_pipeline
from engine.bench_shaders import layer_shader, triangle_shader

WIDTH, HEIGHT = 1920, 1080
SMALL = 256, 144  # of a software device
STEPS = 32  # multiply-adds of a fragment
MOST_LAYERS = 4096
WARM_S = 1.5  # before anything is measured: clocks rise
TRIALS = 15
REPORT_S = 1.0
NEAR = 0.25  # of a refresh, by which a frame may be late and still be shown with it
_ABSOLUTE = 1  # TIMER_ABSTIME
_FOREVER = 20_000_000_000
_LIBC = ctypes.CDLL(None)


class NoGraphics(SystemExit):
    """There is no device that could draw."""


def _call(_what: str, function: Callable[..., Any], *given: Any) -> Any:
    return function(*given)


class Scene:
    """The target and what draws on it. A context manager.

    Raises:
        NoGraphics: no device, or none that draws.
    """

    def __init__(self, software: bool) -> None:
        import vulkan

        self.vk: Any = vulkan
        self._stack = ExitStack()
        self._commands: dict[int, Any] = {}
        with ExitStack() as stack:
            self._open(stack, software)
            self._target(stack)
            self._pipeline(stack)
            self._stack = stack.pop_all()

    def __enter__(self) -> Scene:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _open(self, stack: ExitStack, software: bool) -> None:
        vk = self.vk
        app = vk.VkApplicationInfo(pApplicationName="qos", apiVersion=vk.VK_MAKE_VERSION(1, 2, 0))
        instance = vk.vkCreateInstance(vk.VkInstanceCreateInfo(pApplicationInfo=app), None)
        stack.callback(vk.vkDestroyInstance, instance, None)
        found: list[tuple[bool, int, Any, int]] = []
        for device in vk.vkEnumeratePhysicalDevices(instance):
            kind = vk.vkGetPhysicalDeviceProperties(device).deviceType
            if (kind == vk.VK_PHYSICAL_DEVICE_TYPE_CPU) > software:
                continue
            for i, family in enumerate(vk.vkGetPhysicalDeviceQueueFamilyProperties(device)):
                if family.queueFlags & vk.VK_QUEUE_GRAPHICS_BIT:
                    found.append((kind == vk.VK_PHYSICAL_DEVICE_TYPE_CPU, len(found), device, i))
                    break
        if not found:
            raise NoGraphics("qos_compositor: there is no Vulkan device that draws")
        slow, _, self._pd, family = min(found, key=lambda one: one[:2])
        self.size = SMALL if slow else (WIDTH, HEIGHT)
        self.name = str(vk.vkGetPhysicalDeviceProperties(self._pd).deviceName)
        queues = [
            vk.VkDeviceQueueCreateInfo(
                queueFamilyIndex=family, queueCount=1, pQueuePriorities=[1.0]
            )
        ]
        create = vk.VkDeviceCreateInfo(pQueueCreateInfos=queues)
        self._dev = vk.vkCreateDevice(self._pd, create, None)
        stack.callback(vk.vkDestroyDevice, self._dev, None)
        stack.callback(vk.vkDeviceWaitIdle, self._dev)
        self._queue = vk.vkGetDeviceQueue(self._dev, family, 0)
        self._fence = self._make(stack, "Fence", vk.VkFenceCreateInfo())
        info = vk.VkCommandPoolCreateInfo(queueFamilyIndex=family)
        self._pool = self._make(stack, "CommandPool", info)

    def _make(self, stack: ExitStack, what: str, info: Any) -> Any:
        return create(self.vk, _call, stack, self._dev, what, info)

    def _target(self, stack: ExitStack) -> None:
        vk, (width, height) = self.vk, self.size
        form = vk.VK_FORMAT_R8G8B8A8_UNORM
        image = self._make(
            stack,
            "Image",
            vk.VkImageCreateInfo(
                imageType=vk.VK_IMAGE_TYPE_2D,
                format=form,
                extent=vk.VkExtent3D(width, height, 1),
                mipLevels=1,
                arrayLayers=1,
                samples=vk.VK_SAMPLE_COUNT_1_BIT,
                tiling=vk.VK_IMAGE_TILING_OPTIMAL,
                usage=vk.VK_IMAGE_USAGE_COLOR_ATTACHMENT_BIT,
                sharingMode=vk.VK_SHARING_MODE_EXCLUSIVE,
                initialLayout=vk.VK_IMAGE_LAYOUT_UNDEFINED,
            ),
        )
        need = vk.vkGetImageMemoryRequirements(self._dev, image)
        types = vk.vkGetPhysicalDeviceMemoryProperties(self._pd)
        fit = [i for i in range(types.memoryTypeCount) if need.memoryTypeBits >> i & 1]
        local = vk.VK_MEMORY_PROPERTY_DEVICE_LOCAL_BIT
        fit.sort(key=lambda i: not types.memoryTypes[i].propertyFlags & local)
        info = vk.VkMemoryAllocateInfo(allocationSize=need.size, memoryTypeIndex=fit[0])
        memory = vk.vkAllocateMemory(self._dev, info, None)
        stack.callback(vk.vkFreeMemory, self._dev, memory, None)
        vk.vkBindImageMemory(self._dev, image, memory, 0)
        whole = vk.VkImageSubresourceRange(vk.VK_IMAGE_ASPECT_COLOR_BIT, 0, 1, 0, 1)
        view_info = vk.VkImageViewCreateInfo(
            image=image, viewType=vk.VK_IMAGE_VIEW_TYPE_2D, format=form, subresourceRange=whole
        )
        views = [self._make(stack, "ImageView", view_info)]
        drawn = vk.VK_IMAGE_LAYOUT_COLOR_ATTACHMENT_OPTIMAL
        attachments = [
            vk.VkAttachmentDescription(
                format=form,
                samples=vk.VK_SAMPLE_COUNT_1_BIT,
                loadOp=vk.VK_ATTACHMENT_LOAD_OP_CLEAR,
                storeOp=vk.VK_ATTACHMENT_STORE_OP_STORE,
                stencilLoadOp=vk.VK_ATTACHMENT_LOAD_OP_DONT_CARE,
                stencilStoreOp=vk.VK_ATTACHMENT_STORE_OP_DONT_CARE,
                initialLayout=vk.VK_IMAGE_LAYOUT_UNDEFINED,
                finalLayout=drawn,
            )
        ]
        references = [vk.VkAttachmentReference(0, drawn)]
        subpasses = [
            vk.VkSubpassDescription(
                pipelineBindPoint=vk.VK_PIPELINE_BIND_POINT_GRAPHICS, pColorAttachments=references
            )
        ]
        info = vk.VkRenderPassCreateInfo(pAttachments=attachments, pSubpasses=subpasses)
        self._pass = self._make(stack, "RenderPass", info)
        frame = vk.VkFramebufferCreateInfo(
            renderPass=self._pass, pAttachments=views, width=width, height=height, layers=1
        )
        self._frame = self._make(stack, "Framebuffer", frame)

    def _pipeline(self, stack: ExitStack) -> None:
        vk, one = self.vk, self.vk.VK_BLEND_FACTOR_ONE
        # Blended, so that a layer that others cover is drawn all the same.
        blend = vk.VkPipelineColorBlendAttachmentState(
            blendEnable=1,
            srcColorBlendFactor=vk.VK_BLEND_FACTOR_SRC_ALPHA,
            dstColorBlendFactor=vk.VK_BLEND_FACTOR_ONE_MINUS_SRC_ALPHA,
            colorBlendOp=vk.VK_BLEND_OP_ADD,
            srcAlphaBlendFactor=one,
            dstAlphaBlendFactor=one,
            alphaBlendOp=vk.VK_BLEND_OP_ADD,
            colorWriteMask=15,
        )
        shaders = triangle_shader(), layer_shader(STEPS)
        where = vk, _call, stack, self._dev
        self._draw = triangle_pipeline(*where, shaders, self.size, blend, self._pass)

    def _recorded(self, layers: int) -> Any:
        """A submission of a frame with so many layers."""
        if layers not in self._commands:
            vk, (width, height) = self.vk, self.size
            info = vk.VkCommandBufferAllocateInfo(
                commandPool=self._pool,
                level=vk.VK_COMMAND_BUFFER_LEVEL_PRIMARY,
                commandBufferCount=1,
            )
            cmd = vk.vkAllocateCommandBuffers(self._dev, info)[0]
            vk.vkBeginCommandBuffer(cmd, vk.VkCommandBufferBeginInfo())
            clear = vk.ffi.new("VkClearValue*")
            begin = vk.VkRenderPassBeginInfo(
                renderPass=self._pass,
                framebuffer=self._frame,
                renderArea=vk.VkRect2D(vk.VkOffset2D(0, 0), vk.VkExtent2D(width, height)),
                clearValueCount=1,
                pClearValues=clear,
            )
            vk.vkCmdBeginRenderPass(cmd, begin, vk.VK_SUBPASS_CONTENTS_INLINE)
            vk.vkCmdBindPipeline(cmd, vk.VK_PIPELINE_BIND_POINT_GRAPHICS, self._draw)
            vk.vkCmdDraw(cmd, 3, layers, 0, 0)
            vk.vkCmdEndRenderPass(cmd)
            vk.vkEndCommandBuffer(cmd)
            commands = vk.ffi.new("VkCommandBuffer[]", [cmd])
            submit = vk.ffi.new("VkSubmitInfo*")
            submit.sType = vk.VK_STRUCTURE_TYPE_SUBMIT_INFO
            submit.commandBufferCount = 1
            submit.pCommandBuffers = commands
            self._commands[layers] = submit, commands
        return self._commands[layers][0]

    def frame(self, layers: int) -> float:
        """Draws a frame; seconds from its submission to its fence."""
        vk, submit = self.vk, self._recorded(layers)
        begin = time.perf_counter()
        code = vk.lib.vkQueueSubmit(self._queue, 1, submit, self._fence)
        fences = [self._fence]
        vk.vkWaitForFences(self._dev, 1, fences, 1, _FOREVER)
        took = time.perf_counter() - begin
        if code:
            raise SystemExit(f"qos_compositor: vkQueueSubmit says {code}")
        vk.vkResetFences(self._dev, 1, fences)
        return took


def calibrate(frame: Callable[[int], float], budget_s: float, trials: int = TRIALS) -> int:
    """How many layers come nearest to the budget; frame(layers) takes seconds."""

    def took(layers: int) -> float:
        return statistics.median(frame(layers) for _ in range(trials))

    low, high = 1, 2
    while (at := took(high)) < budget_s and high < MOST_LAYERS:
        low, high = high, min(2 * high, MOST_LAYERS)
    below = took(low)
    for _ in range(6):
        if high - low <= 1 or at <= below:
            break
        guess = low + int((high - low) * (budget_s - below) / (at - below) + 0.5)
        guess = min(max(guess, low + 1), high - 1)
        found = took(guess)
        if found < budget_s:
            low, below = guess, found
        else:
            high, at = guess, found
    return low if abs(budget_s - below) <= abs(at - budget_s) else high


def sleep_until(nanoseconds: int) -> None:
    """Sleeps until CLOCK_MONOTONIC says so."""
    moment = (ctypes.c_long * 2)(*divmod(nanoseconds, 1_000_000_000))
    while _LIBC.clock_nanosleep(time.CLOCK_MONOTONIC, _ABSOLUTE, moment, None) == 4:
        pass  # EINTR


class Beat:
    """Refreshes at an even pace, from `start` on; all in nanoseconds."""

    def __init__(self, start: int, hz: float) -> None:
        self.period = 1e9 / hz
        self._start = start
        self.number = 0  # of the refresh that the next frame is for
        self.missed = 0

    def due(self) -> int:
        """When the next frame begins."""
        return self._start + int(self.number * self.period)

    def done(self, now: int) -> int:
        """A frame is done; how many refreshes went by without it beyond its own."""
        late = (now - self.due()) / self.period - 1 - NEAR
        skipped = 0 if late <= 0 else int(late) + 1
        self.missed += skipped
        self.number += 1 + skipped
        return skipped


def run(
    frame: Callable[[], float],
    frames: int,
    hz: float,
    say: Callable[[dict[str, Any]], None],
    settle: int = 0,
) -> dict[str, Any]:
    """So many frames, each with its refresh; `settle` more before these are drawn and not counted.
    """
    took: list[float] = []
    began: list[float] = []
    begin = time.monotonic_ns()
    beat = Beat(begin + 10_000_000, hz)
    told, missed = begin, 0
    lately: list[float] = []
    for number in range(settle + frames):
        if number == settle:
            say({"t": "begin"})
            took, began, beat.missed, begin = [], [], 0, time.monotonic_ns()
        sleep_until(beat.due())
        began.append(round(time.monotonic(), 6))
        took.append(frame())
        lately.append(took[-1])
        now = time.monotonic_ns()
        missed += beat.done(now)
        if now - told >= REPORT_S * 1e9:
            say(
                {
                    "t": "report",
                    "missed_per_s": round(missed / (now - told) * 1e9, 2),
                    "latency_ms": round(1e3 * statistics.median(lately), 3),
                }
            )
            told, missed, lately = now, 0, []
    return {
        "t": "end",
        "took_ms": [round(1e3 * t, 4) for t in took],
        "began_s": began,
        "missed": beat.missed,
        "seconds": (time.monotonic_ns() - begin) / 1e9,
    }


def _say(message: dict[str, Any]) -> None:
    print(json.dumps(message), flush=True)


def main() -> int:
    """The program."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--frames", type=int, default=600)
    parser.add_argument("--settle", type=int, default=0, help="frames before those that count")
    parser.add_argument("--budget", type=float, default=6.0, metavar="MS")
    parser.add_argument("--layers", type=int, default=0)
    parser.add_argument("--hz", type=float, default=60.0)
    parser.add_argument("--software", action="store_true", help="a software device will do")
    args = parser.parse_args()
    with contextlib.suppress(OSError):  # compositors ask for as much
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    with Scene(args.software) as scene:
        end = time.monotonic() + WARM_S
        while time.monotonic() < end:
            scene.frame(8)
        layers = args.layers or calibrate(scene.frame, args.budget / 1e3)
        alone = statistics.median(scene.frame(layers) for _ in range(TRIALS))
        _say({"t": "ready", "device": scene.name, "layers": layers, "alone_ms": 1e3 * alone})
        if sys.stdin.readline():  # whoever started it says when
            _say(run(lambda: scene.frame(layers), args.frames, args.hz, _say, args.settle))
    return 0


if __name__ == "__main__":
    sys.exit(main())
