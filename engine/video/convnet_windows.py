# SPDX-License-Identifier: Apache-2.0
"""How a frame is cut for networks that pad: windows of one size that overlap.

Each window is computed as if it were a whole picture. Windows end where the frame ends, so the
network's own padding takes place at the frame's border alone; between them each gives the samples
that are nearer to its middle. With an overlap of the network's radius the result is that of the
whole frame (up to rounding); deep networks reach hundreds of samples, and much less is enough.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from engine.backends.base import DeviceInfo
from engine.errors import InvalidArgument
from engine.video.convnet_lower import Plan
from kernels.contract import ceil_div

OVERLAP = 32  # samples on each side, at most, where nobody asks for others
CORE = 8  # cuts lie at multiples of it: whole words of every plane
# Bytes of a window's buffers: LARGE where a GPU multiplies matrices, SOFTWARE where it is none.
BUDGET = {"cpu": 1 << 30, "gpu": 2 << 30}
LARGE, SOFTWARE = 4 << 30, 512 << 20


@dataclass(frozen=True)
class Cut:
    """Along an axis: where a window begins, and the part of the frame that is its own."""

    begin: int
    core: int
    end: int  # of the core, exclusive


@dataclass(frozen=True)
class Windows:
    """Windows of width x height samples, in rows and columns of cuts."""

    width: int
    height: int
    overlap: int
    rows: tuple[Cut, ...]
    columns: tuple[Cut, ...]

    @property
    def tw(self) -> int:
        """Samples across of what a window gives (the last one less)."""
        return self.columns[0].end

    @property
    def th(self) -> int:
        """Rows of what a window gives."""
        return self.rows[0].end

    @property
    def tiles(self) -> int:
        return len(self.rows) * len(self.columns)


def windows(
    plan: Plan, width: int, height: int, device: DeviceInfo, tile: int = 0, overlap: int = 0
) -> Windows:
    """The windows of a frame. tile: the side of the part that is a window's own (0: as large as the
    device's memory allows); overlap: 0 is the network's radius or OVERLAP, what is less.

    Raises:
        InvalidArgument: no window fits the device.
    """
    around = overlap or min(plan.radius, OVERLAP)
    around = ceil_div(around, 2) * 2
    if tile:
        side = ceil_div(tile, CORE) * CORE
        return _cut(plan, width, height, side, side, around)
    most = BUDGET.get(device.kind, SOFTWARE)
    if device.kind == "gpu" and device.software:
        most = SOFTWARE
    elif "coopmat" in device.features:
        most = LARGE
    tall, wide = ceil_div(height, CORE) * CORE, ceil_div(width, CORE) * CORE
    while True:
        found = _cut(plan, width, height, tall, wide, around)
        if _fits(plan, found, device, most):
            return found
        if max(tall, wide) <= CORE:
            raise InvalidArgument("The network's smallest tile does not fit the device.")
        if wide >= tall:
            wide = ceil_div(wide // 2, CORE) * CORE
        else:
            tall = ceil_div(tall // 2, CORE) * CORE


def _fits(plan: Plan, found: Windows, device: DeviceInfo, most: int) -> bool:
    pixels = found.width * found.height
    if pixels * plan.sample_bytes > most:
        return False
    largest = max(
        4 * lanes * blocks * scale**2
        for (scale, lanes), blocks in zip(plan.buffers.kinds, plan.buffers.blocks, strict=True)
    )
    # Borders and what fills up rows are a few percent of small windows.
    room = 1.1 * float(largest) * (found.width + 16) * (found.height + 16)
    limits = device.limits
    rows = found.height * plan.scale
    return room <= limits.max_storage_range and rows <= limits.max_workgroup_count[1]


def _cut(plan: Plan, width: int, height: int, tall: int, wide: int, around: int) -> Windows:
    h, rows = _axis(height, tall, around, plan.multiple)
    w, columns = _axis(width, wide, around, plan.multiple)
    return Windows(w, h, around, rows, columns)


def _axis(size: int, core: int, around: int, multiple: int) -> tuple[int, tuple[Cut, ...]]:
    """The windows' size along an axis, and the cuts."""
    whole = ceil_div(size, multiple) * multiple, (Cut(0, 0, size),)
    own = ceil_div(ceil_div(size, ceil_div(size, core)), CORE) * CORE
    length = ceil_div(own + 2 * around, multiple) * multiple
    if multiple == 1:
        length += (size - length) % 2  # the last window begins at an even sample, too
    if own >= size or length >= size:
        return whole
    step = 2 * multiple // math.gcd(2, multiple)
    last = ceil_div(size - length, step) * step
    cuts = []
    for i in range(ceil_div(size, own)):
        begin = max(0, i * own - around) // step * step
        cuts.append(Cut(min(begin, last), i * own, min(size, (i + 1) * own)))
    return length, tuple(cuts)
