# SPDX-License-Identifier: Apache-2.0
"""libpvrkernels.so: its functions as ctypes has them, which releases the GIL around each call."""

from __future__ import annotations

import ctypes
import functools
import os
from typing import Any

import numpy as np
import numpy.typing as npt

import kernels
from engine.errors import PvrError


@functools.cache
def library() -> ctypes.CDLL:
    """The library of this process.

    Raises:
        PvrError: it cannot be loaded.
    """
    # Idle threads of a team sleep soon: the next slice may be seconds away, and other programs want
    # the CPU.
    os.environ.setdefault("GOMP_SPINCOUNT", "20000")
    try:
        lib = ctypes.CDLL(str(kernels.artifacts() / "libpvrkernels.so"))
    except OSError as e:
        raise PvrError(f"the kernels cannot be loaded: {e}") from e
    lib.pvr_op_index.argtypes = [ctypes.c_char_p]
    lib.pvr_isa.restype = ctypes.c_char_p
    lib.pvr_isa_at.argtypes = [ctypes.c_int]
    lib.pvr_isa_at.restype = ctypes.c_char_p
    lib.pvr_set_isa.argtypes = [ctypes.c_char_p]
    lib.pvr_run.argtypes = [ctypes.c_void_p, ctypes.c_uint32, ctypes.c_int]
    address, size, word = ctypes.c_void_p, ctypes.c_int64, ctypes.c_uint32
    lib.pvr_held.argtypes = [
        address, size, address, size, ctypes.c_int, word, word, word, word, address, word, address
    ]  # fmt: skip
    lib.pvr_held.restype = None
    return lib


def held(
    low: npt.NDArray[Any],
    high: npt.NDArray[Any],
    scale: int,
    sparse: int,
    firsts: npt.NDArray[np.int64],
) -> npt.NDArray[np.float64]:
    """How far a video result is from a bilinear estimate, on a sparse grid: [3, tiles], sums of the
    difference, of its size, and of the steps to the neighbours (pvr_held of pvr.h).

    low, high: [rows, width] and [scale rows, scale width] of one type, u8 or u16, the samples of a
    row side by side. firsts: of each tile the first column of the grid.

    Raises:
        ValueError: these are no such planes, or a tile begins beside them.
    """
    height, width = low.shape
    bad = high.dtype != low.dtype or low.itemsize not in (1, 2)
    bad |= high.shape[0] < scale * (height - 1) + 1 or high.shape[1] < scale * (width - 1) + 1
    if bad or low.strides[1] != low.itemsize or high.strides[1] != low.itemsize:
        raise ValueError(f"{high.shape} {high.dtype} is no result of {low.shape} {low.dtype}")
    sums = np.empty((3, len(firsts)))
    firsts = np.ascontiguousarray(firsts, np.int64)
    if len(firsts) and not (firsts.min() >= 0 and sparse * firsts.max() < width):
        raise ValueError(f"a tile begins beside a plane of {width} columns")
    library().pvr_held(
        low.ctypes.data, low.strides[0], high.ctypes.data, high.strides[0], low.itemsize,
        height, width, scale, sparse, firsts.ctypes.data, len(firsts), sums.ctypes.data,
    )  # fmt: skip
    return sums
