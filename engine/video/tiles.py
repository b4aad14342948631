# SPDX-License-Identifier: Apache-2.0
"""How a frame is cut: bands of rows, bands into tiles, tiles into slices.

A tile is computed from a window that reaches `halo` samples (the network's radius) beyond it on
every side and nothing else; beyond the frame its border repeats. So where the cuts lie changes no
sample of the result.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.backends.base import DeviceInfo
from kernels.contract import ceil_div
from kernels.conv3x3_winograd.op import LEAST_XS

LANES = 16  # floats: rows of activations are whole vectors on every device
PAD = 64  # floats behind the last tile, read by the last window of a row

# Sides of a tile where nobody asks for others. On CPUs a strip of two activations stays in the
# second cache; on GPUs a dispatch has to fill the device, and a slice has to stay short.
CPU_TILE = (512, 96)
# Of higher tiles less is done in vain; where tiles keep their results, small ones are of more use.
CPU_COARSE_TILE = (512, 288)
# Light networks in one call stream their rows on chip, so that larger tiles do less in vain: so
# many columns at most, and of fewer the more rows, until a slice has as many pixels as any.
CPU_LIGHT_COLUMNS, CPU_LIGHT_PIXELS, LIGHT_CHANNELS = 1024, 1024 * 288, 8
GPU_TILE = (240, 128)
# A large GPU does a frame in some milliseconds if it gets it in one piece: as many rows at once.
LARGE_GPU_ROWS = 1088
LARGE_GPU_INVOCATIONS, LARGE_GPU_SHARED = 1024, 48 << 10
# Floats of the activations of a slice, all tiles together.
SLICE_FLOATS, LARGE_GPU_FLOATS = 4 << 20, 16 << 20
# Channels of luma's size that a slice has activations of where the luma network is one call: a
# chroma network's.
FUSED_CHANNELS = 4


@dataclass(frozen=True)
class Tiling:
    """`columns` tiles of tw x th cores a band, `bands` bands; at most `batch` tiles a slice.

    xs: floats of a row of activations; rows of a tile's window: th + 2 halo; tile: floats from one
    tile's maps to the next (of `channels` channels). spread: columns to the right that a window has
    beyond the halo, where layers give columns in groups (kernels/conv3x3_winograd); 0: none do.
    """

    width: int
    height: int
    halo: int
    channels: int
    tw: int
    th: int
    batch: int
    spread: int = 0

    @property
    def columns(self) -> int:
        return ceil_div(self.width, self.tw)

    @property
    def bands(self) -> int:
        return ceil_div(self.height, self.th)

    @property
    def tiles(self) -> int:
        return self.columns * self.bands

    @property
    def xs(self) -> int:
        cols = ceil_div(self.tw + 2 * self.halo + self.spread, LANES) * LANES
        return max(cols, LEAST_XS) if self.spread else cols

    @property
    def window_rows(self) -> int:
        return self.th + 2 * self.halo

    def halved(self, halo: int, channels: int) -> Tiling:
        """The same cuts in chroma of half the size, for a network of its own."""
        width, height = ceil_div(self.width, 2), ceil_div(self.height, 2)
        return Tiling(width, height, halo, channels, self.tw // 2, self.th // 2, self.batch)

    def floats(self, channels: int) -> int:
        """From one tile to the next in a buffer of so many channels; a multiple of 64."""
        return ceil_div(self.window_rows * channels * self.xs, PAD) * PAD

    def nbytes(self, channels: int) -> int:
        """Bytes of a buffer for a slice."""
        return 4 * (self.batch * self.floats(channels) + PAD)


def _even(total: int, most: int, multiple: int) -> int:
    """The side of equal cuts of `total`, each at most about `most`, a multiple of `multiple`."""
    cuts = ceil_div(total, max(most, multiple))
    return ceil_div(ceil_div(total, cuts), multiple) * multiple


def _band_nbytes(t: Tiling, sample_bytes: int, scale: int) -> int:
    """Bytes of the larger of a band's luma buffers: rows as they lie in frames, and enlarged."""
    row, wide = (ceil_div(n * t.width * sample_bytes, 64) * 64 for n in (1, scale))
    return max(t.window_rows * row, scale * t.th * wide)


def _large(device: DeviceInfo) -> bool:
    """Is it a GPU that does a frame at once?"""
    return (
        device.kind == "gpu"
        and not device.software
        and device.limits.max_workgroup_invocations >= LARGE_GPU_INVOCATIONS
        and device.limits.max_shared_bytes >= LARGE_GPU_SHARED
    )


def _sides(
    width: int, device: DeviceInfo, channels: int, fused: bool, fine: bool
) -> tuple[int, int]:
    """Columns and rows of a tile that suit a device; the rest as in plan()."""
    if device.kind != "cpu":
        return GPU_TILE[0], LARGE_GPU_ROWS if fused and _large(device) else GPU_TILE[1]
    if fine:
        return CPU_TILE
    if fused and channels <= LIGHT_CHANNELS:
        return CPU_LIGHT_COLUMNS, CPU_LIGHT_PIXELS // _even(width, CPU_LIGHT_COLUMNS, 8)
    return CPU_COARSE_TILE


def plan(
    width: int,
    height: int,
    halo: int,
    channels: int,
    device: DeviceInfo,
    tile: int = 0,
    sample_bytes: int = 2,
    scale: int = 2,
    fused: bool = False,
    spread: int = 0,
    fine: bool = True,
) -> Tiling:
    """The cuts for a frame on a device. tile: the side to keep to, 0 for the device's own, or what
    its bindings and its grid can hold. fused: the luma network is one call; spread: as Tiling's.
    fine: tiles may keep their results from frame to frame, so that small ones are of use.

    Cuts are made equal, since a tile at the border costs as much as any other. tw is a multiple of
    8 and th even, so that output words and rows, also of half-size chroma, belong to one tile.
    """
    limits = device.limits
    wide, high = (tile, tile) if tile > 0 else _sides(width, device, channels, fused, fine)
    held, most = channels, SLICE_FLOATS  # channels of activations, and floats of a slice
    if fused and device.kind == "gpu":
        held, most = FUSED_CHANNELS, limits.max_storage_range // 4
    elif _large(device):
        most = LARGE_GPU_FLOATS
    while True:
        tw, th = _even(width, wide, 8), _even(height, high, 2)
        one = Tiling(width, height, halo, channels, tw, th, 1, spread)
        rows_fit = (
            _band_nbytes(one, sample_bytes, scale) <= limits.max_storage_range
            and one.window_rows <= limits.max_workgroup_count[1]
        )
        if tile > 0 or (rows_fit and one.nbytes(held) <= limits.max_storage_range):
            break
        if high > 2 and (not rows_fit or high >= wide or wide <= 8):
            high = max(2, min(high, th) // 2)
        elif rows_fit and wide > 8:
            wide = max(8, min(wide, tw) // 2)
        else:
            break  # nothing is left to cut; lowering says what does not fit
    largest = min(most, limits.max_storage_range // 4 - PAD)
    # conv3x3 has a group of the z axis for each four or eight channels of a tile.
    deep = limits.max_workgroup_count[2] // max(1, held // 4)
    batch = max(1, min(one.columns, largest // one.floats(held), deep))
    if device.kind == "cpu":
        batch = 1  # one tile at a time is what fits the cache
    return Tiling(width, height, halo, channels, tw, th, batch, spread)
