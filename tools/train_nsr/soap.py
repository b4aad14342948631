# SPDX-License-Identifier: Apache-2.0
"""An optimiser that knows how a layer's weights depend on each other: SOAP.

The means of G G' and G' G of a layer's gradient G [rows, columns] have eigenvectors; Adam runs on
the gradient as these see it (Vyas et al., "SOAP: Improving and Stabilizing Shampoo using Adam",
ICLR 2025). Biases, slopes and filters have plain Adam. `step` can be captured; `refresh` turns the
eigenvectors towards the gradients of late and cannot.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

BETAS = (0.9, 0.99)
MEMORY = 0.995  # what a step keeps of the means of G G' and G' G
FIRST = 100  # steps before the eigenvectors are computed, not turned
TINY = 1e-12


class Matrices:
    """The state of the layers of one size [count, rows, columns]."""

    def __init__(self, weights: Tensor) -> None:
        count, *sides = weights.shape
        self.weights = weights
        self.mean, self.square = torch.zeros_like(weights), torch.zeros_like(weights)
        self.products = [weights.new_zeros(count, n, n) for n in sides]
        self.bases = [torch.eye(n, device=weights.device).repeat(count, 1, 1) for n in sides]

    def forget(self) -> None:
        for t in (self.mean, self.square, *self.products):
            t.zero_()
        for base in self.bases:
            base.copy_(torch.eye(base.shape[-1], device=base.device))

    def seen(self, x: Tensor) -> Tensor:
        """`x` in the bases."""
        return self.bases[0].mT @ x @ self.bases[1]

    def step(self, rate: Tensor, corrections: Sequence[Tensor]) -> None:
        g = self.weights.grad
        assert g is not None
        for product, of in zip(self.products, (g @ g.mT, g.mT @ g), strict=True):
            product.lerp_(of, 1 - MEMORY)
        self.mean.lerp_(g, 1 - BETAS[0])
        self.square.lerp_(self.seen(g).square(), 1 - BETAS[1])
        by = (self.square / corrections[1]).sqrt() + TINY
        turned = self.seen(self.mean) / corrections[0] / by
        self.weights.sub_(rate * (self.bases[0] @ turned @ self.bases[1].mT))

    def refresh(self, first: bool) -> None:
        for base, product in zip(self.bases, self.products, strict=True):
            if first:
                base.copy_(torch.linalg.eigh(product)[1].flip(-1))
            else:
                base.copy_(torch.linalg.qr(product @ base)[0])


class Soap:
    """`matrices` [count, rows, columns] by SOAP, `others` by Adam, all at `rate` (one number)."""

    def __init__(self, matrices: Sequence[Tensor], others: Sequence[Tensor], rate: Tensor) -> None:
        self.rate, cuda = rate, rate.is_cuda
        self.matrices = [Matrices(m) for m in matrices]
        self.all = [*matrices, *others]
        self.adam = torch.optim.Adam(others, lr=rate, betas=BETAS, capturable=cuda, fused=cuda)
        self.steps = torch.zeros((), device=rate.device)

    @torch.no_grad()
    def forget(self) -> None:
        """As before the first step, for weights that were put in meanwhile."""
        self.steps.zero_()
        for m in self.matrices:
            m.forget()

    def zero_grad(self, set_to_none: bool = False) -> None:
        for p in self.all:
            if p.grad is not None:
                p.grad.zero_()

    @torch.no_grad()
    def step(self) -> None:
        self.adam.step()
        self.steps += 1
        corrections = [1 - torch.exp(self.steps * math.log(b)) for b in BETAS]
        for m in self.matrices:
            m.step(self.rate, corrections)

    @torch.no_grad()
    def refresh(self) -> None:
        """Not to be captured."""
        first = bool(self.steps <= FIRST)
        for m in self.matrices:
            m.refresh(first)
