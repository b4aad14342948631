# SPDX-License-Identifier: Apache-2.0
"""A text model's source (a GGUF file, a Hugging Face folder) -> the compiled model, in the cache or
in memory.
"""

from __future__ import annotations

import os
import stat
import zlib
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from engine import memory, pvrm, widths
from engine.errors import BadModel, PvrError
from engine.graph import Graph, Weight, explain
from engine.importers import ggml, onnx_wire
from engine.importers.decoder import Model
from engine.importers.families import import_model
from engine.importers.gguf import MAGIC, Gguf
from engine.importers.hf import Folder
from engine.importers.hf_families import import_folder
from engine.importers.onnx_decoder import DEFAULT_CONTEXT, import_onnx
from engine.importers.source import TensorInfo, pieces
from engine.passes import optimise
from engine.passes.pack import narrowed
from engine.shards import weight_nbytes
from engine.text import short
from engine.text.tokenizer import Data
from engine.text.tokenizer_gguf import import_tokenizer
from engine.text.tokenizer_json import chat_template, import_folder_tokenizer
from kernels import search
from kernels.weights import ROWS, Floats, Words
from kernels.weights import pack as pack_plainly

Progress = Callable[[float], None]
Importance = Mapping[str, npt.NDArray[np.float64]]

COMPILER = 3  # goes up whenever compiled models of before must not be used any more
_CHUNK_ELEMENTS = 1 << 19  # elements that are re-packed at a time: they fit a second cache
_PACKERS = 4  # threads at most that re-pack
_EDGE = 1 << 20  # bytes at both ends of a source file that tell it from others


Prepared = tuple[dict[str, Any], list[pvrm.Blob]]  # metadata, and what reads the source later


def _is_folder(fd: int) -> bool:
    return stat.S_ISDIR(os.fstat(fd).st_mode)


def fingerprint(fd: int) -> str:
    """Tells a source from others: its size and checksums of its two ends; a folder by its files."""
    if _is_folder(fd):
        with Folder(fd) as folder:
            marks = [f"{name} {fingerprint(file)}" for name, file in folder.files()]
        return f"{len(marks):x}-{zlib.crc32(chr(10).join(marks).encode()):08x}"
    size = os.fstat(fd).st_size
    first = zlib.crc32(os.pread(fd, _EDGE, 0))
    last = zlib.crc32(os.pread(fd, _EDGE, max(0, size - _EDGE)))
    return f"{size:x}-{first:08x}-{last:08x}"


def _packers() -> int:
    """Threads that re-pack: no more than the kernels', which leave cores free for others."""
    given = os.environ.get("OMP_NUM_THREADS", "")  # the workers set it
    threads = int(given) if given.isdecimal() else _PACKERS
    return max(1, min(threads, _PACKERS, len(os.sched_getaffinity(0))))


def _weight_chunks(model: Model, weight: Weight, pack: ggml.Packer) -> Iterator[npt.NDArray[Any]]:
    """A weight as kernels read it, a few tiles at a time, which some threads make ahead."""
    k = weight.shape[1]
    step = max(1, _CHUNK_ELEMENTS // (k * ROWS)) * ROWS

    def packed(tensor: TensorInfo, rows: int, raw: ggml.Raw) -> npt.NDArray[Any]:
        if weight.layout != "rows":
            return ggml.pack_rows(tensor.kind, raw, rows, k, tensor.name, weight.format, pack)
        values = ggml.vector(tensor.kind, raw)
        if not np.isfinite(values).all():
            raise BadModel(f"The tensor {tensor.name} holds values that are no numbers.")
        return values

    waiting: deque[Future[npt.NDArray[Any]]] = deque()
    threads = _packers()
    pool = ThreadPoolExecutor(threads)
    try:
        for part in weight.parts:
            for piece in pieces(model.source, part, step):
                waiting.append(pool.submit(packed, *piece))
                if len(waiting) > threads:
                    yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)


def _weight_blob(model: Model, weight: Weight, pack: ggml.Packer) -> pvrm.Blob:
    if weight.name in model.ropes:
        table = model.ropes[weight.name].table(weight.shape[0])
        return pvrm.array_blob(weight.name, table, shape=weight.shape)
    return pvrm.Blob(
        weight.name,
        weight.format,
        weight.shape,
        weight_nbytes(weight),
        lambda: _weight_chunks(model, weight, pack),
    )


