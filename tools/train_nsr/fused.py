# SPDX-License-Identifier: Apache-2.0
"""Bias and PReLU in one pass, forward and backward, for channels-last pictures on CUDA.

PyTorch's own backward of prelu writes a whole picture of slope gradients and sums it afterwards,
the bias gradient is another pass; small networks spend most of their time on such passes. Elsewhere
than on CUDA plain PyTorch computes the same.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

if torch.cuda.is_available():
    import triton
    import triton.language as tl

    @triton.jit
    def _forward(y, b, s, out, n, C: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
        i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        c = i % C
        v = tl.load(y + i, i < n, 0.0).to(tl.float32) + tl.load(b + c)
        v = tl.where(v > 0, v, v * tl.load(s + c))
        tl.store(out + i, v.to(out.dtype.element_ty), i < n)

    @triton.jit
    def _backward(g, y, b, s, dy, db, ds, rows, C: tl.constexpr, ROWS: tl.constexpr):  # type: ignore[no-untyped-def]
        r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
        c = tl.arange(0, C)
        at = r[:, None] * C + c[None, :]
        inside = (r < rows)[:, None]
        grad = tl.load(g + at, inside, 0.0).to(tl.float32)
        v = tl.load(y + at, inside, 0.0).to(tl.float32) + tl.load(b + c)[None, :]
        slope = tl.load(s + c)[None, :]
        out = tl.where(v > 0, grad, grad * slope)
        tl.store(dy + at, out.to(dy.dtype.element_ty), inside)
        tl.atomic_add(db + c, tl.sum(out, 0))
        tl.atomic_add(ds + c, tl.sum(tl.where(v > 0, 0.0, grad * v), 0))


class _BiasPrelu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, bias: Tensor, slope: Tensor) -> Tensor:
        y = y.contiguous(memory_format=torch.channels_last)
        bias, slope = bias.contiguous(), slope.contiguous()
        out = torch.empty_like(y)
        n = y.numel()
        _forward[(triton.cdiv(n, 2048),)](y, bias, slope, out, n, y.shape[1], 2048)
        ctx.save_for_backward(y, bias, slope)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y, bias, slope = ctx.saved_tensors
        g = grads[0].contiguous(memory_format=torch.channels_last)
        dy = torch.empty_like(y)
        sums = torch.zeros(2, y.shape[1], device=y.device)
        channels = y.shape[1]
        rows, block = y.numel() // channels, 4096 // channels
        _backward[(triton.cdiv(rows, block),)](
            g, y, bias, slope, dy, sums[0], sums[1], rows, channels, block
        )
        return dy, sums[0], sums[1]


def bias_prelu(y: Tensor, bias: Tensor, slope: Tensor) -> Tensor:
    """prelu(y + bias) of [N, C, H, W]; C a power of two on CUDA."""
    if y.is_cuda:
        return _BiasPrelu.apply(y, bias, slope)  # type: ignore[no-any-return,no-untyped-call]
    return F.prelu(y + bias.view(-1, 1, 1), slope)
