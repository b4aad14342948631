# SPDX-License-Identifier: Apache-2.0
"""A folder as Hugging Face's transformers writes it (config.json, safetensors in one file or many,
or ONNX) -> the tensors under the names that GGUF gives them.

Nothing but the folder's own files is read, each with a bound. Names of tensors are those of the
models' repositories; what a family's norms leave out (Gemma's weights stand for 1 + w) is added
here, stacks of experts are put together from the matrices of each.
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import numpy as np

from engine.errors import BadModel, UnsupportedModel
from engine.importers import ggml
from engine.importers.safetensors import MAX_TENSORS, SafeTensors, unique
from engine.importers.source import Bytes, TensorInfo

MAX_JSON = 64 << 20  # bytes of a JSON file: the largest tokenizers need 35 MiB
MAX_FILES = 1 << 10
ONNX = "model.onnx"

_TOP = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
_LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "block_sparse_moe.gate": "ffn_gate_inp",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
}
# Gemma has norms on both sides of each block.
_GEMMA = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
_EXPERT = re.compile(r"(?:mlp|block_sparse_moe)\.experts\.(\d{1,4})\.(\w+)")
_EXPERTS = {
    "gate_proj": "ffn_gate_exps", "up_proj": "ffn_up_exps", "down_proj": "ffn_down_exps",
    "w1": "ffn_gate_exps", "w3": "ffn_up_exps", "w2": "ffn_down_exps",
}  # fmt: skip
_F32 = ggml.TYPES["F32"]


class Folder:
    """An open folder of a model: its JSON files and its tensors. A context manager."""

    def __init__(self, fd: int) -> None:
        """Reads config.json and the headers of the safetensors files, of which there are none when
        the model is ONNX. The descriptor of the folder stays the caller's and has to live as long
        as this.

        Raises:
            BadModel, UnsupportedModel: what is in it is damaged or not supported.
        """
        self._stack = ExitStack()
        self._fd = fd
        try:
            self.config = self.json("config.json")
            self._own = {} if self.is_onnx else self._tensors_by_name()
            self._pieces: dict[str, list[tuple[SafeTensors, TensorInfo]]] = {}
            self._plus_one: set[str] = set()
            self.tensors: Mapping[str, TensorInfo] = self._named()
        except BaseException:
            self._stack.close()
            raise

    def __enter__(self) -> Folder:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _open(self, name: str) -> int:
        if os.sep in name or name in ("", ".", ".."):
            raise BadModel(f"The model's folder speaks of the file {name[:64]!r} outside of it.")
        if not name.isprintable():
            raise BadModel(f"The model's folder speaks of a file with the name {name[:64]!r}.")
        try:
            fd = os.open(name, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK, dir_fd=self._fd)
        except OSError as e:
            raise BadModel(f"The model's {name} cannot be opened: {e.strerror}.") from None
        self._stack.callback(os.close, fd)
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise BadModel(f"The model's {name} is no file.")
        return fd

    @property
    def is_onnx(self) -> bool:
        """Whether the model is a graph of its own instead of tensors of a family."""
        weights = ("model.safetensors", "model.safetensors.index.json")
        return self.has(ONNX) and not any(map(self.has, weights))

    def onnx(self) -> int:
        """The descriptor of the graph's file, open as long as this.

        Raises:
            BadModel
        """
        return self._open(ONNX)

    def has(self, name: str) -> bool:
        """Whether there is such a file."""
        try:
            os.stat(name, dir_fd=self._fd)
        except OSError:
            return False
        return True

    def read_file(self, name: str, most: int = MAX_JSON) -> bytes:
        """A whole file.

        Raises:
            BadModel: it is missing or longer than `most`.
        """
        fd = self._open(name)
        size = os.fstat(fd).st_size
        if size > most:
            raise BadModel(f"The model's {name} has {size} bytes, more than {most}.")
        return os.pread(fd, most, 0)

    def json(self, name: str) -> dict[str, Any]:
        """A file with a JSON object.

        Raises:
            BadModel: missing, too long or none.
        """
        try:
            data = json.loads(self.read_file(name), object_pairs_hook=unique)
        except (ValueError, RecursionError):
            data = None
        if not isinstance(data, dict):
            raise BadModel(f"The model's {name} is damaged.")
        return data

    def files(self) -> Iterator[tuple[str, int]]:
        """Names and descriptors of the files that make the model."""
        for name in sorted(os.listdir(self._fd)):
            if name.endswith((".json", ".safetensors", ".jinja")) or name == ONNX:
                yield name, self._open(name)

    def _tensors_by_name(self) -> dict[str, tuple[SafeTensors, TensorInfo]]:
        """All tensors under their own names."""
        names = ["model.safetensors"]
        if self.has("model.safetensors.index.json"):
            index = self.json("model.safetensors.index.json").get("weight_map")
            if not isinstance(index, dict) or not all(isinstance(n, str) for n in index.values()):
                raise BadModel("The model's model.safetensors.index.json is damaged.")
            names = sorted(set(index.values()))
        elif not self.has(names[0]):
            for other in ("pytorch_model.bin", "pytorch_model.bin.index.json"):
                if self.has(other):
                    raise UnsupportedModel(
                        f"The model's weights are in {other}; they are read from safetensors"
                        " (transformers' save_pretrained writes these)."
                    )
        if len(names) > MAX_FILES:
            raise BadModel(f"The model claims {len(names)} files.")
        found: dict[str, tuple[SafeTensors, TensorInfo]] = {}
        for name in names:
            file = SafeTensors(self._open(name))
            if twice := found.keys() & file.tensors.keys():
                raise BadModel(f"The model has the tensor {min(twice)} twice.")
            found.update((n, (file, t)) for n, t in file.tensors.items())
        if len(found) > MAX_TENSORS:
            raise BadModel(f"The model claims {len(found)} tensors.")
        return found

    def _named(self) -> dict[str, TensorInfo]:
        """The tensors under GGUF's names; a name that is not known stays as it is."""
        gemma = str(self.config.get("model_type", "")).startswith("gemma")
        layer = {**_LAYER, **_GEMMA} if gemma else _LAYER
        stacks: dict[str, dict[int, tuple[SafeTensors, TensorInfo]]] = {}
        for own, found in self._own.items():
            if own.endswith("rotary_emb.inv_freq"):
                continue  # a table that older files carry along
            name, expert = _gguf_name(own, layer)
            if name == "output.weight" and self.config.get("tie_word_embeddings") is True:
                continue  # a copy of the embedding table
            stack = stacks.setdefault(name, {})
            if expert in stack:
                raise BadModel(f"The model has the tensor {own} twice.")
            stack[expert] = found
        tensors = {}
        for name, stack in stacks.items():
            pieces = [stack[i] for i in sorted(stack)]
            first = pieces[0][1]
            alike = all((t.kind, t.shape) == (first.kind, first.shape) for _, t in pieces)
            if not alike or sorted(stack) != list(range(len(stack))):
                raise BadModel(f"The model's experts do not fit together ({first.name}).")
            shape = (first.shape[0] * len(pieces), first.shape[1])
            info = replace(first, name=name, shape=shape, nbytes=first.nbytes * len(pieces))
            if gemma and name.endswith("norm.weight"):
                self._plus_one.add(name)
                info = replace(info, kind=_F32, nbytes=4 * shape[0] * shape[1])
            self._pieces[name], tensors[name] = pieces, info
        return tensors

    def read(self, tensor: TensorInfo, row: int, rows: int) -> Bytes:
        """The bytes of some rows.

        Raises:
            BadModel: a file has become shorter.
        """
        pieces = self._pieces[tensor.name]
        each = pieces[0][1].shape[0]
        out = []
        while rows:
            file, piece = pieces[row // each]
            n = min(rows, each - row % each)
            out.append(file.read(piece, row % each, n))
            row, rows = row + n, rows - n
        data = np.concatenate(out) if len(out) > 1 else out[0]
        if tensor.name in self._plus_one:
            data = (ggml.vector(pieces[0][1].kind, data) + np.float32(1)).view(np.uint8)
        return data


def _gguf_name(own: str, layer: Mapping[str, str]) -> tuple[str, int]:
    """GGUF's name of a tensor, and which expert's part of it this is."""
    if own in _TOP:
        return _TOP[own], 0
    match = re.fullmatch(r"model\.layers\.(\d{1,4})\.(.+)\.(weight|bias)", own)
    if match is None:
        return own, 0
    block, part, suffix = match.groups()
    if part in layer:
        return f"blk.{int(block)}.{layer[part]}.{suffix}", 0
    expert = _EXPERT.fullmatch(part)
    if expert is not None and expert[2] in _EXPERTS:
        return f"blk.{int(block)}.{_EXPERTS[expert[2]]}.{suffix}", int(expert[1])
    return own, 0
