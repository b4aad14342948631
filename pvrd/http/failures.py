# SPDX-License-Identifier: Apache-2.0
"""Errors as OpenAI's clients know them: a status and {error: {message, type, param, code}}."""

from __future__ import annotations

from typing import Any

from starlette.responses import JSONResponse

from pvrd.errors import PvrdError
from pvrd.http.asked import Refused

RETRY_S = 1  # what Retry-After says of a queue that is full

# Error of docs/api.md -> status, type, code. What is not here is 500.
_STATUS = {
    "NotAuthorized": (403, "permission_error", "not_authorized"),
    "QuotaExceeded": (429, "rate_limit_error", "quota_exceeded"),
    "Busy": (429, "rate_limit_error", "busy"),
    "InvalidArgument": (400, "invalid_request_error", None),
    "UnknownModel": (404, "invalid_request_error", "model_not_found"),
    "UnsupportedModel": (400, "invalid_request_error", "unsupported_model"),
    "ContextFull": (400, "invalid_request_error", "context_length_exceeded"),
    "OutOfMemory": (503, "server_error", "out_of_memory"),
    "DeviceLost": (503, "server_error", "device_lost"),
    "Cancelled": (503, "server_error", "cancelled"),
    "ShuttingDown": (503, "server_error", "shutting_down"),
    "NoSuchSession": (503, "server_error", "no_such_session"),
    "NoDaemon": (503, "server_error", "no_daemon"),
    "Timeout": (504, "server_error", "timeout"),
    "SlowReader": (408, "server_error", "slow_reader"),
}
_AGAIN = ("Busy", "QuotaExceeded", "ShuttingDown", "NoDaemon")


def _body(message: str, kind: str, code: str | None, param: str | None = None) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def described(error: PvrdError | Refused) -> tuple[int, dict[str, Any]]:
    """The status and the body of an error."""
    if isinstance(error, Refused):
        kind = "invalid_request_error"
        if error.status == 429:
            kind = "rate_limit_error"
        return error.status, _body(str(error), kind, error.code, error.param)
    status, kind, code = _STATUS.get(error.name, (500, "server_error", error.name.lower()))
    return status, _body(str(error), kind, code)


def answer(error: PvrdError | Refused) -> JSONResponse:
    """The response that tells of an error."""
    status, body = described(error)
    headers = {}
    if status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    if status == 408 and isinstance(error, Refused):
        headers["Connection"] = "close"  # the rest of that request may still come
    if isinstance(error, PvrdError) and error.name in _AGAIN:
        headers["Retry-After"] = str(RETRY_S)
    return JSONResponse(body, status, headers)
