# SPDX-License-Identifier: Apache-2.0
"""The sockets that pods get: for each a folder with a filtering proxy (xdg-dbus-proxy) in it.

Through the proxy a pod sees pvrd alone, of it what a client needs, and no other pod's sessions.
kubelet never says that a pod has ended: a proxy stays until its shares are given to another.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import select
import shutil
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pvrd.activate import NAME
from pvrd.errors import StartError

PROGRAM = "xdg-dbus-proxy"
SOCKET = "bus"
_RECORD = "shares.json"
_READY_S = 10.0
_METHODS = ("ListModels", "OpenText", "OpenVideo", "Upscale", "GetStatistics")
_ROOT = "/org/pvrd/Pvrd1"
RULES = (
    "--filter",
    *(f"--call={NAME}={NAME}.Manager.{method}@{_ROOT}" for method in _METHODS),
    f"--call={NAME}={NAME}.TextSession.*@{_ROOT}/session/*",
    f"--call={NAME}={NAME}.VideoSession.*@{_ROOT}/session/*",
    f"--call={NAME}=org.freedesktop.DBus.Properties.Get@{_ROOT}/*",
    f"--call={NAME}=org.freedesktop.DBus.Properties.GetAll@{_ROOT}/*",
    f"--broadcast={NAME}=org.freedesktop.DBus.Properties.PropertiesChanged@{_ROOT}/*",
)


@dataclass
class _Pod:
    ids: tuple[str, ...]
    folder: Path
    process: subprocess.Popen[bytes]
    alive: int  # the proxy ends when this is closed

    def close(self) -> None:
        os.close(self.alive)
        try:
            self.process.wait(_READY_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


class Pods:
    """The proxies of a node."""

    def __init__(self, folder: Path, address: str, uids: int | None = None) -> None:
        """folder: where pods' folders lie, on the host under the same path. address: of pvrd's bus.
        uids: the proxies run as users from this number on, one a share; None: as this process.

        Raises:
            StartError: there is no such program, or the folder cannot be made.
        """
        self._program = shutil.which(PROGRAM)
        if self._program is None:
            raise StartError(f"{PROGRAM} is not installed")
        self._folder, self._address, self._uids = folder, address, uids
        self._pods: list[_Pod] = []
        try:
            folder.mkdir(mode=0o711, parents=True, exist_ok=True)
        except OSError as error:
            raise StartError(f"{folder} cannot be made: {error.strerror}") from error

    def restore(self) -> None:
        """Starts the proxies of pods that were there before this process."""
        for record in sorted(self._folder.glob(f"*/{_RECORD}")):
            try:
                known = json.loads(record.read_text())
                ids, user = tuple(map(str, known["ids"])), known["uid"]
                self._start(ids, record.parent, user if isinstance(user, int) else None)
            except (OSError, ValueError, KeyError, TypeError, StartError):
                shutil.rmtree(record.parent, ignore_errors=True)

    def give(self, ids: Iterable[str], index: int) -> Path:
        """A new folder with a socket for these shares; who had one of them before loses it.
        index: number of the first share, which decides the user.

        Raises:
            StartError: the proxy does not start.
        """
        wanted = tuple(sorted(ids))
        for pod in [p for p in self._pods if set(p.ids) & set(wanted)]:
            self._pods.remove(pod)
            pod.close()
            shutil.rmtree(pod.folder, ignore_errors=True)
        folder = self._folder / f"{wanted[0].replace('/', '-')}-{secrets.token_hex(8)}"
        user = None if self._uids is None else self._uids + index
        try:
            folder.mkdir(mode=0o711)
            (folder / _RECORD).write_text(json.dumps({"ids": wanted, "uid": user}))
            self._start(wanted, folder, user)
        except OSError as error:
            shutil.rmtree(folder, ignore_errors=True)
            raise StartError(f"a pod's socket cannot be made: {error.strerror}") from error
        except StartError:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        return folder

    def _start(self, ids: tuple[str, ...], folder: Path, user: int | None) -> None:
        assert self._program is not None
        (folder / SOCKET).unlink(missing_ok=True)
        more: dict[str, Any] = {}
        if user is not None:
            os.chown(folder, user, user)
            more = {"user": user, "group": user, "extra_groups": []}
        ours, theirs = os.pipe()
        try:
            process = subprocess.Popen(
                [self._program, f"--fd={theirs}", self._address, str(folder / SOCKET), *RULES],
                pass_fds=[theirs],
                stdin=subprocess.DEVNULL,
                umask=0,  # whoever is in the pod may connect; the folder is the pod's alone
                **more,
            )
        except BaseException:
            os.close(ours)
            raise
        finally:
            os.close(theirs)
        pod = _Pod(ids, folder, process, ours)
        if not select.select([ours], [], [], _READY_S)[0] or not os.read(ours, 1):
            pod.close()
            raise StartError(f"{PROGRAM} does not start")
        self._pods.append(pod)

    def mend(self) -> None:
        """Starts again what has ended by itself."""
        for pod in [p for p in self._pods if p.process.poll() is not None]:
            self._pods.remove(pod)
            pod.close()
            with contextlib.suppress(OSError, StartError, ValueError):
                known = json.loads((pod.folder / _RECORD).read_text())
                self._start(pod.ids, pod.folder, known["uid"])

    def close(self) -> None:
        """Ends the proxies; the folders stay, for a successor."""
        while self._pods:
            self._pods.pop().close()
