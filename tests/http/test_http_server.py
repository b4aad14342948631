# SPDX-License-Identifier: Apache-2.0
"""Who may ask pvr-http, what it takes, and what becomes of work whose client went."""

from __future__ import annotations

import http.client
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import openai
import pytest

from pvrd.client import Client
from tests.buses import until as wait_for
from tests.http.conftest import Server, serving

pytestmark = pytest.mark.bus
PICTURE = {"role": "user", "content": [{"type": "image_url"}]}
SLOW = [{"role": "user", "content": "slow"}]


def ask(
    server: Server, path: str = "/v1/models", body: Any = None, **headers: str | None
) -> tuple[int, dict[str, Any], http.client.HTTPMessage]:
    """A bare request; a header of None is left out."""
    place = urlsplit(server.base).netloc
    sent = {"Host": place, "Authorization": f"Bearer {server.token}", **headers}
    connection = http.client.HTTPConnection(place, timeout=30)
    try:
        data = body if isinstance(body, bytes | type(None)) else json.dumps(body).encode()
        method = "GET" if body is None else "POST"
        connection.putrequest(method, path, skip_host=True)
        for name, value in sent.items():
            if value is not None:
                connection.putheader(name, value)
        if data is not None:
            connection.putheader("Content-Length", str(len(data)))
        connection.endheaders(data)
        reply = connection.getresponse()
        return reply.status, json.loads(reply.read()), reply.headers
    finally:
        connection.close()


def refused(server: Server, status: int, *args: Any, **headers: str | None) -> dict[str, Any]:
    got, body, _ = ask(server, *args, **headers)
    assert (got, list(body)) == (status, ["error"]), body
    error: dict[str, Any] = body["error"]
    assert error["message"]
    return error


def test_who_may_ask(server: Server) -> None:
    assert ask(server)[0] == 200
    for wrong in (None, "Bearer wrong", f"Basic {server.token}", "Bearer "):
        assert refused(server, 401, Authorization=wrong)["code"] == "invalid_api_key"
    for host in ("example.org", "evil.localhost.example.org:80", "127.0.0.1.nip.io"):
        assert refused(server, 403, Host=host)["code"] == "bad_host"
    for host in ("localhost", "LOCALHOST:1", "127.0.0.1", "[::1]:8642"):
        assert ask(server, Host=host)[0] == 200


def test_the_token_is_ones_own(server: Server, tmp_path: Path) -> None:
    file = server.home / "pvrd" / "http-token"
    assert file.stat().st_mode & 0o777 == 0o600

    def program(*more: str) -> subprocess.CompletedProcess[str]:
        env = {**os.environ, "XDG_CONFIG_HOME": str(tmp_path)}
        command = [sys.executable, "-m", "pvrd.http", *more]
        return subprocess.run(command, env=env, capture_output=True, text=True, check=False)

    first = program("--print-token").stdout
    assert first == program("--print-token").stdout
    second = program("--new-token").stdout
    assert first != second == program("--print-token").stdout
    own = tmp_path / "pvrd" / "http-token"
    own.chmod(0o644)
    said = program("--print-token")
    assert said.returncode == 1
    assert said.stderr.startswith("pvr-http: others may read")
    own.chmod(0o600)
    own.write_text("short")
    assert "holds no token" in program("--print-token").stderr
    for wrong in (["--sessions", "0"], ["--context", "15"], ["--context", "1048577"]):
        said = program(*wrong)
        assert (said.returncode, "--context 16 to 1048576" in said.stderr) == (2, True)
    gone = program("--bus", f"unix:path={tmp_path}/none", "--new-token")
    assert gone.returncode == 0
    gone = program("--bus", f"unix:path={tmp_path}/none", "--port", "0")
    assert gone.returncode == 1
    assert "There is no daemon to talk to" in gone.stderr
    assert "Traceback" not in gone.stderr


@pytest.mark.parametrize(
    ("body", "word"),
    [
        (b"{", "no JSON"),
        (b"[]", "no JSON object"),
        (b"[" * 100000, "no JSON"),
        ({"messages": SLOW}, "model"),
        ({"model": "default", "messages": []}, "messages"),
        ({"model": "default", "messages": [{"role": "x", "content": ""}]}, "role"),
        ({"model": "default", "messages": [{"role": "user", "content": None}]}, "content"),
        ({"model": "default", "messages": [PICTURE]}, "no text"),
        ({"model": "default", "messages": SLOW, "n": 2}, "n is not supported"),
        ({"model": "default", "messages": SLOW, "tools": [{}]}, "tools"),
        ({"model": "default", "messages": SLOW, "temperature": "hot"}, "temperature"),
        ({"model": "default", "messages": SLOW, "temperature": 1e999}, "temperature"),
        ({"model": "default", "messages": SLOW, "temperature": 10**400}, "temperature"),
        ({"model": "default", "messages": [{"role": ["user"], "content": "x"}]}, "role"),
        ({"model": "default", "messages": SLOW, "logit_bias": {"-1": 1}}, "logit_bias"),
        ({"model": "default", "messages": SLOW, "logit_bias": {"4294967296": 1}}, "logit_bias"),
        ({"model": "default", "messages": SLOW, "logit_bias": {"1": 10**400}}, "logit_bias"),
        ({"model": "default", "messages": SLOW, "max_tokens": -1}, "max_tokens"),
        ({"model": "default", "messages": SLOW, "max_tokens": 1 << 70}, "max_tokens"),
        ({"model": "default", "messages": SLOW, "stream": "yes"}, "stream"),
        ({"model": "default", "messages": SLOW, "stop": [1]}, "stop"),
        ({"model": "default", "messages": SLOW, "logit_bias": {"a": 1}}, "logit_bias"),
        ({"model": "default", "messages": SLOW, "logprobs": True, "top_logprobs": 99}, "top_log"),
        ({"model": "default", "messages": SLOW, "response_format": {"type": "x"}}, "response_f"),
    ],
)
def test_a_request_that_makes_no_sense(server: Server, body: Any, word: str) -> None:
    assert word in refused(server, 400, "/v1/chat/completions", body)["message"]


