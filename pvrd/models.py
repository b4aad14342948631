# SPDX-License-Identifier: Apache-2.0
"""The model store: which models there are, which one is meant, adding and removing.

Models lie as NAME/model.toml beside their file, as loose *.gguf and *.pvrm in the model folders,
and in installed packages (pvrd/model_files.py).
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import hashlib
import os
import shutil
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from pvrd import beside, fds, new_model
from pvrd.config import Config, Paths
from pvrd.errors import (
    InvalidArgument,
    OutOfMemory,
    QuotaExceeded,
    UnknownModel,
    UnsupportedModel,
)
from pvrd.model_files import (
    COMPILED,
    FORMAT,
    LOW_TWIN,
    NAME,
    NARROW,
    SUFFIXES,
    Model,
    check_name,
    packaged,
    read_details,
    remove_abandoned,
    slug,
)
from pvrd.model_folders import SILENT, Folders, Seen
from pvrd.new_model import NewModel

STALE_S = 86400.0  # how old a compiled model without its source is when it is deleted
BROKEN_S = 3600.0  # and one that is not finished
CHANGES = "new models"  # the lane of what writes
SPARE_BYTES = 64 << 20  # left free on the disk when a model is added

_T = TypeVar("_T")


class ModelStore:
    """All models of the configured folders and packages."""

    def __init__(self, paths: Paths, config: Config) -> None:
        """Asks no file system yet."""
        self.paths = paths
        self.config = config
        self.folders = Folders()
        self._busy: set[str] = set()

    async def ask(self, question: Callable[[], _T]) -> _T:
        """Does what asks the disk beside the loop, one thing after the other.

        Raises:
            Timeout: the disk does not answer. Else what the question raises.
        """
        return await beside.ask("models", "the disk with the models", question)

    async def change(self, work: Callable[[], _T], late: Callable[[_T], None] | None = None) -> _T:
        """Does what writes, in the same way; who asks does not wait for it.

        Raises:
            Timeout: the disk does not answer. Else what the work raises.
        """
        return await beside.ask(CHANGES, f"{self.paths.models}", work, late)

    # -- finding: what is no coroutine waits for the disk (see ask and change)

    def all(self) -> dict[str, Model]:
        """Every model by name; the first folder that has a name wins.

        Raises:
            OutOfMemory: no descriptor is left to look for them.
        """
        found: dict[str, Model] = {}
        for model in self._scan():
            if model.name in found:
                if model.path == found[model.name].path or model.source != "file":
                    continue
                digits = hashlib.sha256(os.fsencode(model.path)).hexdigest()[:6]
                model = replace(model, name=f"{model.name[:57]}-{digits}")
            found[model.name] = model
        return found

    def find(self, name: str, kind: str, scale: int = 2) -> Model:
        """The model of this name, or the default of its kind for "".

        Raises:
            InvalidArgument: not a name. UnknownModel, with the nearest names. UnsupportedModel:
            of the other kind.
        """
        models = self.all()
        if not name:
            return self._default(models, kind, scale)
        check_name(name)
        if name not in models:
            self._check_format(name)
            fitting = sorted(n for n in models if models[n].kind == kind)
            near = [n for n in fitting if n.startswith(name)] or difflib.get_close_matches(
                name, fitting, 3, 0.5
            )
            near = (near or fitting)[:3]
            are = "is" if len(near) == 1 else "are"
            hint = f"; there {are} {', '.join(near)}" if near else f"; there are none for {kind}"
            raise UnknownModel(f"there is no model {name}{hint}")
        if models[name].kind != kind:
            raise UnsupportedModel(f"model {name} is for {models[name].kind}, not for {kind}")
        return models[name]

    def _check_format(self, name: str) -> None:
        """Raises UnsupportedModel for what a later pvrd has added."""
        if self.seen()[str(self.paths.models)].why == SILENT:
            return
        found = read_details(self.paths.models / name / "model.toml").get("format", FORMAT)
        if found != FORMAT:
            raise UnsupportedModel(
                f"model {name} was added by another version of pvrd (format {found}, not {FORMAT});"
                " add it again"
            )

    def twin(self, model: Model) -> Model | None:
        """The low form of a text model where the store has it as NAME.q4."""
        found = self.all().get(model.name + LOW_TWIN)
        return found if found is not None and found.kind == "text" else None

    def default_name(self, models: dict[str, Model], kind: str) -> str:
        """What is taken when no model is named, "" without any."""
        try:
            return self._default(models, kind, 2).name
        except UnknownModel:
            return ""

    def wrong_default(self, models: dict[str, Model], kind: str) -> str:
        """What is wrong with the model that the configuration names, "" for nothing."""
        wanted = self.config.text(f"models.{kind}")
        if not wanted or (wanted in models and models[wanted].kind == kind):
            return ""
        what = f"is for {models[wanted].kind}" if wanted in models else "is not there"
        return f"models.{kind} names {wanted[:64]}, which {what}"

    def _default(self, models: dict[str, Model], kind: str, scale: int) -> Model:
        of_kind = [m for m in models.values() if m.kind == kind]
        if wrong := self.wrong_default(models, kind):
            raise UnknownModel(f"{wrong}; name another: pvrctl config set models.{kind}=NAME")
        if wanted := self.config.text(f"models.{kind}"):
            return models[wanted]
        if not of_kind:
            how = "add one: pvrctl models add FILE"
            raise UnknownModel(f"there is no model for {kind}; {how}")

        def rank(model: Model) -> tuple[bool, bool, int, str]:
            # Of networks the lightest: without a name it has to keep up on a small board.
            fits = f"x{scale}" in model.name or kind == "text"
            weight = model.size if kind == "video" else 0
            return (not fits, model.source != "package", weight, model.name)

        return min(of_kind, key=rank)

    def _scan(self) -> Iterator[Model]:
        for seen in self.seen().values():
            yield from seen.models
        yield from packaged()

    def seen(self) -> dict[str, Seen]:
        """What is in each folder now; packages are none."""
        own = str(self.paths.models)
        shared = [str(folder) for folder in self.paths.shared_models]
        names = [own, *shared, *self.config.texts("models.paths")]
        return self.folders.read(names, {own: "state"})

    # -- changing

    async def add(
        self,
        source: int,
        name: str,
        options: dict[str, Any],
        inspect: Callable[[int], Awaitable[dict[str, Any]]],
        progress: Callable[[int, int], None],
        uid: int = 0,
    ) -> dict[str, Any]:
        """Copies a caller's file into the store. `source` stays the caller's.

        Args:
            inspect: has a worker look at the file; raises when it is no model.
            progress: gets bytes done and in all, from another thread.
            uid: the caller's.

        Raises:
            InvalidArgument, QuotaExceeded, BadModel, UnsupportedModel. Nothing is left behind.
        """
        check_name(name)
        if name in self._busy:
            raise InvalidArgument(f"model {name} is being added")
        self._busy.add(name)
        stop = threading.Event()
        new: NewModel | None = None
        try:
            size, magic = await fds.looked_at(source, "the model", 1 << 62, uid)
            able = options["replace"]
            new = await self.change(lambda: self._begin(name, size, magic, able), NewModel.drop)
            digest = await new_model.copy(os.dup(source), os.dup(new.target), size, progress, stop)
            info = await inspect(new.target)
            details = {
                "format": FORMAT,
                "name": name,
                "kind": str(info.get("kind") or SUFFIXES.get(Path(new.file).suffix, "text")),
                "file": new.file,
                "size": size,
                "sha256": digest,
                "arch": str(info.get("arch", "")),
                "licence": options["licence"] or str(info.get("licence", "")),
                "origin": options["origin"],
                "added": int(time.time()),
            }
            await self.change(functools.partial(new.publish, name, details))
            return details
        finally:
            stop.set()
            self._busy.discard(name)
            if new is not None:
                await beside.done(CHANGES, new.drop)

    def _begin(self, name: str, size: int, magic: bytes, replace: bool) -> NewModel:
        """A folder for a new model, with its empty file."""
        models = self.all()
        if name in models and not (replace and models[name].removable):
            able = " (option replace)" if models[name].removable else ""
            raise InvalidArgument(f"there is a model {name} already{able}")
        self._check_room(models, name, size)
        return NewModel.begin(self.paths.models, magic)

    def remove(self, name: str) -> Model:
        """Removes an added model.

        Raises:
            InvalidArgument: it was not added. UnknownModel.
        """
        check_name(name)
        model = self.all().get(name)
        if model is None:
            raise UnknownModel(f"there is no model {name}")
        if not model.removable:
            raise InvalidArgument(f"model {name} was not added by pvrd; it lies at {model.path}")
        try:
            shutil.rmtree(model.path.parent)
        except OSError as e:
            raise InvalidArgument(f"model {name} cannot be removed: {e.strerror}") from None
        if model.key not in {other.key for other in self.all().values()}:
            for form in ("", NARROW):
                with contextlib.suppress(OSError):
                    (self.paths.cache / f"{model.key}{form}{COMPILED}").unlink()
        return model

    def recover(self) -> None:
        """Clears up what a pvrd that was killed left of models that it was adding."""
        with contextlib.suppress(OSError):
            for left_over in self.paths.models.glob(".new-*"):
                remove_abandoned(left_over)

    def sweep(self) -> None:
        """Deletes from the cache what was compiled from files that are gone, and what compilers
        left that were killed. Young files stay: another daemon may share the folder."""
        try:
            keys = {model.key for model in self.all().values()}
            if any(seen.why == SILENT for seen in self.seen().values()):
                return
        except OutOfMemory:
            return  # not known, so nothing is stale
        now = time.time()
        with contextlib.suppress(OSError):
            for path in self.paths.cache.glob("*.pvrm"):
                with contextlib.suppress(OSError):
                    key = path.stem.removesuffix(NARROW)
                    if key not in keys and now - path.stat().st_mtime > STALE_S:
                        path.unlink()
            for path in self.paths.cache.glob(".pvrm-*"):
                with contextlib.suppress(OSError):
                    if now - path.stat().st_mtime > BROKEN_S:
                        path.unlink()

    def _check_room(self, models: dict[str, Model], name: str, size: int) -> None:
        held = sum(m.size for m in models.values() if m.removable and m.name != name)
        limit = self.config.whole("limits.model_bytes")
        if held + size > limit:
            raise QuotaExceeded(
                f"added models would have {held + size} bytes, limits.model_bytes is {limit}"
            )
        try:
            self.paths.models.mkdir(parents=True, exist_ok=True)
            disk = os.statvfs(self.paths.models)
        except OSError as e:
            raise QuotaExceeded(f"{self.paths.models} cannot be written: {e.strerror}") from None
        free = disk.f_bavail * disk.f_frsize
        if size + SPARE_BYTES > free:
            raise QuotaExceeded(
                f"{self.paths.models} has {free} bytes free, the model needs {size} and "
                f"{SPARE_BYTES} stay free"
            )

def describe(store: ModelStore) -> list[dict[str, Any]]:
    """All models as ListModels answers them, without types."""
    models = store.all()
    defaults = {store.default_name(models, kind) for kind in ("text", "video")}
    out = []
    for model in sorted(models.values(), key=lambda m: (m.kind, m.name)):
        item: dict[str, Any] = {
            "name": model.name,
            "kind": model.kind,
            "source": model.source,
            "size": model.size,
            "file": os.fsencode(model.path.name).decode("utf-8", "replace"),
            "removable": model.removable,
            "default": model.name in defaults,
        }
        for key in ("sha256", "licence", "origin", "arch"):
            if model.details.get(key):
                item[key] = str(model.details[key])
        added = model.details.get("added")
        if isinstance(added, int) and 0 <= added < 1 << 64:  # what the bus can carry
            item["added"] = int(added)
        out.append(item)
    return out


__all__ = ["COMPILED", "NAME", "Model", "ModelStore", "check_name", "describe", "slug"]
