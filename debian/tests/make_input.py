# SPDX-License-Identifier: Apache-2.0
"""make_input.py MODEL PICTURE: a llama of one layer with random weights as GGUF, and a picture.

What the model writes is noise, but it goes the whole way. The format: docs/gguf.md of ggml,
version 3.
"""

from __future__ import annotations

import struct
import sys
from pathlib import Path

import numpy as np
from PIL import Image

UINT32, INT32, FLOAT32, STRING, ARRAY = 4, 5, 6, 8, 9
ALIGNMENT = 32
HIDDEN, FFN, HEADS, VOCAB = 64, 128, 4, 320


def text(value: str) -> bytes:
    data = value.encode()
    return struct.pack("<Q", len(data)) + data


def pair(key: str, kind: int, value: object) -> bytes:
    """A key with its value; a list is an array of that kind."""
    codes = {UINT32: "<I", INT32: "<i", FLOAT32: "<f"}

    def one(item: object) -> bytes:
        return text(str(item)) if kind == STRING else struct.pack(codes[kind], item)

    if isinstance(value, list):
        head = struct.pack("<IIQ", ARRAY, kind, len(value))
        return text(key) + head + b"".join(map(one, value))
    return text(key) + struct.pack("<I", kind) + one(value)


def model() -> bytes:
    letters = [f"<0x{i:02X}>" for i in range(256)]
    tokens = ["<unk>", "<s>", "</s>", *letters, *(f"w{i}" for i in range(VOCAB - 259))]
    pairs = [
        pair("general.architecture", STRING, "llama"),
        pair("llama.context_length", UINT32, 512),
        pair("llama.embedding_length", UINT32, HIDDEN),
        pair("llama.block_count", UINT32, 1),
        pair("llama.feed_forward_length", UINT32, FFN),
        pair("llama.attention.head_count", UINT32, HEADS),
        pair("llama.attention.head_count_kv", UINT32, HEADS // 2),
        pair("llama.rope.dimension_count", UINT32, HIDDEN // HEADS),
        pair("llama.attention.layer_norm_rms_epsilon", FLOAT32, 1e-5),
        pair("llama.vocab_size", UINT32, VOCAB),
        pair("tokenizer.ggml.model", STRING, "llama"),
        pair("tokenizer.ggml.tokens", STRING, tokens),
        pair("tokenizer.ggml.scores", FLOAT32, [0.0] * VOCAB),
        pair("tokenizer.ggml.token_type", INT32, [2, 3, 3] + [6] * 256 + [1] * (VOCAB - 259)),
        pair("tokenizer.ggml.bos_token_id", UINT32, 1),
        pair("tokenizer.ggml.eos_token_id", UINT32, 2),
    ]
    shapes = {
        "token_embd": (VOCAB, HIDDEN),
        "output": (VOCAB, HIDDEN),
        "output_norm": (HIDDEN,),
        "blk.0.attn_norm": (HIDDEN,),
        "blk.0.ffn_norm": (HIDDEN,),
        "blk.0.attn_q": (HIDDEN, HIDDEN),
        "blk.0.attn_k": (HIDDEN // 2, HIDDEN),
        "blk.0.attn_v": (HIDDEN // 2, HIDDEN),
        "blk.0.attn_output": (HIDDEN, HIDDEN),
        "blk.0.ffn_gate": (FFN, HIDDEN),
        "blk.0.ffn_up": (FFN, HIDDEN),
        "blk.0.ffn_down": (HIDDEN, FFN),
    }
    rng = np.random.default_rng(0)
    infos, data = b"", b""
    for name, shape in shapes.items():
        values = (
            np.ones(shape)
            if len(shape) == 1
            else rng.standard_normal(shape) / np.sqrt(shape[1])
        )
        infos += text(f"{name}.weight") + struct.pack("<I", len(shape))
        infos += struct.pack(f"<{len(shape)}Q", *reversed(shape))
        infos += struct.pack("<IQ", 0, len(data))  # float32
        data += values.astype("<f4").tobytes()
        data += bytes(-len(data) % ALIGNMENT)
    head = b"GGUF" + struct.pack("<IQQ", 3, len(shapes), len(pairs)) + b"".join(pairs) + infos
    return head + bytes(-len(head) % ALIGNMENT) + data


def main(argv: list[str]) -> int:
    Path(argv[1]).write_bytes(model())
    y, x = np.mgrid[0:48, 0:64]
    picture = np.stack([x * 4, y * 5, (x + y) * 2], axis=-1).astype(np.uint8)
    Image.fromarray(picture).save(argv[2])
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))
