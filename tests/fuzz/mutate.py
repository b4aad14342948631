# SPDX-License-Identifier: Apache-2.0
"""Changes to inputs: of bytes, and of JSON data, where damaged brackets would end every try."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator
from typing import Any

INTERESTING = [
    0, 1, -1, 2, 3, 7, 8, 15, 16, 31, 32, 33, 63, 64, 65, 127, 128, 255, 256, 4095, 4096, 65535,
    65536, (1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 32, (1 << 63) - 1, (1 << 64) - 1, 10**400,
    -(1 << 63), 0.5, 1e308, -1e-308, float("inf"), float("nan"), True, False, None, "", "x", "ids",
    "../x", "a\0b", "\ud800", [], {}, [0], {"a": 1},
]  # fmt: skip


def places(node: Any) -> Iterator[tuple[Any, Any]]:
    """(container, key) of everything in JSON data."""
    pairs = node.items() if isinstance(node, dict) else enumerate(node)
    for key, value in list(pairs):
        yield node, key
        if isinstance(value, (dict, list)):
            yield from places(value)


def of_json(data: Any, draw: random.Random) -> Any:
    """The data with one to three values changed, taken away, doubled or swapped."""
    out = {"root": copy.deepcopy(data)}
    for _ in range(draw.randint(1, 3)):
        where = list(places(out))
        node, key = draw.choice(where)
        how, value = draw.random(), node[key]
        if how < 0.35:
            node[key] = draw.choice(INTERESTING)
        elif how < 0.55 and isinstance(value, (int, float)) and not isinstance(value, bool):
            node[key] = draw.choice([value + 1, value - 1, value * 2, -value, value * 1000])
        elif how < 0.75:
            other, place = draw.choice(where)
            node[key] = copy.deepcopy(other[place])
        elif how < 0.85 and node is not out:
            del node[key]
        elif isinstance(value, list) and value:
            value.insert(draw.randrange(len(value)), copy.deepcopy(draw.choice(value)))
    return out["root"]


def of_bytes(data: bytes, draw: random.Random, others: list[bytes]) -> bytes:
    """Some bytes changed, cut, doubled, or taken from another input."""
    out = bytearray(data)
    for _ in range(draw.choice([1, 1, 2, 4, 8])):
        at = draw.randrange(len(out) + 1)
        how = draw.random()
        if how < 0.3 and at < len(out):
            out[at] ^= 1 << draw.randrange(8)
        elif how < 0.45:
            size = draw.choice([1, 2, 4, 8])
            number = draw.choice([n for n in INTERESTING if type(n) is int and abs(n) < 1 << 64])
            out[at : at + size] = (number % (1 << 8 * size)).to_bytes(size, "little")
        elif how < 0.6:
            del out[at : at + draw.choice([1, 4, 16, 1 << 20])]
        elif how < 0.75:
            out[at:at] = out[at : at + draw.choice([1, 4, 32])] * draw.choice([1, 2, 50])
        elif how < 0.9:
            other = draw.choice(others) if others else b""
            begin = draw.randrange(len(other) + 1)
            out[at : at + 16] = other[begin : begin + draw.choice([1, 8, 64])]
        else:
            out[at:at] = draw.randbytes(draw.choice([1, 3, 9]))
    return bytes(out)


def mutated(data: bytes, seed: int, others: list[bytes]) -> bytes:
    """JSON as JSON mostly, everything else, and JSON too, as bytes."""
    draw = random.Random(seed)
    if data[:1] in (b"{", b"[") and draw.random() < 0.85:
        try:
            return json.dumps(of_json(json.loads(data), draw)).encode("utf-8", "surrogatepass")
        except (ValueError, RecursionError):
            pass
    return of_bytes(data, draw, others)
