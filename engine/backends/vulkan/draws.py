# SPDX-License-Identifier: Apache-2.0
"""Draws of one triangle over a target: what the graphics pipeline costs as a way to compute.

The target is N x 1 pixels of one float32 each, or what Target says. Drivers start a draw and a
dispatch by different ways, and which is cheaper is to be measured; nothing but the measurement uses
this.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Target:
    """Pixels and what one is (`VK_FORMAT_`). `reads`: buffers (handle, bytes) that the fragment
    shader has as bindings 0 and up. `copied`: after each draw that others wait for the target is
    copied to its buffer, which is where the next operation has it from; else once in the end.
    """

    width: int
    height: int = 1
    texel: str = "R32_SFLOAT"
    reads: tuple[tuple[Any, int], ...] = ()
    copied: bool = False


class Draws:
    """A target with a pipeline that draws over all of it. `vk` and `call` are api's; `shaders` are
    SPIR-V, vertex and fragment.
    """

    def __init__(
        self,
        vk: Any,
        call: Callable[..., Any],
        stack: ExitStack,
        dev: Any,
        shaders: tuple[bytes, bytes],
        target: Target,
    ) -> None:
        self._vk, self._call, self._stack, self._dev = vk, call, stack, dev
        self._target, self._format = target, getattr(vk, f"VK_FORMAT_{target.texel}")
        self._layout, self._sets = self._make_bindings(target.reads)
        self._image = self._make_image()
        self._pass = self._make_pass()
        self._frame = self._make_frame()
        self._pipeline = self._make_pipeline(shaders)

    def _make(self, what: str, info: Any) -> Any:
        """A handle of a kind (`Image`) that goes with the stack."""
        return create(self._vk, self._call, self._stack, self._dev, what, info)

    def _make_image(self) -> Any:
        vk, dev = self._vk, self._dev
        image = self._make(
            "Image",
            vk.VkImageCreateInfo(
                imageType=vk.VK_IMAGE_TYPE_2D,
                format=self._format,
                extent=vk.VkExtent3D(self._target.width, self._target.height, 1),
                mipLevels=1,
                arrayLayers=1,
                samples=vk.VK_SAMPLE_COUNT_1_BIT,
                tiling=vk.VK_IMAGE_TILING_OPTIMAL,
                usage=vk.VK_IMAGE_USAGE_COLOR_ATTACHMENT_BIT | vk.VK_IMAGE_USAGE_TRANSFER_SRC_BIT,
                sharingMode=vk.VK_SHARING_MODE_EXCLUSIVE,
                initialLayout=vk.VK_IMAGE_LAYOUT_UNDEFINED,
            ),
        )
        need = vk.vkGetImageMemoryRequirements(dev, image)
        first = (need.memoryTypeBits & -need.memoryTypeBits).bit_length() - 1
        info = vk.VkMemoryAllocateInfo(allocationSize=need.size, memoryTypeIndex=first)
        memory = self._call("vkAllocateMemory", vk.vkAllocateMemory, dev, info, None)
        self._stack.callback(vk.vkFreeMemory, dev, memory, None)
        self._call("vkBindImageMemory", vk.vkBindImageMemory, dev, image, memory, 0)
        return image

    def _make_pass(self) -> Any:
        vk = self._vk
        colour, transfer = (
            vk.VK_PIPELINE_STAGE_COLOR_ATTACHMENT_OUTPUT_BIT,
            vk.VK_PIPELINE_STAGE_TRANSFER_BIT,
        )
        written = vk.VK_ACCESS_COLOR_ATTACHMENT_WRITE_BIT
        attachments = [
            vk.VkAttachmentDescription(
                format=self._format,
                samples=vk.VK_SAMPLE_COUNT_1_BIT,
                loadOp=vk.VK_ATTACHMENT_LOAD_OP_DONT_CARE,
                storeOp=vk.VK_ATTACHMENT_STORE_OP_STORE,
                stencilLoadOp=vk.VK_ATTACHMENT_LOAD_OP_DONT_CARE,
                stencilStoreOp=vk.VK_ATTACHMENT_STORE_OP_DONT_CARE,
                initialLayout=vk.VK_IMAGE_LAYOUT_UNDEFINED,
                finalLayout=vk.VK_IMAGE_LAYOUT_TRANSFER_SRC_OPTIMAL,
            )
        ]
        drawn = [vk.VkAttachmentReference(0, vk.VK_IMAGE_LAYOUT_COLOR_ATTACHMENT_OPTIMAL)]
        subpasses = [
            vk.VkSubpassDescription(
                pipelineBindPoint=vk.VK_PIPELINE_BIND_POINT_GRAPHICS, pColorAttachments=drawn
            )
        ]
        outside = vk.VK_SUBPASS_EXTERNAL
        dependencies = [  # each pass after the one before and its reading; reading after the pass
            vk.VkSubpassDependency(
                srcSubpass=outside,
                dstSubpass=0,
                srcStageMask=colour | transfer,
                dstStageMask=colour,
                srcAccessMask=written,
                dstAccessMask=written,
            ),
            vk.VkSubpassDependency(
                srcSubpass=0,
                dstSubpass=outside,
                srcStageMask=colour,
                dstStageMask=colour | transfer,
                srcAccessMask=written,
                dstAccessMask=written | vk.VK_ACCESS_TRANSFER_READ_BIT,
            ),
        ]
        info = vk.VkRenderPassCreateInfo(
            pAttachments=attachments, pSubpasses=subpasses, pDependencies=dependencies
        )
        return self._make("RenderPass", info)

    def _make_frame(self) -> Any:
        vk = self._vk
        view = self._make(
            "ImageView",
            vk.VkImageViewCreateInfo(
                image=self._image,
                viewType=vk.VK_IMAGE_VIEW_TYPE_2D,
                format=self._format,
                subresourceRange=vk.VkImageSubresourceRange(
                    vk.VK_IMAGE_ASPECT_COLOR_BIT, 0, 1, 0, 1
                ),
            ),
        )
        views = [view]
        info = vk.VkFramebufferCreateInfo(
            renderPass=self._pass,
            pAttachments=views,
            width=self._target.width,
            height=self._target.height,
            layers=1,
        )
        return self._make("Framebuffer", info)

    def _make_pipeline(self, shaders: tuple[bytes, bytes]) -> Any:
        vk = self._vk
        blend = vk.VkPipelineColorBlendAttachmentState(
            blendEnable=0,
            colorWriteMask=vk.VK_COLOR_COMPONENT_R_BIT | vk.VK_COLOR_COMPONENT_G_BIT,
        )
        size = self._target.width, self._target.height
        where = vk, self._call, self._stack, self._dev
        return triangle_pipeline(*where, shaders, size, blend, self._pass, self._layout)

    def _make_bindings(self, reads: tuple[tuple[Any, int], ...]) -> tuple[Any, list[Any]]:
        """A pipeline layout, and a descriptor set where something is read."""
        vk, kind = self._vk, self._vk.VK_DESCRIPTOR_TYPE_STORAGE_BUFFER
        if not reads:
            return self._make("PipelineLayout", vk.VkPipelineLayoutCreateInfo()), []
        bindings = [
            vk.VkDescriptorSetLayoutBinding(
                binding=i,
                descriptorType=kind,
                descriptorCount=1,
                stageFlags=vk.VK_SHADER_STAGE_FRAGMENT_BIT,
            )
            for i in range(len(reads))
        ]
        info = vk.VkDescriptorSetLayoutCreateInfo(pBindings=bindings)
        layouts = [self._make("DescriptorSetLayout", info)]
        layout = self._make("PipelineLayout", vk.VkPipelineLayoutCreateInfo(pSetLayouts=layouts))
        sizes = [vk.VkDescriptorPoolSize(type=kind, descriptorCount=len(reads))]
        pool_info = vk.VkDescriptorPoolCreateInfo(maxSets=1, pPoolSizes=sizes)
        pool = self._make("DescriptorPool", pool_info)
        wanted = vk.VkDescriptorSetAllocateInfo(descriptorPool=pool, pSetLayouts=layouts)
        what, allocate = "vkAllocateDescriptorSets", vk.vkAllocateDescriptorSets
        found = self._call(what, allocate, self._dev, wanted)[0]
        for i, (buffer, nbytes) in enumerate(reads):
            ranges = [vk.VkDescriptorBufferInfo(buffer=buffer, offset=0, range=nbytes)]
            write = vk.VkWriteDescriptorSet(
                dstSet=found, dstBinding=i, descriptorCount=1, descriptorType=kind,
                pBufferInfo=ranges,
            )  # fmt: skip
            vk.vkUpdateDescriptorSets(self._dev, 1, [write], 0, None)
        return layout, [found]

    def record(self, cmd: Any, count: int, in_turn: bool, target: Any) -> None:
        """So many draws, in one render pass or, `in_turn`, in passes that wait for one another;
        then the target is copied to the buffer `target`.
        """
        vk = self._vk
        width, height = self._target.width, self._target.height
        area = vk.VkRect2D(vk.VkOffset2D(0, 0), vk.VkExtent2D(width, height))
        begin = vk.VkRenderPassBeginInfo(
            renderPass=self._pass, framebuffer=self._frame, renderArea=area
        )
        vk.vkCmdBindPipeline(cmd, vk.VK_PIPELINE_BIND_POINT_GRAPHICS, self._pipeline)
        if self._sets:
            point = vk.VK_PIPELINE_BIND_POINT_GRAPHICS
            vk.vkCmdBindDescriptorSets(cmd, point, self._layout, 0, 1, self._sets, 0, None)
        passes, draws = (count, 1) if in_turn else (1, count)
        layout = vk.VK_IMAGE_LAYOUT_TRANSFER_SRC_OPTIMAL
        region = vk.VkBufferImageCopy(
            imageSubresource=vk.VkImageSubresourceLayers(vk.VK_IMAGE_ASPECT_COLOR_BIT, 0, 0, 1),
            imageExtent=vk.VkExtent3D(width, height, 1),
        )
        for i in range(passes):
            vk.vkCmdBeginRenderPass(cmd, begin, vk.VK_SUBPASS_CONTENTS_INLINE)
            for _ in range(draws):
                vk.vkCmdDraw(cmd, 3, 1, 0, 0)
            vk.vkCmdEndRenderPass(cmd)
            if self._target.copied or i == passes - 1:
                if self._target.copied and i:
                    self._await_copy(cmd)
                vk.vkCmdCopyImageToBuffer(cmd, self._image, layout, target, 1, [region])

    def _await_copy(self, cmd: Any) -> None:
        """What was copied is written before it is written again."""
        vk = self._vk
        transfer, written = vk.VK_PIPELINE_STAGE_TRANSFER_BIT, vk.VK_ACCESS_TRANSFER_WRITE_BIT
        barrier = vk.VkMemoryBarrier(srcAccessMask=written, dstAccessMask=written)
        vk.vkCmdPipelineBarrier(cmd, transfer, transfer, 0, 1, [barrier], 0, None, 0, None)


def create(
    vk: Any, call: Callable[..., Any], stack: ExitStack, dev: Any, what: str, info: Any
) -> Any:
    """A handle of a kind (`Image`) that goes with the stack."""
    handle = call(f"vkCreate{what}", getattr(vk, f"vkCreate{what}"), dev, info, None)
    stack.callback(getattr(vk, f"vkDestroy{what}"), dev, handle, None)
    return handle


def triangle_pipeline(
    vk: Any,
    call: Callable[..., Any],
    stack: ExitStack,
    dev: Any,
    shaders: tuple[bytes, bytes],
    size: tuple[int, int],
    blend: Any,
    render_pass: Any,
    layout: Any = None,
) -> Any:
    """A pipeline, which goes with the stack, that draws triangles without vertex data over a colour
    target of `size` pixels, blended as the VkPipelineColorBlendAttachmentState says. `layout`: of
    what its shaders read (None: nothing).
    """
    width, height = size
    nothing = vk.VkPipelineLayoutCreateInfo()
    layout = layout or create(vk, call, stack, dev, "PipelineLayout", nothing)
    name = vk.ffi.new("char[]", b"main")
    kinds = (vk.VK_SHADER_STAGE_VERTEX_BIT, vk.VK_SHADER_STAGE_FRAGMENT_BIT)
    stages = []
    for code, kind in zip(shaders, kinds, strict=True):
        info = vk.VkShaderModuleCreateInfo(codeSize=len(code), pCode=code)
        module = create(vk, call, stack, dev, "ShaderModule", info)
        stages.append(vk.VkPipelineShaderStageCreateInfo(stage=kind, module=module, pName=name))
    viewports = [vk.VkViewport(0, 0, width, height, 0, 1)]
    scissors = [vk.VkRect2D(vk.VkOffset2D(0, 0), vk.VkExtent2D(width, height))]
    blends = [blend]
    vertices = vk.VkPipelineVertexInputStateCreateInfo()
    assembly = vk.VkPipelineInputAssemblyStateCreateInfo(
        topology=vk.VK_PRIMITIVE_TOPOLOGY_TRIANGLE_LIST
    )
    viewport = vk.VkPipelineViewportStateCreateInfo(pViewports=viewports, pScissors=scissors)
    raster = vk.VkPipelineRasterizationStateCreateInfo(
        polygonMode=vk.VK_POLYGON_MODE_FILL, cullMode=vk.VK_CULL_MODE_NONE, lineWidth=1.0
    )
    samples = vk.VkPipelineMultisampleStateCreateInfo(rasterizationSamples=vk.VK_SAMPLE_COUNT_1_BIT)
    blending = vk.VkPipelineColorBlendStateCreateInfo(pAttachments=blends)
    made = vk.VkGraphicsPipelineCreateInfo(
        pStages=stages,
        pVertexInputState=vertices,
        pInputAssemblyState=assembly,
        pViewportState=viewport,
        pRasterizationState=raster,
        pMultisampleState=samples,
        pColorBlendState=blending,
        layout=layout,
        renderPass=render_pass,
        subpass=0,
    )
    what = "vkCreateGraphicsPipelines"
    pipeline = call(what, vk.vkCreateGraphicsPipelines, dev, None, 1, [made], None)[0]
    stack.callback(vk.vkDestroyPipeline, dev, pipeline, None)
    return pipeline
