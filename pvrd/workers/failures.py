# SPDX-License-Identifier: Apache-2.0
"""What goes wrong in a worker: an `error` for the job that it belongs to, a line in the journal.

One place knows which exceptions end a worker and which only fail a job.
"""

from __future__ import annotations

import logging
import os
import traceback
from collections.abc import Callable, Mapping
from typing import Any

from engine.errors import DeviceLost, PvrError
from pvrd.workers import protocol

log = logging.getLogger("pvrd.worker")
Send = Callable[[Mapping[str, Any]], None]


class PeerGone(Exception):
    """pvrd closed the socket: end at once."""


def guard(send: Send, subject: Mapping[str, Any], action: Callable[[], Any]) -> Any:
    """Runs something for a job; what goes wrong becomes its `error`. None then.

    subject: the keys by which pvrd knows whose it is (job, session or model).

    Raises:
        DeviceLost: the end of this worker.
        PeerGone, BrokenPipeError, ConnectionResetError: pvrd is gone.
    """
    try:
        return action()
    except (PeerGone, DeviceLost, BrokenPipeError, ConnectionResetError):
        raise
    except PvrError as e:
        fail(send, subject, e.name, str(e))
    except MemoryError:
        fail(send, subject, "OutOfMemory", "There is not enough memory for this request.")
    except protocol.ProtocolError as e:
        fail(send, subject, "Internal", f"The worker was called wrongly: {e}.")
    except Exception as e:  # the boundary: one job fails, the worker goes on
        report(e)
        fail(send, subject, "Internal", "The worker failed on this request; see the journal.")
    return None


def fail(send: Send, subject: Mapping[str, Any], name: str, sentence: str) -> None:
    """Says that something failed: the error's name on D-Bus, and a sentence for people."""
    send({"t": "error", **subject, "error": name, "message": sentence})


def report(error: BaseException) -> None:
    """Where it failed, without the message: that may hold a piece of a prompt."""
    frames = traceback.extract_tb(error.__traceback__)[-4:]
    way = " > ".join(f"{os.path.basename(f.filename)}:{f.lineno} {f.name}" for f in frames)
    log.error("pvrd-worker: %s at %s", type(error).__name__, way)
