# SPDX-License-Identifier: Apache-2.0
"""Folders of models. One may lie on a file system that does not
answer any more (a server that is gone): each is read in a thread of its own, and waited for only so
long; until the thread comes back the folder counts as empty.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pvrd.errors import OutOfMemory
from pvrd.model_files import Model, in_folder

ANSWER_S = 1.0  # what all of them together may take
SILENT = "it does not answer"


@dataclass
class Seen:
    """A folder: why it cannot be read, "" where it can, and its models."""

    why: str = ""
    models: list[Model] = field(default_factory=list)


class _Look:
    """One reading of one folder."""

    def __init__(self, folder: str, source: str) -> None:
        """Raises OutOfMemory: there is no thread to be had."""
        self._folder, self._source = folder, source
        self._seen = Seen()
        self._short: Exception | None = None
        self._began = time.monotonic()
        self.over = threading.Event()
        try:
            threading.Thread(target=self._run, daemon=True).start()
        except RuntimeError as e:
            raise OutOfMemory(f"pvrd gets no more from the system: {e}") from None

    def _run(self) -> None:
        try:
            try:
                os.scandir(self._folder).close()
            except OSError as e:
                self._seen.why = e.strerror or str(e)
            except ValueError:
                self._seen.why = "it is no path"
                return
            self._seen.models = list(in_folder(Path(self._folder), self._source))
        except Exception as e:
            self._short = e
        finally:
            self.over.set()

    def seen(self) -> Seen:
        """What was seen. Who comes later than ANSWER_S after the beginning does not wait.

        Raises:
            OutOfMemory: no descriptor was left to look.
        """
        if not self.over.wait(max(0.0, self._began + ANSWER_S - time.monotonic())):
            return Seen(SILENT)
        if self._short is not None:
            raise self._short
        return self._seen


class Folders:
    """All of them. A folder is read by one thread at a time, however often it is asked for."""

    def __init__(self) -> None:
        self._looks: dict[str, _Look] = {}
        self._lock = threading.Lock()

    def read(
        self, folders: Sequence[str], sources: Mapping[str, str] | None = None
    ) -> dict[str, Seen]:
        """What is in them now; takes ANSWER_S at most. From any thread. `sources` of the models in
        a folder that are not "system".

        Raises:
            OutOfMemory: no descriptor, or no thread, is left to look.
        """
        with self._lock:
            for folder in folders:
                look = self._looks.get(folder)
                if look is None or look.over.is_set():
                    source = (sources or {}).get(folder, "system")
                    self._looks[folder] = _Look(folder, source)
            looks = [(folder, self._looks[folder]) for folder in folders]
        return {folder: look.seen() for folder, look in looks}
