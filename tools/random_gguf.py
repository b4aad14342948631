#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes a GGUF model of a known shape whose weights are random.

    python -m tools.random_gguf SHAPE WEIGHTS OUT.gguf [--seed N]

How fast an engine is, and what memory it takes, hangs on the shape and not on the values. What such
a model says is noise. The vocabulary is made up: three special tokens, the 256 bytes, then words.
Tensors are made and written one by one, so that a large model needs no more memory than its largest
matrix. Large ones are parts of a long row of random blocks again and again, each from another place
on: drawing them would take longer than all else. Needs the package gguf.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt

CONTEXT = 8192
_SPECIAL = (b"<unk>", b"<s>", b"</s>")
# Of so many blocks a matrix is large, and of so many at most are drawn. That is a prime, and more
# than matrices have rows: no two rows are the same.
_MANY, _DRAWN = 1 << 16, 1_000_003


@dataclass(frozen=True)
class Shape:
    """Sizes of a llama-like decoder; `tied`: the embedding is the output matrix, too. With
    `experts` there are so many feed-forward parts, of which a token uses `used`.
    """

    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    vocab: int
    rope_base: float
    tied: bool = False
    experts: int = 0
    used: int = 0

    @property
    def head(self) -> int:
        return self.hidden // self.heads

    def matrices(self) -> Iterator[tuple[str, int, int]]:
        """Name, rows and columns of each matrix."""
        yield "token_embd", self.vocab, self.hidden
        if not self.tied:
            yield "output", self.vocab, self.hidden
        kv = self.kv_heads * self.head
        for i in range(self.layers):
            yield f"blk.{i}.attn_q", self.hidden, self.hidden
            yield f"blk.{i}.attn_k", kv, self.hidden
            yield f"blk.{i}.attn_v", kv, self.hidden
            yield f"blk.{i}.attn_output", self.hidden, self.hidden
            kind, count = ("_exps", self.experts) if self.experts else ("", 1)
            yield f"blk.{i}.ffn_gate{kind}", count * self.ffn, self.hidden
            yield f"blk.{i}.ffn_up{kind}", count * self.ffn, self.hidden
            yield f"blk.{i}.ffn_down{kind}", count * self.hidden, self.ffn

    def routers(self) -> Iterator[str]:
        """Names of the matrices that choose experts, each experts x hidden."""
        if self.experts:
            yield from (f"blk.{i}.ffn_gate_inp" for i in range(self.layers))

    def norms(self) -> Iterator[str]:
        """Names of the norms, each `hidden` wide."""
        yield "output_norm"
        for i in range(self.layers):
            yield f"blk.{i}.attn_norm"
            yield f"blk.{i}.ffn_norm"


SHAPES = {
    "tiny": Shape(2, 64, 192, 4, 2, 512, 1e4),
    "smollm2-135m": Shape(30, 576, 1536, 9, 3, 49152, 1e5, tied=True),
    "llama3-1b": Shape(16, 2048, 8192, 32, 8, 128256, 5e5, tied=True),
    "phi3-mini": Shape(32, 3072, 8192, 32, 32, 32064, 1e4),
    # A quarter of OLMoE's layers, at half its width.
    "olmoe-small": Shape(4, 1024, 512, 16, 16, 50304, 1e4, experts=64, used=8),
    "llama3-8b": Shape(32, 4096, 14336, 32, 8, 128256, 5e5),
}
WEIGHTS = {
    "q4_0": gguf.GGMLQuantizationType.Q4_0,
    "q4_1": gguf.GGMLQuantizationType.Q4_1,
    "q8_0": gguf.GGMLQuantizationType.Q8_0,
    "f16": gguf.GGMLQuantizationType.F16,
}


def matrix_bytes(weights: str, rows: int, columns: int) -> int:
    """Size of a matrix in the file."""
    block, nbytes = gguf.GGML_QUANT_SIZES[WEIGHTS[weights]]
    return rows * columns // block * nbytes


