# SPDX-License-Identifier: Apache-2.0
"""matmul: y[t, y0 + i] (+)= sum over k of W[i, k] x[t, k], for i < n and t < n_tokens; rows of y
are ldy apart.

accumulate = 1 adds to what y holds. The same arithmetic as matvec, a block of tokens at a time:
float32, int8 steps (CPU, `int_dot`), halves with a scale per 32 (`fp16`). `coopmat` rounds both
weights and activations to halves and adds in float32.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

import numpy as np
import numpy.typing as npt

from kernels import weights
from kernels.contract import N_TOKENS, Bind, Contract, Groups, Variant, ceil_div
from kernels.text import FORMAT_NAMES, Buffers, Push, format_variants, most_groups, spread, view

ROWS, TOKENS = 4, 4  # of an invocation of the baseline GLSL
# Bytes of shared memory: tiles of 128 rows and 64 tokens (matmul_tiled.glsl) in float32, halves
# and, with scales, int8; rows are 17 quads of tokens apart.
_TILED = {"wide": 32 * (32 + 17) * 16, "fp16": 32 * (32 + 17) * 8 + 256}
_TILED["int_dot"] = 8 * (32 + 17) * 16 + 2 * 256 + 2 * 512
_ROUNDED = {"fp16": "PACKED_HALF", "int_dot": "PACKED_INT8"}
_SHUFFLES = frozenset({"subgroup_basic", "subgroup_shuffle"})
_MATRICES = frozenset({"coopmat", "fp16", "memory_model", "subgroup_basic"})


def _tiled(fmt: str, name: str) -> Variant:
    """A workgroup takes 128 rows and 64 tokens."""
    defines = {f"FMT_{fmt.upper()}": "1", "TILED": "1", "ROWS": "128", "TOKENS": "64"}
    needs: frozenset[str] = frozenset()
    if name in _ROUNDED:
        defines[_ROUNDED[name]] = "1"
        needs = _SHUFFLES | {name}
    return Variant(f"{fmt}_{name}", (256, 1, 1), defines, needs, _TILED[name], baseline=False)


@dataclass(frozen=True)
class CoopmatTile:
    """What a workgroup and a subgroup of 32 of it take, how many elements along k in a step, and
    how many steps lie in shared memory (matmul_coopmat.glsl).
    """

    rows: int
    tokens: int
    subgroup_rows: int
    subgroup_tokens: int
    deep: int
    sides: int


# The largest for matrices of many rows, the smaller ones for workgroups to be enough.
_COOPMAT = (
    CoopmatTile(256, 128, 64, 64, 32, 1),
    CoopmatTile(128, 128, 64, 64, 32, 2),
    CoopmatTile(128, 128, 64, 32, 64, 1),
    CoopmatTile(128, 128, 64, 32, 32, 2),
    CoopmatTile(128, 256, 64, 64, 32, 1),
    CoopmatTile(64, 128, 32, 32, 64, 1),
    CoopmatTile(128, 64, 64, 32, 64, 1),
    CoopmatTile(64, 64, 32, 32, 64, 2),
)


def coopmat(fmt: str, tile: CoopmatTile) -> Variant:
    """A variant with tiles of that size; rows are 16 bytes longer in shared memory."""
    defines = {f"FMT_{fmt.upper()}": "1", "COOPMAT": "1", "PACKED_HALF": "1"}
    defines |= {name.upper(): str(value) for name, value in asdict(tile).items()}
    subgroups = tile.rows // tile.subgroup_rows * (tile.tokens // tile.subgroup_tokens)
    shared = tile.sides * (2 * tile.deep + 16) * (tile.rows + tile.tokens) + 1024 * subgroups
    name = f"{fmt}_coopmat_{tile.rows}x{tile.tokens}"
    if tile.rows == tile.tokens == 128 and tile.subgroup_tokens == 32:
        name += f"_{tile.deep}"
    return Variant(name, (32 * subgroups, 1, 1), defines, _MATRICES, shared, baseline=False)


def _variants() -> tuple[Variant, ...]:
    out: list[Variant] = []
    for base in format_variants(32):
        fmt = base.name
        out += [base, _tiled(fmt, "wide"), _tiled(fmt, "fp16")]
        out += [_tiled(fmt, "int_dot")] if fmt != "f16" else []
        out += [coopmat(fmt, sizes) for sizes in _COOPMAT]
    return tuple(out)


def tile(variant: Variant) -> tuple[int, int]:
    """Rows and tokens that a workgroup takes."""
    if variant.baseline:
        return ROWS * variant.workgroup[0], TOKENS
    return int(variant.defines["ROWS"]), int(variant.defines["TOKENS"])


def groups(push: Push, variant: Variant) -> Groups:
    rows, tokens = tile(variant)
    return (
        ceil_div(push["n"], rows),
        *spread(ceil_div(push["tokens"], tokens), most_groups(push)[1]),
    )


def reference(params: npt.NDArray[np.uint32], buffers: Buffers, push: Push) -> None:
    n, k, y0, ldy = (int(push[name]) for name in ("n", "k", "y0", "ldy"))
    tokens = int(params[N_TOKENS])
    w = weights.unpack(FORMAT_NAMES[push["fmt"]], buffers["w"], n, k).astype(np.float64)
    x = view(buffers["x"], np.float32)[: tokens * k].reshape(tokens, k).astype(np.float64)
    y = view(buffers["y"], np.float32)
    for t, row in enumerate(x @ w.T):
        part = y[t * ldy + y0 : t * ldy + y0 + n]
        part[:] = row + part if push["accumulate"] else row


OP = Contract(
    name="matmul",
    bindings=(Bind("w", "r"), Bind("x", "r"), Bind("y", "rw")),
    push=(
        ("fmt", "u32"),
        ("n", "u32"),
        ("k", "u32"),
        ("accumulate", "u32"),
        ("y0", "u32"),
        ("ldy", "u32"),
    ),
    variants=_variants(),
    groups=groups,
    reference=reference,
)
