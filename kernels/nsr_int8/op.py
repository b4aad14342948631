# SPDX-License-Identifier: Apache-2.0
"""nsr_int8: nsr (kernels/nsr) with bytes between the layers, and skips.

Layers after the first multiply bytes: inputs 0..255, byte = value * inverse + zero of the channel
rounded, weights -127..127 with a unit for each output. Sums are exact; each becomes float32, gets
its unit, bias, what a skip adds, and its slope, and is rounded to bytes again; the last layer's
stay float32. `pack` tells how w lies. There is no GLSL: this is for CPUs that add products of bytes
four at a time.

Any number of channels that is a multiple of 8, up to 40 layers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from kernels import video
from kernels.contract import Contract, Groups, Variant
from kernels.nsr import op as nsr

MOST_LAYERS = 40  # STRIP_MOST_LAYERS of strip.h

Skips = Mapping[int, tuple[int, video.Array]]  # layer -> (the layer that it adds, slope of the sum)
Ranges = Sequence[video.Array]  # of each layer's result: [channels, 2], least and greatest value


def pack(
    layers: Sequence[nsr.Layer], base: video.Array, ranges: Ranges, skips: Skips | None = None
) -> video.F32:
    """Weights as the kernel reads them. ranges: of each layer but the last.

    First the first layer as in nsr.pack; for each layer but the last inverse and zero [C] of what
    it gives; for each but the first the layer that it adds (int32, -1: none), weights
    [cout / 4][3][cin / 4][3][4] words of four inputs, units, biases less what the zeros give,
    slopes and sums of the weights ([cout] each, the last layer's cout as in nsr.pack); the filters
    as there.
    """
    scale = round(len(base) ** 0.5)
    place, outs = nsr.padded_maps(scale)
    taps, bias, slope = layers[0]
    parts: list[video.Array] = [taps, bias, slope]
    codes = [_code(np.asarray(found, np.float32)) for found in ranges]
    parts += [code for pair in codes for code in pair]
    for i, (taps, bias, slope) in enumerate(layers[1:], 1):
        source, slope = (skips or {}).get(i, (-1, slope))
        if i == len(layers) - 1:
            taps, bias, slope = (nsr.spread(a, place, outs) for a in (taps, bias, slope))
        inverse, zero = codes[i - 1]
        taps = taps / inverse[:, None, None, None]
        unit = np.maximum(np.abs(taps).max(axis=(0, 1, 2)), 1e-12) / 127
        q = np.rint(taps / unit).astype(np.int8)  # [cin, 3, 3, cout]
        sums = q.sum(axis=(1, 2), dtype=np.int32).astype(np.float64)
        bias = bias - unit * (zero @ sums)
        cin, _, _, cout = q.shape
        words = q.reshape(cin // 4, 4, 3, 3, cout // 4, 4).transpose(4, 2, 0, 3, 5, 1)
        parts += [np.array([source], np.int32), np.ascontiguousarray(words).view(np.int32)]
        parts += [unit, bias, slope, sums.sum(axis=0)]
    parts.append(nsr.pack_base(base))
    return np.concatenate([_words(p).reshape(-1) for p in parts])


def _code(found: video.F32) -> tuple[video.F32, video.F32]:
    """inverse and zero of each channel; the value 0 is a byte of its own."""
    low, high = np.minimum(found[:, 0], 0), np.maximum(found[:, 1], 0)
    inverse = (255 / np.maximum(high - low, 1e-3)).astype(np.float32)
    return inverse, np.rint(-low * inverse)


def _words(a: video.Array) -> video.F32:
    if a.dtype != np.int32:
        a = a.astype(np.float32)
    return np.ascontiguousarray(a).view(np.float32)


class _Reader:
    def __init__(self, w: video.F32) -> None:
        self._w, self._at = w, 0

    def __call__(self, *shape: int) -> video.F32:
        size = int(np.prod(shape))
        self._at += size
        return self._w[self._at - size : self._at].reshape(shape)


def _maps(window: video.F32, w: video.F32, c: int, n: int, scale: int) -> tuple[Any, Any]:
    """Maps [scale^2, rows, cols] of a window, and the filters."""
    place, outs = nsr.padded_maps(scale)
    read = _Reader(w)
    taps, bias, slope = read(1, 3, 3, c), read(c), read(c)
    codes = [(read(c)[:, None, None], read(c)[:, None, None]) for _ in range(n - 1)]
    kept = []
    value = nsr.activated(nsr.convolved(window[None], taps) + bias[:, None, None], slope)
    for i in range(1, n):
        inverse, zero = codes[i - 1]
        q = np.floor(np.clip(value * inverse + zero, 0, 255) + np.float32(0.5))
        kept.append(q)
        cout = c if i < n - 1 else outs
        source = int(read(1).view(np.int32)[0])
        words = read(cout // 4, 3, c // 4, 3, 4).copy().view(np.int8)
        words = words.reshape(cout // 4, 3, c // 4, 3, 4, 4)
        taps = words.transpose(2, 5, 1, 3, 0, 4).reshape(c, 3, 3, cout).astype(np.float32)
        unit, bias, slope, _ = (read(cout) for _ in range(4))
        value = nsr.convolved(q.astype(np.float32), taps)
        value = value * unit[:, None, None] + bias[:, None, None]
        if source >= 0:
            cut, (inverse, zero) = i - source, codes[source]
            value += (kept[source][:, cut:-cut, cut:-cut] - zero) / inverse
        value = nsr.activated(value, slope)
    filters = read(outs // 4, nsr.BASE_TAPS, 4).transpose(0, 2, 1).reshape(outs, 5, 5)
    return value[place], filters[place]


def reference(params: video.Array, buffers: Mapping[str, Any], push: Mapping[str, Any]) -> None:
    w = video.floats(buffers["w"])
    given = (w, push["channels"], push["layers"], push["scale"])
    nsr.enlarge(params, buffers, push, lambda window: _maps(window, *given))


def _groups(push: Mapping[str, Any], variant: Variant) -> Groups:
    return 1, 1, 1


OP = Contract(
    name="nsr_int8",
    bindings=nsr.OP.bindings,
    push=nsr.OP.push,
    variants=(Variant("int8", (1, 1, 1)),),
    groups=_groups,
    reference=reference,
)
