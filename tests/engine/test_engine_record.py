# SPDX-License-Identifier: Apache-2.0
"""Lowering goes on with the variants that are left."""

from __future__ import annotations

from typing import Any

import pytest

from engine.backends.base import NOTHING
from engine.backends.null import NullBackend
from engine.backends.selftest import Quarantined
from engine.errors import BadModel
from engine.program import Buffer, Program
from engine.record import recorded
from engine.variants import NoKernel, allowed


class Doubting(NullBackend):
    """Finds variants wrong when it gets them."""

    def __init__(self, *wrong: str) -> None:
        super().__init__()
        self.wrong = wrong
        self.known: set[str] = set()

    def misfit(self, op: str, variant: str) -> str:
        return "too large" if variant == "wide" else ""

    def doubt(self, op: str, variant: str) -> str:
        return f"null cannot be trusted with {op}.{variant}" if variant in self.known else ""

    def executable(self, program: Program, weights: Any, lent: Any = NOTHING) -> Any:
        variant = str(program.meta["variant"])
        if variant in self.wrong:
            self.known.add(variant)
            raise Quarantined(self.doubt("op", variant))
        return super().executable(program, weights, lent)


def make(backend: Doubting, *variants: str) -> Any:
    def program() -> Program:
        for v in variants:
            if allowed(backend)("op", v):
                return Program({"params": Buffer("params", 64, "params")}, {}, {"variant": v})
        raise NoKernel("There is none.", "op", variants)

    return program


def test_the_next_variant_is_taken() -> None:
    backend = Doubting("dot", "subgroup")
    weights = backend.weights({})
    program, _ = recorded(backend, make(backend, "wide", "dot", "subgroup", "base"), weights)
    assert program.meta["variant"] == "base"


def test_no_variant_is_left() -> None:
    backend = Doubting("dot", "base")
    for _ in range(2):  # found now, known already
        with pytest.raises(Quarantined, match=r"op\.dot, and there is no other kernel for op"):
            recorded(backend, make(backend, "wide", "dot", "base"), backend.weights({}))


def test_nothing_fits() -> None:
    backend = Doubting()
    with pytest.raises(BadModel, match="There is none"):
        recorded(backend, make(backend, "wide"), backend.weights({}))


def test_a_backend_that_does_not_keep_its_word() -> None:
    backend = Doubting("base")
    backend.doubt = lambda op, variant: ""  # type: ignore[method-assign]
    with pytest.raises(Quarantined):
        recorded(backend, make(backend, "base"), backend.weights({}))
