# SPDX-License-Identifier: Apache-2.0
"""A session's KV caches on the way from one device to another, in a file in memory.

A JSON line padded to ALIGN {version, context, form, tokens, caches [[name, kv_heads, dim]], notes},
the ids of the tokens (i32), then each cache as kernels/kv.py lays it out for so many positions.
Who takes it in may have caches of another form: then it is converted. The notes are what an answer
goes on with besides (Generation.notes).
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from engine import memory
from engine.text.model import State
from kernels import kv

VERSION = 1
ALIGN = 4096
MOST_HEADER = 1 << 20

Array = npt.NDArray[Any]
Shape = tuple[int, int]  # kv_heads, dim


def shapes(state: State) -> dict[str, Shape]:
    """Of each cache."""
    found = {}
    for node in state.model.graph.nodes:
        if "layer" in node.attrs and "kv_heads" in node.attrs:
            for name in ("kc", "vc"):
                shape = node.int("kv_heads"), node.int("dim")
                found[f"{name}.{node.int('layer')}"] = shape
    return {name: found[name] for name in state.caches}


def nbytes(state: State) -> int:
    """Of the file, about: without its header."""
    count = len(state.tokens)
    sizes = (kv.nbytes(state.kv, heads, count, dim) for heads, dim in shapes(state).values())
    return 4 * count + sum(sizes)


def export(state: State, fd: int, limit: int, notes: Mapping[str, float] | None = None) -> int:
    """Writes what the state has computed, and `notes`; the file's size, 0 when it would be above
    `limit`, or there is nothing. The file stays the caller's.

    Raises:
        OSError: there is no room for it.
        DeviceLost
    """
    count = len(state.tokens)
    if not count:
        return 0
    every = shapes(state)
    header = {
        "version": VERSION, "context": state.context, "form": state.kv, "tokens": count,
        "caches": [[name, *shape] for name, shape in every.items()], "notes": dict(notes or {}),
    }  # fmt: skip
    line = json.dumps(header).encode() + b"\n"
    line = line.ljust(-(-len(line) // ALIGN) * ALIGN)
    if len(line) + nbytes(state) > limit:
        return 0
    at = _put(fd, line, 0)
    at = _put(fd, np.asarray(state.tokens, "<i4").tobytes(), at)
    for name, (heads, dim) in every.items():
        at = _put(fd, _read(state, name, (heads, state.context, dim), count), at)
    return at


def _notes(header: Mapping[str, Any]) -> dict[str, float]:
    """None where they are damaged."""
    try:
        return {str(key): float(value) for key, value in header["notes"].items()}
    except (ValueError, KeyError, TypeError, AttributeError):
        return {}


def adopt(state: State, fd: int) -> dict[str, float] | None:
    """Takes a file in, in the place of what the state had: its notes; None, and a state without a
    token, when the file is of another model or damaged. The file stays the caller's.

    Raises:
        DeviceLost
    """
    state.tokens.clear()
    first = os.pread(fd, MOST_HEADER, 0)
    line, newline, _ = first.partition(b"\n")
    try:
        header = json.loads(line)
        count, form = int(header["tokens"]), str(header["form"])
        listed = {str(name): (int(h), int(d)) for name, h, d in header["caches"]}
    except (ValueError, KeyError, TypeError):
        return None
    fits = header.get("version") == VERSION and header.get("context") == state.context
    fits = fits and form in kv.FORMATS and listed == shapes(state)
    if not newline or not fits or not 0 < count <= state.context:
        return None
    at = -(-(len(line) + 1) // ALIGN) * ALIGN
    ids = np.frombuffer(os.pread(fd, 4 * count, at), "<i4")
    sizes = {name: kv.nbytes(form, h, count, d) for name, (h, d) in listed.items()}
    wrong = len(ids) != count or ids.min() < 0 or ids.max() >= state.model.vocab
    if wrong or os.fstat(fd).st_size < at + 4 * count + sum(sizes.values()):
        return None
    at += 4 * count
    memory.admit({"a cache on its way": 2 * max(sizes.values())})
    for name, (heads, dim) in listed.items():
        data = np.frombuffer(_get(fd, sizes[name], at), np.uint8)
        at += sizes[name]
        if form != state.kv:
            data = converted(data, (heads, count, dim), form, state.kv)
        _write(state, name, (heads, state.context, dim), count, data)
    state.tokens.extend(ids.tolist())
    return _notes(header)


def converted(data: Array, shape: tuple[int, int, int], form: str, other: str) -> Array:
    """A cache in another form."""
    rows = kv.load(form, data, shape)
    if other == "f16":
        return rows.astype(np.float16).reshape(-1).view(np.uint8)
    values, scales = kv.quantise(rows)
    parts = (values.reshape(-1).view(np.uint8), scales.reshape(-1).view(np.uint8))
    return np.concatenate(parts)


def _runs(state: State, shape: tuple[int, int, int], count: int) -> list[tuple[int, int]]:
    return kv.runs(state.kv, shape, range(shape[0]), 0, count)


def _read(state: State, name: str, shape: tuple[int, int, int], count: int) -> bytes:
    """The first `count` positions of a cache."""
    runs, read = _runs(state, shape, count), state.executable.read
    if 2 * count < state.context:
        return b"".join(read(name, size, place).tobytes() for place, size in runs)
    # Most of it: one copy is quicker than many.
    whole = read(name, kv.nbytes(state.kv, *shape))
    return b"".join(whole[place : place + size].tobytes() for place, size in runs)


def _write(
    state: State, name: str, shape: tuple[int, int, int], count: int, data: Array
) -> None:
    runs, at = _runs(state, shape, count), 0
    whole = None
    if 2 * count >= state.context:
        whole = np.zeros(kv.nbytes(state.kv, *shape), np.uint8)
    for place, size in runs:
        part = data[at : at + size]
        at += size
        if whole is None:
            state.executable.write(name, part, place)
        else:
            whole[place : place + size] = part
    if whole is not None:
        state.executable.write(name, whole)


def _put(fd: int, data: bytes, at: int) -> int:
    """Writes all of it; where it ends."""
    view = memoryview(data)
    while view:
        written = os.pwrite(fd, view, at)
        view, at = view[written:], at + written
    return at


def _get(fd: int, size: int, at: int) -> bytes:
    parts = []
    while size > 0 and (part := os.pread(fd, min(size, 16 << 20), at)):
        parts.append(part)
        at, size = at + len(part), size - len(part)
    return b"".join(parts)
