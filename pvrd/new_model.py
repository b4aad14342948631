# SPDX-License-Identifier: Apache-2.0
"""A model on its way into the store: a folder that has no name yet, the copy in it, its name."""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import shutil
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pvrd import fds
from pvrd.config import toml_value
from pvrd.errors import QuotaExceeded
from pvrd.model_files import MAGICS, held_folder


@dataclass
class NewModel:
    """Its folder in the store, the file in that, and the file open. All of it may wait for the
    disk."""

    folder: Path
    file: str
    target: int
    _held: contextlib.ExitStack

    @classmethod
    def begin(cls, models: Path, magic: bytes) -> NewModel:
        """In this store, for a file that begins so.

        Raises:
            QuotaExceeded: there is nothing to be written there.
        """
        folder = models / _nameless()
        file = "model" + MAGICS.get(magic, ".bin")
        held = contextlib.ExitStack()
        try:
            folder.mkdir(parents=True)
            held.enter_context(held_folder(folder))
            held.callback(shutil.rmtree, folder, ignore_errors=True)
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
            target = os.open(folder / file, flags, 0o600)
        except OSError as e:
            held.close()
            shutil.rmtree(folder, ignore_errors=True)
            raise _refused(models, e) from None
        held.callback(os.close, target)
        return cls(folder, file, target, held)

    def publish(self, name: str, details: Mapping[str, Any]) -> None:
        """Gives it its name, in the place of one that has it.

        Raises:
            QuotaExceeded: the disk refuses.
        """
        models = self.folder.parent
        lines = [f"{key} = {toml_value(_printable(value))}" for key, value in details.items()]
        old, retired = models / name, models / _nameless()
        try:
            (self.folder / "model.toml").write_text("\n".join(lines) + "\n", encoding="utf-8")
            if old.exists():
                old.rename(retired)
            try:
                self.folder.rename(old)
            except OSError:
                with contextlib.suppress(OSError):
                    retired.rename(old)
                raise
        except OSError as e:  # where the old one has no name now, the next start gives it back
            raise _refused(models, e) from None
        shutil.rmtree(retired, ignore_errors=True)

    def drop(self) -> None:
        """Deletes it, unless it has its name."""
        self._held.close()


def _nameless() -> str:
    return f".new-{secrets.token_hex(8)}"


def _refused(models: Path, error: OSError) -> QuotaExceeded:
    return QuotaExceeded(f"{models} cannot be written: {error.strerror}")


async def copy(
    source: int,
    target: int,
    size: int,
    progress: Callable[[int, int], None],
    stop: threading.Event,
) -> str:
    """Copies in a thread that owns both fds; the sha256. `progress` gets bytes done and in all.

    Raises:
        InvalidArgument, QuotaExceeded: as fds.copy.
    """
    digest = hashlib.sha256()
    done = 0

    def seen(piece: bytes) -> None:
        nonlocal done
        digest.update(piece)
        done += len(piece)
        progress(done, size)

    def work() -> None:
        try:
            fds.copy(source, target, size, seen, stop)
            os.fsync(target)
        finally:
            os.close(source)
            os.close(target)

    await fds.in_thread(work)
    return digest.hexdigest()


def _printable(value: Any) -> Any:
    if isinstance(value, str):
        return "".join(c if c.isprintable() else " " for c in value)
    return value