def test_what_else_is_refused(server: Server) -> None:
    assert refused(server, 404, "/v1/nothing")["code"] == "unknown_url"
    refused(server, 405, "/v1/models", {})
    big = b'{"model": "' + b"x" * (1 << 20) + b'"}'
    assert refused(server, 413, "/v1/completions", big)["code"] == "request_too_large"
    for texts, word in ([[1, 2]], "token numbers"), (["a", ""], "empty"), (["a"] * 2049, "2048"):
        error = refused(server, 400, "/v1/embeddings", {"model": "default", "input": texts})
        assert (error["param"], word in error["message"]) == ("input", True)
    refused(server, 400, "/v1/completions", {"model": "default", "prompt": ["a", "b"]})


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_cancels_its_job(server: Server, bus: str, stream: bool) -> None:
    connection = http.client.HTTPConnection(urlsplit(server.base).netloc, timeout=30)
    body = {"model": "default", "messages": SLOW, "max_tokens": 1900, "stream": stream}
    headers = {"Authorization": f"Bearer {server.token}"}
    with Client(bus) as watcher:
        before = watcher.statistics()["jobs"]["cancelled"]
        connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
        if stream:
            reply = connection.getresponse()
            assert reply.read(10)
        else:
            wait_for(lambda: watcher.statistics()["jobs"]["running"], "the job")
        if stream:
            reply.close()
        connection.close()
        wait_for(lambda: watcher.statistics()["jobs"]["cancelled"] > before, "the cancelling")


def test_embeddings_end_with_their_client(server: Server, bus: str) -> None:
    """The one who went had texts for several calls; no more is done than what was begun."""
    texts = ["x" * 5000, "hang", "x" * 9000]
    connection = http.client.HTTPConnection(urlsplit(server.base).netloc, timeout=30)
    body = json.dumps({"model": "default", "input": texts})
    with Client(bus) as watcher:
        before = watcher.statistics()["jobs"]
        headers = {"Authorization": f"Bearer {server.token}"}
        connection.request("POST", "/v1/embeddings", body, headers)
        wait_for(lambda: watcher.statistics()["jobs"]["done"] > before["done"], "the first call")
        wait_for(lambda: watcher.statistics()["jobs"]["running"], "the second call")
        connection.close()
        wait_for(lambda: not watcher.statistics()["jobs"]["running"], "the end of it")
        after = watcher.statistics()["jobs"]
    assert (after["done"], after["cancelled"]) == (before["done"] + 1, before["cancelled"] + 1)


def test_a_client_that_goes_before_it_has_asked_is_no_fault(
    bus: str, start: Any, tmp_path: Path
) -> None:
    start()
    with serving(bus, tmp_path) as own:
        place = urlsplit(own.base)
        with socket.create_connection((place.hostname, place.port)) as connection:
            connection.sendall(
                f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer"
                f" {own.token}\r\nContent-Length: 50\r\n\r\n{{".encode()
            )
        assert ask(own)[0] == 200
        own.process.terminate()
        assert own.process.stderr is not None
        assert own.process.stderr.read() == ""


def test_more_than_there_are_places_for(server: Server) -> None:
    with openai.OpenAI(api_key=server.token, base_url=server.base, max_retries=0) as client:
        stream = client.chat.completions.create(
            model="default", messages=SLOW, max_tokens=1900, stream=True
        )
        chunks = iter(stream)
        next(chunks)
        with pytest.raises(openai.RateLimitError) as busy:
            client.chat.completions.create(model="default", messages=SLOW, max_tokens=1)
        assert busy.value.response.headers["retry-after"] == "1"
        assert busy.value.code == "busy"
        stream.close()
        waiting = client.with_options(max_retries=10)
        made = waiting.chat.completions.create(model="default", messages=SLOW, max_tokens=2)
        assert made.choices[0].message.content == "w0 w1 end"


def test_a_daemon_that_comes_again_is_found(server: Server, start: Any) -> None:
    with openai.OpenAI(api_key=server.token, base_url=server.base) as client:
        asked: dict[str, Any] = {"model": "default", "messages": SLOW, "max_tokens": 2}
        first = client.chat.completions.create(**asked)
        start()  # ends the one before
        assert client.chat.completions.create(**asked).choices == first.choices