def token_bytes(shape: Shape, weights: str) -> int:
    """Bytes of matrices that a decoded token has to read: all but an embedding of its own, and the
    experts that it does not use.
    """
    whole = sum(
        matrix_bytes(weights, rows * shape.used // shape.experts if "_exps" in name else rows, k)
        for name, rows, k in shape.matrices()
    )
    whole += sum(4 * shape.experts * shape.hidden for _ in shape.routers())
    return whole - (0 if shape.tied else matrix_bytes(weights, shape.vocab, shape.hidden))


def _random(
    rng: np.random.Generator, weights: str, rows: int, columns: int, of: int = 0
) -> npt.NDArray[np.uint8]:
    """A matrix of rows x columns as it stands in the file, uint8 [rows, bytes of a row]. Values
    have about the variance 1 / columns (`of`: that of a matrix of so many), so that activations
    neither vanish nor overflow.
    """
    deviation = (of or columns) ** -0.5
    if weights == "f16":
        values = rng.standard_normal((rows, columns), np.float32) * np.float32(deviation)
        return values.astype("<f2").view(np.uint8)
    block, nbytes = gguf.GGML_QUANT_SIZES[WEIGHTS[weights]]
    raw = np.frombuffer(rng.bytes(matrix_bytes(weights, rows, columns)), np.uint8)
    blocks = raw.reshape(-1, nbytes).copy()
    most = 127 if weights == "q8_0" else 8
    scale = 3**0.5 * deviation / most  # of values spread evenly over -most..most
    head = [scale, -7.5 * scale] if weights == "q4_1" else [scale]  # scale, and the least value
    blocks[:, : 2 * len(head)] = np.asarray(head, "<f2").view(np.uint8)
    return blocks.reshape(rows, columns // block * nbytes)


class _Matrices:
    """Makes a model's matrices as `_random` does, large ones out of blocks that were drawn once."""

    def __init__(self, rng: np.random.Generator, weights: str) -> None:
        self._rng, self._weights = rng, weights
        self._values = gguf.GGML_QUANT_SIZES[WEIGHTS[weights]][0] if weights != "f16" else 32
        self._drawn: dict[int, npt.NDArray[np.uint8]] = {}  # by columns

    def next(self, rows: int, columns: int) -> npt.NDArray[np.uint8]:
        count = rows * columns // self._values
        if count < _MANY:
            return _random(self._rng, self._weights, rows, columns)
        if columns not in self._drawn:
            raw = _random(self._rng, self._weights, 1, _DRAWN * self._values, columns)
            self._drawn[columns] = raw.reshape(_DRAWN, -1)
        drawn = self._drawn[columns]
        out = np.empty((count, drawn.shape[1]), np.uint8)
        at, begin = 0, int(self._rng.integers(_DRAWN))
        while at < count:
            part = drawn[begin : begin + count - at]
            out[at : at + len(part)] = part
            at, begin = at + len(part), 0
        return out.reshape(rows, -1)


def _describe(writer: gguf.GGUFWriter, shape: Shape) -> None:
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(shape.hidden)
    writer.add_block_count(shape.layers)
    writer.add_feed_forward_length(shape.ffn)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_rope_dimension_count(shape.head)
    writer.add_rope_freq_base(shape.rope_base)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(shape.vocab)
    if shape.experts:
        writer.add_expert_count(shape.experts)
        writer.add_expert_used_count(shape.used)
    words = shape.vocab - len(_SPECIAL) - 256
    kinds = gguf.TokenType
    writer.add_tokenizer_model("llama")
    pieces = [b"<0x%02X>" % byte for byte in range(256)] + [b"w%d" % i for i in range(words)]
    writer.add_token_list([*_SPECIAL, *pieces])
    writer.add_token_scores([0.0] * shape.vocab)
    special = [kinds.UNKNOWN, kinds.CONTROL, kinds.CONTROL]
    writer.add_token_types([*special, *[kinds.BYTE] * 256, *[kinds.NORMAL] * words])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)


def write(path: Path, name: str, weights: str, seed: int = 0) -> None:
    """Writes the model of a shape; the file is complete or not there."""
    shape, part = SHAPES[name], path.with_name(f"{path.name}.part")
    writer = gguf.GGUFWriter(str(part), "llama")
    # llama.cpp looks for tokens of its own in models that are called phi3.
    writer.add_name(f"random-{name}-{weights}".replace("phi3", "phi"))
    _describe(writer, shape)
    for title, rows, columns in shape.matrices():
        nbytes = matrix_bytes(weights, rows, columns)
        size: tuple[int, ...] = (rows, nbytes // rows)
        if title.endswith("_exps"):
            size = (shape.experts, rows // shape.experts, nbytes // rows)
        # A shape of bytes is turned into one of weights.
        writer.add_tensor_info(
            f"{title}.weight", size, np.dtype(np.uint8), nbytes, WEIGHTS[weights]
        )
    for title in shape.routers():
        size = (shape.experts, shape.hidden)
        nbytes = 4 * shape.experts * shape.hidden
        writer.add_tensor_info(f"{title}.weight", size, np.dtype(np.float32), nbytes)
    for title in shape.norms():
        width = (shape.hidden,)
        writer.add_tensor_info(f"{title}.weight", width, np.dtype(np.float32), 4 * shape.hidden)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    rng = np.random.default_rng(seed)
    matrices = _Matrices(rng, weights)
    for _, rows, columns in shape.matrices():
        writer.write_tensor_data(matrices.next(rows, columns))
    for _ in shape.routers():
        router = rng.standard_normal((shape.experts, shape.hidden), np.float32)
        writer.write_tensor_data(router * np.float32(3 * shape.hidden**-0.5))
    for _ in shape.norms():
        writer.write_tensor_data(np.ones(shape.hidden, np.float32))
    writer.close()
    part.rename(path)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("weights", choices=WEIGHTS)
    parser.add_argument("out", type=Path, metavar="OUT.gguf")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    write(args.out, args.shape, args.weights, args.seed)
    return 0


if __name__ == "__main__":
    sys.exit(main())