def _packer(columns: npt.NDArray[np.float64] | None) -> ggml.Packer:
    """With a search for what is made 4-bit."""

    def pack(fmt: str, values: Floats) -> Words:
        return search.pack_q4(values, columns) if fmt == "q4" else pack_plainly(fmt, values)

    return pack


@contextmanager
def prepared(
    fd: int,
    weights: str = "",
    without: Collection[str] = (),
    narrow: bool = False,
    importance: Importance | None = None,
) -> Iterator[Prepared]:
    """Metadata and blobs of the compiled model of a GGUF file or a folder; the blobs read it when
    they are written, which has to be within the context. `weights`: the format that float matrices
    get ("": halves). `without`: passes (of passes.OPTIONAL) that are left out. `narrow`: 4-bit
    weights, whatever the source has (engine/passes/pack.py); with `importance` (of columns, by the
    product's name) their steps are searched (kernels/search.py).

    Raises:
        BadModel, UnsupportedModel
    """
    if not _is_folder(fd):
        yield prepare(fd, weights, without, narrow, importance)
        return
    with Folder(fd) as folder:
        if folder.is_onnx:
            context = folder.config.get("max_position_embeddings")
            graph = onnx_wire.read(folder.onnx())
            model = import_onnx(graph, context if isinstance(context, int) else DEFAULT_CONTEXT)
        else:
            model = import_folder(folder)
        tokens = import_folder_tokenizer(folder, int(model.graph.attrs["vocab"]))
        name = folder.config.get("_name_or_path")
        name = name if isinstance(name, str) else ""
        template = chat_template(folder)
        way = (weights, without, narrow, importance)
        yield _described_source(fd, model, tokens, name, template, *way)


def prepare(
    fd: int,
    weights: str = "",
    without: Collection[str] = (),
    narrow: bool = False,
    importance: Importance | None = None,
) -> Prepared:
    """`prepared` of a GGUF file, which has to stay open.

    Raises:
        BadModel, UnsupportedModel
    """
    file = Gguf(fd)
    model = import_model(file)
    tokens = import_tokenizer(file, int(model.graph.attrs["vocab"]))
    template = None
    if "tokenizer.chat_template" in file.metadata:
        template = file.text("tokenizer.chat_template")
    name = file.text("general.name", "")
    way = (weights, without, narrow, importance)
    return _described_source(fd, model, tokens, name, template, *way)


def _described_source(
    fd: int,
    model: Model,
    tokens: Data,
    name: str,
    template: str | None,
    weights: str,
    without: Collection[str],
    narrow: bool,
    importance: Importance | None,
) -> Prepared:
    attrs = {**model.graph.attrs, "weights": weights} if weights else dict(model.graph.attrs)
    able = narrowed(model.graph)
    if narrow:
        attrs["narrow"] = 1
    graph = optimise(replace(model.graph, attrs=attrs), without)
    packers: dict[str, ggml.Packer] = dict.fromkeys(graph.weights, pack_plainly)
    if importance is not None:
        named = [(name, importance.get(n.name)) for n in graph.nodes for name in n.weights]
        packers = {name: _packer(columns) for name, columns in named}
    blobs = [_weight_blob(model, w, packers[w.name]) for w in graph.weights.values()]
    library = np.frombuffer(tokens.library, np.uint8)
    blobs.append(pvrm.array_blob("tokenizer/library", library, "json"))
    blobs.append(pvrm.array_blob("tokenizer/pieces", tokens.pieces, "bytes"))
    blobs.append(pvrm.array_blob("tokenizer/ends", tokens.ends, "u32"))
    for table, values in (short.tables(tokens.library) or {}).items():
        blobs.append(pvrm.array_blob(f"tokenizer/short/{table}", values, short.FORMATS[table]))
    metadata = {
        "kind": "text",
        "compiler": COMPILER,
        "source": fingerprint(fd),
        "name": name,
        "graph": graph.to_json(),
        "tokenizer": tokens.settings,
        "template": template,
        "narrow": narrow,
        "narrows": able and not narrow,
    }
    return metadata, blobs


