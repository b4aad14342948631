# SPDX-License-Identifier: Apache-2.0
"""The ASGI application: who may ask, what is asked, and how the answer goes out."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hmac
import json
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from pvrd.client_async import AsyncClient, AsyncText
from pvrd.client_stream import floats
from pvrd.errors import Internal, PvrdError
from pvrd.http import answers, asked, connection
from pvrd.http.asked import Refused
from pvrd.http.embedding import embedded
from pvrd.http.failures import answer, described
from pvrd.http.pool import Pool

MOST_BYTES = 1 << 20  # of a request; pvrd takes no longer message either
SERVED = (
    "GET /v1/models and /v1/models/NAME, "
    "POST /v1/chat/completions, /v1/completions and /v1/embeddings"
)
HOSTS = ("127.0.0.1", "localhost", "[::1]")
_T = TypeVar("_T")


class Gone(Exception):
    """The client hung up; nobody reads an answer."""


class Guard:
    """Lets requests through that name this machine and bring the token.

    The name is checked because a page of another origin can have its own name resolve to the
    loopback address (DNS rebinding); the token because other users can connect, too.
    """

    def __init__(self, app: ASGIApp, token: str) -> None:
        self._app = app
        self._token = token.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        refusal = self._refusal(dict(scope["headers"]))
        if refusal is None:
            await self._app(scope, receive, send)
        else:
            await answer(refusal)(scope, receive, send)

    def _refusal(self, headers: dict[bytes, bytes]) -> Refused | None:
        host = headers.get(b"host", b"").decode("latin-1").lower()
        name, bar, port = host.rpartition(":")
        if not bar or not port.isdigit():
            name = host
        if name not in HOSTS:
            return Refused(403, "the Host header names no loopback address", "bad_host")
        scheme, _, given = headers.get(b"authorization", b"").partition(b" ")
        if scheme.lower() != b"bearer" or not hmac.compare_digest(given.strip(), self._token):
            text = "the token is missing or wrong; pvr-http --print-token tells it"
            return Refused(401, text, "invalid_api_key")
        length = headers.get(b"content-length", b"0")
        if not length.isdigit() or int(length) > MOST_BYTES:
            return _too_long()
        return None


def _too_long() -> Refused:
    return Refused(413, f"a request may have at most {MOST_BYTES} bytes", "request_too_large")


async def _body(request: Request) -> dict[str, Any]:
    """The JSON object that a request brings.

    Raises:
        Refused: it is none, too long, or does not come.
    """
    data = bytearray()
    try:
        async with asyncio.timeout(connection.BODY_S):
            async for piece in request.stream():
                data += piece
                if len(data) > MOST_BYTES:
                    raise _too_long()
    except TimeoutError:
        text = f"the request was not whole within {connection.BODY_S:g} s"
        raise Refused(408, text, "request_timeout") from None
    try:
        body = json.loads(data)
    except (ValueError, RecursionError):
        raise Refused(400, "the request is no JSON") from None
    if not isinstance(body, dict):
        raise Refused(400, "the request is no JSON object")
    return body


async def _unless_gone(request: Request, work: Coroutine[Any, Any, _T]) -> _T:
    """The result of the work; it is cancelled when the client hangs up.

    Raises:
        Gone: it did.
    """

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    job, watch = asyncio.ensure_future(work), asyncio.ensure_future(gone())
    try:
        await asyncio.wait({job, watch}, return_when=asyncio.FIRST_COMPLETED)
        if not job.done():
            raise Gone
        return job.result()
    finally:
        for task in (job, watch):
            task.cancel()
        await asyncio.wait({job, watch})


class Api:
    """The endpoints."""

    def __init__(self, client: AsyncClient, pool: Pool) -> None:
        self._client = client
        self._pool = pool

    async def models(self, request: Request) -> Response:
        """GET /v1/models, /v1/models/NAME: those for text; `default` is the one it stands for."""
        known = [each for each in await self._client.models() if each["kind"] == "text"]
        name = request.path_params.get("name")
        if not name:
            return JSONResponse({"object": "list", "data": [answers.model(m) for m in known]})
        for each in known:
            if each["name"] == name or (name == "default" and each.get("default")):
                return JSONResponse(answers.model(each))
        raise Refused(404, f"there is no model {name!r} for text", "model_not_found", "model")

    async def chat(self, request: Request) -> Response:
        """POST /v1/chat/completions."""
        return await self._text(request, await _body(request), chat=True)

    async def completions(self, request: Request) -> Response:
        """POST /v1/completions."""
        return await self._text(request, await _body(request), chat=False)

    async def embeddings(self, request: Request) -> Response:
        """POST /v1/embeddings."""
        body = await _body(request)
        asked.refuse_undone(body)
        model, texts = asked.model(body), asked.texts(body)
        form = body.get("encoding_format") or "float"
        if form not in ("float", "base64"):
            raise Refused(400, "encoding_format has to be float or base64", param="encoding_format")

        async def work() -> tuple[list[bytes], int, str]:
            async with self._pool.session(model) as session:
                rows, tokens = await embedded(session, texts)
                return rows, tokens, str((await session.properties())["Model"])

        rows, tokens, name = await _unless_gone(request, work())
        data = [
            {"object": "embedding", "index": n, "embedding": _row(row, form)}
            for n, row in enumerate(rows)
        ]
        usage = {"prompt_tokens": tokens, "total_tokens": tokens}
        return JSONResponse({"object": "list", "data": data, "model": name, "usage": usage})

    async def _text(self, request: Request, body: dict[str, Any], chat: bool) -> Response:
        asked.refuse_undone(body)
        model, settings = asked.model(body), asked.settings(body)
        stream, more = asked.flag(body, "stream"), body.get("stream_options") or {}
        if not isinstance(more, dict):
            raise Refused(400, "stream_options has to be an object", param="stream_options")
        turns = asked.messages(body) if chat else []
        prompt = "" if chat else asked.prompt(body)
        shown = asked.shown_logprobs(body)
        made = answers.Answer(chat, model, shown, logprobs="logprobs" in settings)

        async def events() -> AsyncIterator[dict[str, Any]]:
            talk = turns or [{"role": "prompt", "content": prompt}]
            async with self._pool.session(model, talk) as session:
                job: AsyncText = (
                    session.chat(turns, settings) if chat else session.generate(prompt, settings)
                )
                async with contextlib.aclosing(aiter(job)) as lines:
                    async for event in lines:
                        yield event

        source = events()
        if not stream:
            await _unless_gone(request, _collect(source, made))
            return JSONResponse(made.whole())
        try:
            first = await _unless_gone(request, _first(source, made))
        except BaseException:
            await source.aclose()  # type: ignore[attr-defined]
            raise
        usage = asked.flag(more, "include_usage")
        return StreamingResponse(
            _lines(source, made, first, usage),
            media_type="text/event-stream",
            headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"},
        )


def _row(row: bytes, form: str) -> list[float] | str:
    return floats(row) if form == "float" else base64.b64encode(row).decode()


async def _collect(source: AsyncIterator[dict[str, Any]], made: answers.Answer) -> None:
    async with contextlib.aclosing(source) as events:  # type: ignore[type-var]
        async for event in events:
            made.take(event)


async def _first(
    source: AsyncIterator[dict[str, Any]], made: answers.Answer
) -> list[dict[str, Any]]:
    """The chunks of the first event: until it came, an error can still be a status."""
    async for event in source:
        chunk = made.take(event)
        return [chunk] if chunk else []
    return []


async def _lines(
    source: AsyncIterator[dict[str, Any]],
    made: answers.Answer,
    first: list[dict[str, Any]],
    usage: bool,
) -> AsyncIterator[str]:
    """Server-sent events. Broken off by a client that hangs up, which cancels the job."""
    async with contextlib.aclosing(source) as events:  # type: ignore[type-var]
        for each in first:
            yield _line(each)
        try:
            async for event in events:
                if chunk := made.take(event):
                    yield _line(chunk)
        except PvrdError as error:
            yield _line(described(error)[1])
            return
        if usage:
            yield _line(made.usage_chunk())
        yield "data: [DONE]\n\n"


def _line(value: dict[str, Any]) -> str:
    return f"data: {json.dumps(value, ensure_ascii=False, separators=(',', ':'))}\n\n"


async def _pvrd_error(_request: Request, error: Exception) -> Response:
    assert isinstance(error, PvrdError | Refused)
    return answer(error)


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    text = f"{request.method} {request.url.path} is not served; there are {SERVED}"
    return answer(Refused(error.status_code, text, "unknown_url"))


async def _gone(_request: Request, _error: Exception) -> Response:
    return Response(status_code=499)  # nobody reads it


async def _fault(_request: Request, error: Exception) -> Response:
    return answer(Internal(f"pvr-http met a fault of its own: {type(error).__name__}"))


def application(
    token: str,
    client: AsyncClient,
    sessions: int = 8,
    context: int = 2048,
    ready: Callable[[], None] = lambda: None,
) -> Starlette:
    """The application. `client` stays the caller's; `ready` is called when requests are taken."""
    pool = Pool(client, sessions, context)
    api = Api(client, pool)

    @contextlib.asynccontextmanager
    async def lifespan(_app: Starlette) -> AsyncIterator[None]:
        ready()
        yield
        await pool.close()

    routes = [
        Route("/v1/models", api.models),
        Route("/v1/models/{name:path}", api.models),
        Route("/v1/chat/completions", api.chat, methods=["POST"]),
        Route("/v1/completions", api.completions, methods=["POST"]),
        Route("/v1/embeddings", api.embeddings, methods=["POST"]),
    ]
    app = Starlette(
        routes=routes,
        lifespan=lifespan,
        exception_handlers={
            PvrdError: _pvrd_error,
            Refused: _pvrd_error,
            HTTPException: _http_error,
            Gone: _gone,
            ClientDisconnect: _gone,  # before the request was whole
            Exception: _fault,
        },
    )
    app.add_middleware(Guard, token=token)
    return app
