# SPDX-License-Identifier: Apache-2.0
"""org.freedesktop.impl.portal.Language, version 1, as far as pvrd can serve it: StreamResponse,
StreamEmbed and StreamRespondGuided without tools. Each request is an object that can be closed
(org.freedesktop.impl.portal.Request), as is each session (…Session)."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from pvrd import systemd
from pvrd.bus import PROPERTIES, BusError, Call, Connection
from pvrd.bus_values import V
from pvrd.client_async import AsyncClient, AsyncTextSession
from pvrd.errors import Cancelled, InvalidArgument, PvrdError
from pvrd.http import asked

PATH = "/org/freedesktop/portal/desktop"
NAME = "org.freedesktop.impl.portal.desktop.pvrd"
FRONTEND = "org.freedesktop.portal.Desktop"
LANGUAGE = "org.freedesktop.impl.portal.Language"
REQUEST = "org.freedesktop.impl.portal.Request"
SESSION = "org.freedesktop.impl.portal.Session"
VERSION = 1
_ERROR = "org.freedesktop.portal.Error."
_EMBED, _TRANSLATE = "language.embed", "language.translate"
_USE_CASES = (
    "language.summarize", _TRANSLATE, "language.rephrase", "language.classify", "language.extract",
    "language.analyze", _EMBED,
)  # fmt: skip
# Mode of a request -> priority of the session that does it.
_MODES = {"interactive": 5, "background": 1}
_KINDS = ("string", "integer", "number", "boolean")


@dataclass
class _Session:
    """A session of the portal: of pvrd's one for each mode that was asked for."""

    of_mode: dict[str, AsyncTextSession]
    use_case: str
    instructions: str
    model: str


