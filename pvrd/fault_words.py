# SPDX-License-Identifier: Apache-2.0
"""How faults on purpose are written in the configuration (`debug.faults`); pvrd/workers/faults.py
has them happen.
"""

from __future__ import annotations

from dataclasses import dataclass

KINDS = ("gpu", "cpu")
FAULTS = (
    "device_lost", "hang", "exit", "nan", "nan_logits", "slow", "no_device", "vk_lost", "vk_memory",
    "memory", "node", "armed",
)  # fmt: skip
COMPILER_FAULTS = ("compile_hang", "compile_abort")


@dataclass(frozen=True)
class Fault:
    """KIND:FAULT[:N], or gpu:FAULT:KERNEL for the compiler's (then `kernel` is not empty)."""

    kind: str
    name: str
    number: int = 1
    kernel: str = ""


def parse(spec: str) -> Fault:
    """One fault.

    Raises:
        ValueError: a sentence that quotes the malformed one.
    """
    kind, _, rest = spec.partition(":")
    name, _, last = rest.partition(":")
    if kind == "gpu" and name in COMPILER_FAULTS and last:
        return Fault(kind, name, kernel=last)
    if kind in KINDS and name in FAULTS and (last.isdecimal() or rest == name):
        return Fault(kind, name, int(last or 1))
    raise ValueError(
        f"{spec!r} is no fault of the form KIND:FAULT[:N] with KIND gpu or cpu and FAULT one of"
        f" {', '.join(FAULTS)}, or gpu:FAULT:KERNEL with {' or '.join(COMPILER_FAULTS)}"
    )