def is_source(path: str | os.PathLike[str]) -> bool:
    """Whether a path is a folder or a GGUF file: what becomes a text model."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        regular = stat.S_ISREG(os.fstat(fd).st_mode)
        return _is_folder(fd) or (regular and os.pread(fd, len(MAGIC), 0) == MAGIC)
    finally:
        os.close(fd)


def write(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    weights: str,
    name: str,
    without: Collection[str] = (),
    judge: Callable[[Graph], None] = lambda graph: None,
    narrow: bool = False,
    importance: Importance | None = None,
) -> tuple[dict[str, Any], Graph]:
    """Compiles a source to a file; what users see of the model, and its graph. `name`: what it
    calls itself, "" for what the source says. `judge` may refuse the graph before it is written.
    `narrow` and `importance` as `prepared`.

    Raises:
        BadModel, UnsupportedModel
        PvrError: the file cannot be written.
        OSError: the source cannot be opened.
    """
    fd = os.open(source, os.O_RDONLY | os.O_CLOEXEC)
    try:
        with prepared(fd, weights, without, narrow, importance) as (metadata, blobs):
            judge(Graph.from_json(metadata["graph"]))
            metadata = {**metadata, "name": name or metadata["name"]}
            pvrm.write(target, metadata, blobs)
    finally:
        os.close(fd)
    graph = Graph.from_json(metadata["graph"])
    return info(metadata, graph), graph


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
        "narrows": bool(metadata.get("narrows")),  # has it a form of fewer bits?
    }


def inspect(fd: int) -> dict[str, Any]:
    """Whether a source is a model that can be loaded, and what it is. Of a GGUF file or a folder
    weights are not read; of a compiled model each blob's checksum is.

    Raises:
        BadModel, UnsupportedModel
    """
    if pvrm.is_compiled(fd):
        return info(*described(pvrm.Pvrm.open(fd, verify=True)))
    with prepared(fd) as (metadata, _):
        return info(metadata, Graph.from_json(metadata["graph"]))


def explain_file(fd: int) -> str:
    """What the passes do to a model, as a table."""
    with prepared(fd) as (metadata, _):
        return explain(Graph.from_json(metadata["graph"]))


def described(compiled: pvrm.Pvrm) -> tuple[dict[str, Any], Graph]:
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
        try:
            fits = entry is not None and entry.nbytes == weight_nbytes(w)
        except ValueError:  # a shape or a format that there is not
            fits = False
        if not fits or entry is None or entry.format != w.format:
            raise BadModel(f"The compiled model's {w.name} is damaged.")
    widths.check(graph)
    texts = (meta.get("name"), meta.get("template") or "", graph.attrs.get("arch"))
    if not all(isinstance(text, str) for text in texts) or "template" not in meta:
        raise BadModel("The compiled model's description is damaged.")
    return meta, graph


def _open_cache(cache: str, mark: str, narrow: bool) -> pvrm.Pvrm | None:
    """The compiled model in the cache if it is whole, of this compiler and of this source."""
    try:
        compiled = pvrm.Pvrm.open(cache, own=True)
        meta, _ = compiled.once(described)
    except (OSError, PvrError):
        return None
    same = meta.get("source") == mark and bool(meta.get("narrow")) == narrow
    return compiled if same else None


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
    fd: int, cache: str, progress: Progress | None = None, force: bool = False, narrow: bool = False
) -> tuple[pvrm.Pvrm, str]:
    """The compiled form of a source (GGUF, a folder, or .pvrm as it is), and why it is not in the
    cache ("" when it is). `narrow`: with 4-bit weights.

    Raises:
        BadModel, UnsupportedModel, OutOfMemory
    """
    tell = progress or (lambda _: None)
    if pvrm.is_compiled(fd):
        return pvrm.Pvrm.open(fd), ""
    if cache and not force:
        found = _open_cache(cache, fingerprint(fd), narrow)
        if found is not None:
            return found, ""
    with prepared(fd, narrow=narrow) as (metadata, blobs):
        reason = "there is no cache"
        if cache:
            try:
                pvrm.write(cache, metadata, blobs, tell)
                return pvrm.Pvrm.open(cache, own=True), ""
            except PvrError as e:
                # What is wrong with the model would be wrong in memory, too.
                if type(e) is not PvrError:
                    raise
                reason = str(e)
        return _in_memory(metadata, blobs, tell), reason
