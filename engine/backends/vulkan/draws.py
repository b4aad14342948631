# SPDX-License-Identifier: Apache-2.0
"""Draws of one triangle over a row of pixels: what the graphics pipeline costs as a way to compute.

The target is N x 1 pixels of one float32 each. Drivers start a draw and a dispatch by different
ways, and which is cheaper is to be measured; nothing but the measurement uses this.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any


class Draws:
    """A target of `width` pixels with a pipeline that draws over all of it. `vk` and `call` are
    api's; `shaders` are SPIR-V, vertex and fragment.
    """

    def __init__(
        self,
        vk: Any,
        call: Callable[..., Any],
        stack: ExitStack,
        dev: Any,
        shaders: tuple[bytes, bytes],
        width: int,
    ) -> None:
        self._vk, self._call, self._stack, self._dev = vk, call, stack, dev
        self.width = width
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
                format=vk.VK_FORMAT_R32_SFLOAT,
                extent=vk.VkExtent3D(self.width, 1, 1),
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
                format=vk.VK_FORMAT_R32_SFLOAT,
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
                format=vk.VK_FORMAT_R32_SFLOAT,
                subresourceRange=vk.VkImageSubresourceRange(
                    vk.VK_IMAGE_ASPECT_COLOR_BIT, 0, 1, 0, 1
                ),
            ),
        )
        views = [view]
        info = vk.VkFramebufferCreateInfo(
            renderPass=self._pass, pAttachments=views, width=self.width, height=1, layers=1
        )
        return self._make("Framebuffer", info)

    def _make_pipeline(self, shaders: tuple[bytes, bytes]) -> Any:
        vk = self._vk
        blend = vk.VkPipelineColorBlendAttachmentState(
            blendEnable=0, colorWriteMask=vk.VK_COLOR_COMPONENT_R_BIT
        )
        size = self.width, 1
        where = vk, self._call, self._stack, self._dev
        return triangle_pipeline(*where, shaders, size, blend, self._pass)

    def record(self, cmd: Any, count: int, in_turn: bool, target: Any) -> None:
        """So many draws, in one render pass or, `in_turn`, in passes that wait for one another;
        then the row is copied to the buffer `target`.
        """
        vk = self._vk
        area = vk.VkRect2D(vk.VkOffset2D(0, 0), vk.VkExtent2D(self.width, 1))
        begin = vk.VkRenderPassBeginInfo(
            renderPass=self._pass, framebuffer=self._frame, renderArea=area
        )
        vk.vkCmdBindPipeline(cmd, vk.VK_PIPELINE_BIND_POINT_GRAPHICS, self._pipeline)
        passes, draws = (count, 1) if in_turn else (1, count)
        for _ in range(passes):
            vk.vkCmdBeginRenderPass(cmd, begin, vk.VK_SUBPASS_CONTENTS_INLINE)
            for _ in range(draws):
                vk.vkCmdDraw(cmd, 3, 1, 0, 0)
            vk.vkCmdEndRenderPass(cmd)
        layout = vk.VK_IMAGE_LAYOUT_TRANSFER_SRC_OPTIMAL
        region = vk.VkBufferImageCopy(
            imageSubresource=vk.VkImageSubresourceLayers(vk.VK_IMAGE_ASPECT_COLOR_BIT, 0, 0, 1),
            imageExtent=vk.VkExtent3D(self.width, 1, 1),
        )
        vk.vkCmdCopyImageToBuffer(cmd, self._image, layout, target, 1, [region])


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
) -> Any:
    """A pipeline, which goes with the stack, that draws triangles without vertex data over a colour
    target of `size` pixels, blended as the VkPipelineColorBlendAttachmentState says.
    """
    width, height = size
    layout = create(vk, call, stack, dev, "PipelineLayout", vk.VkPipelineLayoutCreateInfo())
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