class Backend:
    """Answers the frontend's calls on `connection` by `client`'s daemon."""

    def __init__(self, connection: Connection, client: AsyncClient, context: int) -> None:
        """context: tokens of prompt and answer in each session."""
        self._connection, self._client, self._context = connection, client, context
        self._sessions: dict[str, _Session] = {}
        self._requests: dict[str, tuple[str, asyncio.Task[None]]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._methods: dict[str, tuple[str, Callable[..., Awaitable[None]]]] = {
            "CreateSession": ("oossss", self._create),
            "Prewarm": ("oo", self._prewarm),
            "StreamResponse": ("oosah(xdsss)", self._respond),
            "StreamRespondGuided": ("oosaha(sssb)a(sss)(xds)", self._guided),
            "StreamEmbed": ("oos(s)", self._embed),
        }
        connection.on_call = self._on_call

    def _on_call(self, call: Call) -> None:
        task = asyncio.ensure_future(self._answer(call))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        if call.interface == LANGUAGE and call.member in self._methods and call.body:
            self._requests[str(call.body[0])] = (call.sender, task)

    async def _answer(self, call: Call) -> None:
        """One call, from its dispatch to its one reply."""
        try:
            signature, body = await self._called(call)
        except asyncio.CancelledError:
            self._connection.error(call, f"{_ERROR}Cancelled", "the request was closed")
        except (InvalidArgument, asked.Refused) as error:
            self._connection.error(call, f"{_ERROR}InvalidArgument", str(error))
        except BusError as error:
            self._connection.error(call, error.name, error.message)
        except PvrdError as error:
            word = "Cancelled" if isinstance(error, Cancelled) else "Failed"
            self._connection.error(call, f"{_ERROR}{word}", str(error))
        except Exception as error:
            name = type(error).__name__
            systemd.log(systemd.ERROR, f"pvr-portal met a fault of its own: {name}")
            self._connection.error(call, f"{_ERROR}Failed", f"a fault of pvrd's own: {name}")
        else:
            self._connection.reply(call, signature, body)
        finally:
            if call.interface == LANGUAGE and call.body:
                self._requests.pop(str(call.body[0]), None)

    async def _called(self, call: Call) -> tuple[str, list[Any]]:
        if call.sender != await self._connection.name_owner(FRONTEND):
            raise BusError(f"{_ERROR}NotAllowed", f"only {FRONTEND} may call this")
        if call.interface == PROPERTIES and call.member in ("Get", "GetAll"):
            version = V("u", VERSION)
            return ("v", [version]) if call.member == "Get" else ("a{sv}", [{"version": version}])
        if call.interface == REQUEST and call.member == "Close":
            sender, task = self._requests.get(call.path, ("", None))
            if task is not None and sender == call.sender:
                task.cancel()
            return "", []
        if call.interface == SESSION and call.member == "Close":
            await self._close(call.path)
            return "", []
        if call.interface == LANGUAGE and call.path == PATH:
            if call.member == "GetUseCaseAvailability" and call.signature == "ss":
                return "(bss)", [await self._available(str(call.body[1]))]
            signature, method = self._methods.get(call.member, ("", None))
            if method is not None and call.signature == signature:
                await method(call, *call.body)
                return "", []
        text = f"{call.interface}.{call.member} is not served"
        raise BusError("org.freedesktop.DBus.Error.UnknownMethod", text)

    # -- sessions

    async def _available(self, use_case: str) -> list[Any]:
        if use_case not in _USE_CASES:
            return [False, "unsupported_use_case", "pvrd's portal backend has language models only"]
        if any(model["kind"] == "text" for model in await self._client.models()):
            return [True, "available", ""]
        return [False, "no_profile_assigned", "pvrd has no language model"]

    async def _create(
        self, call: Call, _handle: str, path: str, _app: str, _window: str, use_case: str, told: str
    ) -> None:
        if use_case not in _USE_CASES:
            raise InvalidArgument(f"the use case {use_case} is not for language models")
        await self._close(path)
        made = _Session({}, use_case, told, "")
        first = await self._of(made, "interactive")
        made.model = str((await first.properties())["Model"])
        self._sessions[path] = made

    async def _of(self, session: _Session, mode: str) -> AsyncTextSession:
        """The session of pvrd's for requests of a mode, opened at the first one."""
        if mode not in _MODES:
            raise InvalidArgument(f"execution_mode is one of {', '.join(_MODES)}")
        if mode not in session.of_mode:
            options = {"context": self._context, "priority": _MODES[mode]}
            session.of_mode[mode] = await self._client.open_text(options)
        return session.of_mode[mode]

    def _session(self, path: str) -> _Session:
        found = self._sessions.get(path)
        if found is None:
            raise InvalidArgument("there is no such session")
        return found

    async def _close(self, path: str) -> None:
        if (found := self._sessions.pop(path, None)) is not None:
            for each in found.of_mode.values():
                await each.close()

    async def _prewarm(self, call: Call, handle: str, path: str) -> None:
        """pvrd loads a session's model as soon as it is opened."""
        self._session(path)
        self._emit(call, "ModelLoading", "s", handle, path, "the model is being loaded")

    def _emit(self, call: Call, name: str, signature: str, *body: Any) -> None:
        self._connection.signal(
            PATH, LANGUAGE, name, f"oo{signature}", body, destination=call.sender
        )

    # -- requests

    async def _respond(
        self, call: Call, handle: str, path: str, given: str, media: list[int], options: Any
    ) -> None:
        session = self._session(path)
        most, temperature, source, target, mode = options
        talk = self._talk(session, given, media, source, target)
        settings = {"max_tokens": most, "temperature": temperature}
        job = (await self._of(session, mode)).chat(talk, settings)
        async with contextlib.aclosing(job.tokens()) as pieces:
            async for piece in pieces:
                self._emit(call, "TokenReceived", "sb", handle, path, piece, False)
        self._emit(call, "TokenReceived", "sb", handle, path, "", True)

    async def _guided(
        self, call: Call, handle: str, path: str, given: str, media: list[int],
        fields: list[list[Any]], tools: list[Any], options: Any,
    ) -> None:  # fmt: skip
        if tools:
            raise InvalidArgument("tools are not served")
        session = self._session(path)
        most, temperature, mode = options
        talk = self._talk(session, given, media)
        settings = {"max_tokens": most, "temperature": temperature, "schema": _schema(fields)}
        job = (await self._of(session, mode)).chat(talk, settings)
        text = await job.text()
        if job.end.get("reason") != "stop":
            raise InvalidArgument("the answer was not complete within its tokens")
        self._emit(call, "GuidedSnapshotReceived", "sb", handle, path, text, True)

    async def _embed(self, call: Call, handle: str, path: str, text: str, options: Any) -> None:
        session = self._session(path)
        if session.use_case != _EMBED:
            raise InvalidArgument(f"the session is for {session.use_case}, not {_EMBED}")
        (vector,) = await (await self._of(session, options[0])).embed([text])
        pipeline = f"pvrd:{session.model}:mean"
        self._emit(call, "EmbeddingReceived", "adsb", handle, path, vector, pipeline, True)

    @staticmethod
    def _talk(
        session: _Session, given: str, media: list[int], source: str = "", target: str = ""
    ) -> list[dict[str, str]]:
        """The talk that a request hands over, behind what the session was told."""
        if media:
            raise InvalidArgument("pictures and sound are not understood")
        if session.use_case == _EMBED:
            raise InvalidArgument(f"the session is for {_EMBED}")
        told = [session.instructions] if session.instructions else []
        if session.use_case == _TRANSLATE:
            told += [f"The text is in {source}."] if source else []
            told += [f"Translate it into {target}."] if target else []
        talk = turns(given)
        return [{"role": "system", "content": " ".join(told)}, *talk] if told else talk


def turns(given: str) -> list[dict[str, str]]:
    """The talk in `input_json`: messages, or the parts of one; or a prompt as plain text.

    Raises:
        asked.Refused: a part that is no text.
    """
    try:
        listed = json.loads(given)
    except (ValueError, RecursionError):
        listed = None
    if not isinstance(listed, list) or not listed:
        return [{"role": "user", "content": given}]
    if not all(isinstance(each, dict) and "role" in each for each in listed):
        listed = [{"role": "user", "content": listed}]
    return asked.messages({"messages": listed})


def _schema(fields: list[list[Any]]) -> str:
    """The schema of guided fields (name, kind, description, required)."""
    properties: dict[str, Mapping[str, str]] = {}
    for name, kind, description, _ in fields:
        if kind not in _KINDS:
            raise InvalidArgument(f"a field's kind is one of {', '.join(_KINDS)}, not {kind}")
        properties[name] = {"type": kind, "description": description}
    if not properties:
        raise InvalidArgument("an answer needs a field")
    required = [name for name, _, _, needed in fields if needed]
    made = {"type": "object", "properties": properties, "required": required}
    return json.dumps({**made, "additionalProperties": False})
