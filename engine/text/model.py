# SPDX-License-Identifier: Apache-2.0
"""A text model on a device: compiled once into a .pvrm, its weights shared by all sessions, a State
for each.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from engine import memory, pvrm
from engine.backends.base import Backend, Executable
from engine.errors import BadModel, ContextFull, InvalidArgument, OutOfMemory, PvrError
from engine.graph import Graph, Weight, explain
from engine.importers import ggml
from engine.importers.decoder import Model
from engine.importers.families import import_model
from engine.importers.gguf import Gguf
from engine.importers.source import pieces
from engine.lower import allowed, lower, weight_nbytes
from engine.passes import optimise
from engine.program import Program
from engine.record import recorded
from engine.text.sampler import RECORD_BYTES
from engine.text.template import ChatTemplate
from engine.text.tokenizer import Data, TextTokenizer, import_tokenizer
from kernels.weights import ROWS

Progress = Callable[[float], None]

COMPILER = 2  # goes up whenever compiled models of before must not be used any more
DEFAULT_CONTEXT = 4096
CHUNK = 128  # tokens of a prompt in one slice
SOFTWARE_CHUNK = 32
_CHUNK_ELEMENTS = 1 << 21  # elements that are re-packed at a time
_EDGE = 1 << 20  # bytes at both ends of a source file that tell it from others


def fingerprint(fd: int) -> str:
    """Tells a source file from others: its size and checksums of its two ends."""
    size = os.fstat(fd).st_size
    first = zlib.crc32(os.pread(fd, _EDGE, 0))
    last = zlib.crc32(os.pread(fd, _EDGE, max(0, size - _EDGE)))
    return f"{size:x}-{first:08x}-{last:08x}"


def _weight_chunks(model: Model, weight: Weight) -> Iterator[npt.NDArray[Any]]:
    """A weight as kernels read it, a few tiles at a time."""
    k = weight.shape[1]
    step = max(1, _CHUNK_ELEMENTS // (k * ROWS)) * ROWS
    for part in weight.parts:
        for tensor, rows, raw in pieces(model.source, part, step):
            if weight.layout == "rows":
                values = ggml.vector(tensor.kind, raw)
                if not np.isfinite(values).all():
                    raise BadModel(f"The tensor {tensor.name} holds values that are no numbers.")
                yield values
            else:
                yield ggml.pack_rows(tensor.kind, raw, rows, k, tensor.name)


def _weight_blob(model: Model, weight: Weight) -> pvrm.Blob:
    if weight.name in model.ropes:
        table = model.ropes[weight.name].table(weight.shape[0])
        return pvrm.array_blob(weight.name, table, shape=weight.shape)
    return pvrm.Blob(
        weight.name,
        weight.format,
        weight.shape,
        weight_nbytes(weight),
        lambda: _weight_chunks(model, weight),
    )


def prepare(fd: int) -> tuple[dict[str, Any], list[pvrm.Blob]]:
    """Metadata and blobs of the compiled model of a GGUF file; the blobs read the file when they
    are written.

    Raises:
        BadModel, UnsupportedModel
    """
    file = Gguf(fd)
    model = import_model(file)
    graph = optimise(model.graph)
    tokens = import_tokenizer(file, int(graph.attrs["vocab"]))
    template = None
    if "tokenizer.chat_template" in file.metadata:
        template = file.text("tokenizer.chat_template")
    blobs = [_weight_blob(model, w) for w in graph.weights.values()]
    library = np.frombuffer(tokens.library, np.uint8)
    blobs.append(pvrm.array_blob("tokenizer/library", library, "json"))
    blobs.append(pvrm.array_blob("tokenizer/pieces", tokens.pieces, "bytes"))
    blobs.append(pvrm.array_blob("tokenizer/ends", tokens.ends, "u32"))
    metadata = {
        "kind": "text",
        "compiler": COMPILER,
        "source": fingerprint(fd),
        "name": file.text("general.name", ""),
        "graph": graph.to_json(),
        "tokenizer": tokens.settings,
        "template": template,
    }
    return metadata, blobs


def info(metadata: dict[str, Any], graph: Graph) -> dict[str, Any]:
    """What users see of a model."""
    matrices = [w for w in graph.weights.values() if w.layout != "rows"]
    formats: dict[str, int] = {}
    for w in matrices:
        formats[w.format] = formats.get(w.format, 0) + w.shape[0] * w.shape[1]
    return {
        "kind": "text",
        "arch": graph.attrs["arch"],
        "name": metadata["name"],
        "context": int(graph.attrs["context"]),
        "vocab": int(graph.attrs["vocab"]),
        "layers": int(graph.attrs["layers"]),
        "parameters": sum(formats.values()),
        "nbytes": sum(weight_nbytes(w) for w in graph.weights.values()),
        "format": max(formats, key=lambda f: formats[f]),
        "chat": metadata["template"] is not None,
    }


def inspect(fd: int) -> dict[str, Any]:
    """Whether a file is a model that can be loaded, and what it is. Of a GGUF file weights are not
    read; of a compiled model each blob's checksum is.

    Raises:
        BadModel, UnsupportedModel
    """
    if os.pread(fd, len(pvrm.MAGIC), 0) == pvrm.MAGIC:
        compiled = pvrm.Pvrm.open(fd, verify=True)
        return info(*_described(compiled))
    metadata, _ = prepare(fd)
    return info(metadata, Graph.from_json(metadata["graph"]))


def explain_file(fd: int) -> str:
    """What the passes do to a model, as a table."""
    return explain(optimise(import_model(Gguf(fd)).graph))


def _described(compiled: pvrm.Pvrm) -> tuple[dict[str, Any], Graph]:
    """Metadata and graph of a compiled text model.

    Raises:
        BadModel: another kind of model, another compiler's, damaged.
    """
    meta = compiled.metadata
    if meta.get("kind") != "text" or meta.get("compiler") != COMPILER:
        raise BadModel("The file is no compiled text model of this version.")
    graph = Graph.from_json(meta.get("graph"))
    for w in graph.weights.values():
        entry = compiled.entries.get(w.name)
        if entry is None or entry.nbytes != weight_nbytes(w) or entry.format != w.format:
            raise BadModel(f"The compiled model's {w.name} is damaged.")
    return meta, graph


def _open_cache(cache: str, mark: str) -> pvrm.Pvrm | None:
    """The compiled model in the cache if it is whole, of this compiler and of this source."""
    try:
        compiled = pvrm.Pvrm.open(cache)
        meta, _ = _described(compiled)
    except (OSError, PvrError):
        return None
    return compiled if meta.get("source") == mark else None


def _in_memory(metadata: dict[str, Any], blobs: list[pvrm.Blob], progress: Progress) -> pvrm.Pvrm:
    """Compiles into anonymous memory: where there is no cache folder, or no room in it."""
    memory.admit({"compiled model": sum(b.nbytes for b in blobs)})
    fd = os.memfd_create("pvrm", os.MFD_CLOEXEC)
    try:
        pvrm.write_fd(fd, metadata, blobs, progress)
        return pvrm.Pvrm.open(fd)
    finally:
        os.close(fd)


def compiled_model(
    fd: int, cache: str, progress: Progress | None = None, force: bool = False
) -> tuple[pvrm.Pvrm, str]:
    """The compiled form of a source file (GGUF, or .pvrm as it is), and why it is not in the cache
    ("" when it is).

    Raises:
        BadModel, UnsupportedModel, OutOfMemory
    """
    tell = progress or (lambda _: None)
    if os.pread(fd, len(pvrm.MAGIC), 0) == pvrm.MAGIC:
        return pvrm.Pvrm.open(fd), ""
    if cache and not force:
        found = _open_cache(cache, fingerprint(fd))
        if found is not None:
            return found, ""
    metadata, blobs = prepare(fd)
    reason = "there is no cache"
    if cache:
        try:
            pvrm.write(cache, metadata, blobs, tell)
            return pvrm.Pvrm.open(cache), ""
        except PvrError as e:
            # What is wrong with the model would be wrong in memory, too.
            if type(e) is not PvrError:
                raise
            reason = str(e)
    return _in_memory(metadata, blobs, tell), reason


class State:
    """What a session has on the device: its KV cache, scratch and recordings. `tokens` are the ids
    in the cache.
    """

    def __init__(self, model: TextModel, program: Program, executable: Executable) -> None:
        self.model = model
        self.context = int(program.meta["context"])
        self.chunk = int(program.meta["chunk"])
        self.tokens: list[int] = []
        self.executable = executable
        self.caches = [b.name for b in program.buffers.values() if b.kind == "state"]
        self._params = np.zeros(16, np.uint32)

    def common(self, ids: list[int]) -> int:
        """How many of these ids are in the cache already; what follows them in the cache is given
        up.
        """
        n = min(len(self.tokens), len(ids))
        if self.tokens[:n] != ids[:n]:
            n = next(i for i in range(n) if self.tokens[i] != ids[i])
        del self.tokens[n:]
        return n

    def run(self, ids: list[int], head: bool, decode: bool = False) -> None:
        """One slice: feeds 1 to `chunk` tokens after those in the cache, with `head` the logits of
        the last as well. `decode` computes one token in its own, faster way, whose last digits are
        not those of a prefill.

        Raises:
            DeviceLost: the device is gone; the state is of no use any more.
            ContextFull: they do not fit.
        """
        pos = len(self.tokens)
        if not 1 <= len(ids) <= self.chunk:
            raise ValueError(f"{len(ids)} tokens in a slice of {self.chunk}")
        if pos + len(ids) > self.context:
            raise ContextFull(f"The context of {self.context} tokens is full.")
        self._params[:3] = len(ids), pos, len(ids) - 1
        self.executable.write("params", self._params)
        self.executable.write("ids", np.asarray(ids, np.uint32))
        sequences = ["decode" if decode and len(ids) == 1 else "prefill"]
        if head:
            sequences.append("head")
        self.executable.run(*sequences)
        self.tokens.extend(ids)

    def best(self) -> npt.NDArray[np.uint8]:
        """The record of `topk` after a slice with head."""
        return self.executable.read("topk", RECORD_BYTES)

    def logits(self) -> npt.NDArray[np.float32]:
        """All logits after a slice with head."""
        raw = self.executable.read("logits", self.model.vocab * 4)
        return np.ascontiguousarray(raw).view(np.float32)

    def hidden(self, count: int) -> npt.NDArray[np.float32]:
        """What the last slice left of its first `count` tokens behind the last layer and the final
        norm: f32 [count, width]. Not after `decode`.
        """
        width = self.model.width
        raw = self.executable.read("x", 4 * width * count)
        x = np.ascontiguousarray(raw).view(np.float32).reshape(count, width)
        return self.model.normalised(x)

    def close(self) -> None:
        self.executable.close()


class TextModel:
    """A model, loaded: weights on the device, tokenizer and template ready."""

    def __init__(
        self,
        compiled: pvrm.Pvrm,
        backend: Backend,
        chunk: int = 0,
        progress: Progress | None = None,
    ) -> None:
        """Checks the weights of a compiled model and places them on a device.

        Raises:
            BadModel, OutOfMemory
        """
        meta, self.graph = _described(compiled)
        self.info = info(meta, self.graph)
        self.vocab = int(self.graph.attrs["vocab"])
        self.chunk = chunk or (SOFTWARE_CHUNK if _slow(backend) else CHUNK)
        self.tokenizer = TextTokenizer(
            Data(
                meta["tokenizer"],
                compiled.blob("tokenizer/library").tobytes(),
                compiled.blob("tokenizer/pieces"),
                np.ascontiguousarray(compiled.blob("tokenizer/ends")).view(np.uint32),
            )
        )
        settings = self.tokenizer.settings
        norm = next(n for n in self.graph.nodes if n.op == "rms_norm" and n.attrs["last"])
        self.width = norm.int("k")
        self._final_norm = compiled.blob(norm.weights[0]), float(norm.attrs["eps"])
        self.template = ChatTemplate(
            meta["template"],
            self.tokenizer.special(settings.bos),
            self.tokenizer.special(settings.eos),
            self.tokenizer.special_texts,
        )
        memory.admit({"weights": self.info["nbytes"]})
        self.backend = backend
        blobs: dict[str, npt.NDArray[np.uint8]] = {}
        for name in self.graph.weights:
            blobs[name] = compiled.blob(name)
            if progress:
                progress(len(blobs) / len(self.graph.weights))
        self.weights = backend.weights(blobs)

    @classmethod
    def load(
        cls,
        source: int | str | os.PathLike[str],
        cache: str,
        backend: Backend,
        progress: Progress | None = None,
        *,
        chunk: int = 0,
        force: bool = False,
    ) -> TextModel:
        """Loads a source file (path or descriptor, which stays the caller's) by way of the compiled
        model `cache`.

        It is compiled when the cache lacks it, is damaged or was made from another file, or with
        `force`; cache "" or one that cannot be written: into memory (`info["uncached"]` says why).
        `progress` gets 0..1. `chunk`: most tokens of a prompt in one slice, 0 for a default.

        Raises:
            BadModel, UnsupportedModel, OutOfMemory
            InvalidArgument: the path cannot be opened.
        """
        if not isinstance(source, int):
            try:
                fd = os.open(source, os.O_RDONLY | os.O_CLOEXEC)
            except OSError as e:
                raise InvalidArgument(
                    f"{Path(source).name} cannot be opened: {e.strerror}."
                ) from None
            try:
                return cls.load(fd, cache, backend, progress, chunk=chunk, force=force)
            finally:
                os.close(fd)
        tell = progress or (lambda _: None)
        done = 0.0  # what compiling has reached; it is nothing when the cache has the model

        def compiling(value: float) -> None:
            nonlocal done
            done = 0.9 * value
            tell(done)

        compiled, reason = compiled_model(source, cache, compiling, force)
        model = cls(compiled, backend, chunk, lambda v: tell(done + (1 - done) * v))
        if reason:
            model.info["uncached"] = reason
        return model

    def state(self, context: int = 0) -> State:
        """Room for one session of `context` tokens (0: the default, or what the model can do).

        Raises:
            InvalidArgument: more than the model can do.
            OutOfMemory: with figures.
        """
        most = int(self.graph.attrs["context"])
        context = context or min(most, DEFAULT_CONTEXT)
        if not 1 <= context <= most:
            raise InvalidArgument(f"The model has a context of 1 to {most} tokens, not {context}.")
        chunk = min(self.chunk, context)
        program, executable = recorded(
            self.backend, lambda: self._admitted(context, chunk), self.weights
        )
        return State(self, program, executable)

    def _admitted(self, context: int, chunk: int) -> Program:
        """The program, if there is memory for its state.

        Raises:
            OutOfMemory: with figures.
        """
        program = self._lower(context, chunk)
        sizes = {"state": 0, "scratch": 0}
        for buffer in program.buffers.values():
            if buffer.kind != "weight":
                sizes["state" if buffer.kind == "state" else "scratch"] += buffer.nbytes
        memory.admit({"KV cache": sizes["state"], "work area": sizes["scratch"]})
        return program

    def _lower(self, context: int, chunk: int) -> Program:
        """The program with the longest chunk whose scratch the device can bind.

        Raises:
            OutOfMemory: one token's would be too large, or something else is.
        """
        while True:
            try:
                return lower(self.graph, self.backend.info, context, chunk, allowed(self.backend))
            except OutOfMemory:
                if chunk == 1:
                    raise
                chunk //= 2

    def normalised(self, x: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        """The final norm of rows of hidden states."""
        blob, eps = self._final_norm
        weight = np.ascontiguousarray(blob).view(np.float32)[: self.width]
        mean = np.mean(np.square(x), axis=-1, keepdims=True)
        return np.asarray(x / np.sqrt(mean + eps) * weight, np.float32)

    def count(self, text: str) -> int:
        """Tokens of a plain text."""
        return len(self.tokenizer.encode(text, bos=False))

    def close(self) -> None:
        """Gives the weights back; its states have to be closed before."""
        self.weights.close()


def _slow(backend: Backend) -> bool:
    """Whether this is a GPU that is a CPU in disguise, or numpy."""
    return backend.info.kind != "cpu" and backend.info.software
