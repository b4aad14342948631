# SPDX-License-Identifier: Apache-2.0
"""Which variant of an operation a device gets: what fits it, what its self-tests let through, and
what it measured to be the fastest.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

from engine.backends.base import Backend, DeviceInfo
from engine.backends.gate import variant_misfit
from engine.errors import BadModel
from kernels.contract import Contract, Variant

# May this operation's variant be used? (A self-test may have put it aside.)
Allow = Callable[[str, str], bool]


class NoKernel(BadModel):
    """No variant (of `variants`) of an operation fits the device or may be used."""

    def __init__(self, sentence: str, op: str, variants: tuple[str, ...]) -> None:
        super().__init__(sentence)
        self.op, self.variants = op, variants


def allow_all(op: str, variant: str) -> bool:
    """Every variant may be used."""
    return True


class Allowed:
    """What a backend's own gate lets through: a GPU's manifest knows what a SPIR-V needs beyond
    the numbers in op.py, and its self-tests which variants are wrong; a CPU, what was compiled; and
    what it says of their speed.
    """

    def __init__(self, backend: Backend) -> None:
        self._misfit = getattr(backend, "misfit", None)
        self._doubt = getattr(backend, "doubt", None)
        self._fastest = getattr(backend, "fastest", None)

    def __call__(self, op: str, variant: str) -> bool:
        asked = (ask for ask in (self._misfit, self._doubt) if ask is not None)
        return not any(ask(op, variant) for ask in asked)

    @property
    def measures(self) -> bool:
        """Does the backend tell which variant is the fastest?"""
        return self._fastest is not None

    def fastest(self, op: str, variants: Sequence[str], push: Mapping[str, float]) -> str:
        """One of the variants: the first where the backend does not measure."""
        return self._fastest(op, variants, push) if self._fastest else variants[0]


def allowed(backend: Backend) -> Allowed:
    """What lowering should ask about a backend's variants."""
    return Allowed(backend)


def choose(
    contract: Contract,
    device: DeviceInfo,
    fmt: str | None,
    allow: Allow,
    push: Mapping[str, float] | None = None,
    large: Collection[str] = (),
) -> Variant:
    """The variant for a device: of those that fit the one that its backend measured to be the
    fastest for a call like `push`; without measurements (or `push`) the first baseline one.

    Variants of operations that read weights or caches are named after the format, alone or with a
    suffix (`q4`, `q4_dot`). Bindings that are too `large` to be bound have to be addressed.

    Raises:
        NoKernel: no variant is left.
        DeviceLost: while it was measured.
    """
    named = [
        v for v in contract.variants if fmt is None or v.name == fmt or v.name.startswith(f"{fmt}_")
    ]
    fitting = (
        v.name
        for v in sorted(named, key=lambda v: not v.baseline)
        if set(large) <= set(v.addressed)
        and not variant_misfit(contract, v, device.limits, device.features)
        and allow(contract.name, v.name)
    )
    if push is not None and isinstance(allow, Allowed) and allow.measures:
        if candidates := list(fitting):
            return contract.variant(allow.fastest(contract.name, candidates, push))
    elif first := next(fitting, ""):  # the others need no look: there are hundreds of calls
        return contract.variant(first)
    what = f"{contract.name} {fmt}" if fmt else contract.name
    raise NoKernel(
        f"The device {device.name} has no kernel for {what}.",
        contract.name,
        tuple(v.name for v in named),
    )
