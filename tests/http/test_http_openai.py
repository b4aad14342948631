# SPDX-License-Identifier: Apache-2.0
"""The official openai client, against pvr-http and real workers."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator

import openai
import pytest

from pvrd.client import Client
from tests.http.conftest import Server

pytestmark = pytest.mark.bus
TALK = [{"role": "user", "content": "Once upon a time"}]
SCHEMA = {
    "type": "object",
    "properties": {"sunny": {"type": "boolean"}, "degrees": {"enum": [10, 20]}},
    "required": ["sunny", "degrees"],
    "additionalProperties": False,
}


@pytest.fixture
def watcher(real: Server) -> Iterator[Client]:
    with Client(real.bus) as made:
        yield made


@pytest.fixture(scope="module")
def client(real: Server):  # type: ignore[no-untyped-def]
    with openai.OpenAI(api_key=real.token, base_url=real.base, max_retries=0) as made:
        yield made


def test_models(client: openai.OpenAI) -> None:
    assert "tiny" in [m.id for m in client.models.list()]
    assert client.models.retrieve("tiny").object == "model"
    with pytest.raises(openai.NotFoundError, match="no model 'other'"):
        client.models.retrieve("other")
    with pytest.raises(openai.NotFoundError, match="no model 'a/b'"):
        client.models.retrieve("a/b")
    assert client.models.retrieve("default").id == "tiny", "the name that stands for it"


def test_what_is_not_served_is_said(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match=r"/v1/responses is not .*/v1/chat/completions"):
        client.responses.create(model="default", input="Hello")
    with pytest.raises(openai.APIStatusError, match="GET /v1/embeddings is not served") as caught:
        client.get("/embeddings", cast_to=object)
    assert caught.value.status_code == 405


def test_an_answer_in_one_piece_and_as_a_stream(client: openai.OpenAI) -> None:
    asked = {"model": "tiny", "messages": TALK, "max_tokens": 12, "temperature": 0}
    whole = client.chat.completions.create(**asked)
    choice = whole.choices[0]
    assert choice.finish_reason == "length"
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 12
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + 12
    chunks = list(
        client.chat.completions.create(
            **asked, stream=True, stream_options={"include_usage": True}
        )
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.total_tokens == whole.usage.total_tokens
    pieces = [c.choices[0].delta.content or "" for c in chunks if c.choices]
    assert "".join(pieces) == choice.message.content
    assert len([p for p in pieces if p]) > 1
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "length"
    assert len({c.id for c in chunks}) == 1


def test_completions_seeds_and_stops(client: openai.OpenAI) -> None:
    asked = {"model": "default", "prompt": "Once upon a time", "max_tokens": 16}
    first = client.completions.create(**asked, temperature=0)
    text = first.choices[0].text
    assert text
    streamed = client.completions.create(**asked, temperature=0, stream=True)
    assert "".join(c.choices[0].text for c in streamed) == text
    stop = text[len(text) // 2 : len(text) // 2 + 2]
    stopped = client.completions.create(**asked, temperature=0, stop=stop)
    assert stopped.choices[0].finish_reason == "stop"
    assert stopped.choices[0].text == text[: text.index(stop)]
    drawn = [
        client.completions.create(**asked, temperature=2, seed=seed, extra_body={"top_k": 60})
        for seed in (-5, -5, 6)
    ]
    assert drawn[0].choices[0].text == drawn[1].choices[0].text != drawn[2].choices[0].text


def test_logprobs(client: openai.OpenAI) -> None:
    made = client.chat.completions.create(
        model="tiny", messages=TALK, max_tokens=3, temperature=0, logprobs=True, top_logprobs=2
    )
    shown = made.choices[0].logprobs
    assert shown is not None
    assert shown.content is not None
    assert len(shown.content) == 3
    for token in shown.content:
        assert token.logprob <= 0
        assert bytes(token.bytes or []).decode() == token.token
        assert len(token.top_logprobs) == 2
        assert token.top_logprobs[0].token == token.token, "greedy takes the likeliest"
        assert token.top_logprobs[1].token.startswith("token_id:")
        assert token.top_logprobs[0].logprob >= token.top_logprobs[1].logprob
    plain = client.completions.create(
        model="tiny", prompt="Once", max_tokens=3, temperature=0, logprobs=2
    ).choices[0]
    assert plain.logprobs is not None
    assert plain.logprobs.tokens is not None
    assert plain.logprobs.text_offset is not None
    assert "".join(plain.logprobs.tokens) == plain.text
    assert plain.logprobs.text_offset[0] == 0


def test_an_answer_fits_its_schema(client: openai.OpenAI) -> None:
    made = client.chat.completions.create(
        model="tiny",
        messages=TALK,
        max_tokens=60,
        response_format={
            "type": "json_schema",
            "json_schema": {"name": "weather", "schema": SCHEMA, "strict": True},
        },
    )
    assert made.choices[0].finish_reason == "stop"
    found = json.loads(made.choices[0].message.content or "")
    assert set(found) == {"sunny", "degrees"}
    assert found["degrees"] in (10, 20)


def test_embeddings(client: openai.OpenAI) -> None:
    texts = ["Once upon a time", "there was", "Once upon a time"]
    made = client.embeddings.create(model="tiny", input=texts)  # asks for base64 by itself
    plain = client.embeddings.create(model="tiny", input=texts[0], encoding_format="float")
    rows = [e.embedding for e in made.data]
    assert rows[0] == rows[2] != rows[1]
    assert rows[0] == pytest.approx(plain.data[0].embedding)
    assert math.hypot(*rows[0]) == pytest.approx(1, abs=1e-4)
    assert made.usage.prompt_tokens > 0


def test_embeddings_of_many_texts_take_few_calls_and_keep_their_order(
    client: openai.OpenAI, watcher: Client
) -> None:
    texts = [f"text {n % 7} " * (n % 5 + 1) for n in range(1100)]  # more than a call may have
    before = watcher.statistics()["jobs"]["done"]
    made = client.embeddings.create(model="tiny", input=texts)
    assert 2 <= watcher.statistics()["jobs"]["done"] - before < len(texts) // 10
    rows = [e.embedding for e in made.data]
    assert [e.index for e in made.data] == list(range(len(texts)))
    single = {t: client.embeddings.create(model="tiny", input=t) for t in set(texts)}
    for text, row in zip(texts, rows, strict=True):
        assert row == pytest.approx(single[text].data[0].embedding, abs=1e-6)
    assert made.usage.prompt_tokens == sum(single[t].usage.prompt_tokens for t in texts)
    with watcher.open_text({"model": "tiny", "context": 128}) as session:
        assert session.embed(texts[:3], {"count_tokens": True}) == session.embed(texts[:3], {})
    texts[700] = "word " * 500
    with pytest.raises(openai.BadRequestError) as full:
        client.embeddings.create(model="tiny", input=texts)
    assert full.value.code == "context_length_exceeded"


def test_what_pvrd_refuses_has_its_status(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as unknown:
        client.chat.completions.create(model="other", messages=TALK)
    assert unknown.value.code == "model_not_found"
    long = [{"role": "user", "content": "word " * 500}]
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError) as full:
            client.chat.completions.create(model="tiny", messages=long, stream=stream)
        assert full.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError, match="top_p"):
        client.chat.completions.create(model="tiny", messages=TALK, top_p=7)


def test_a_talk_goes_on_in_its_session(client: openai.OpenAI, real: Server) -> None:
    """What was computed of a talk is not computed again, though another's came between."""
    talk = [{"role": "user", "content": "Once upon a time there was a word and a word and"}]
    asked = {"model": "tiny", "max_tokens": 4, "temperature": 0}
    first = client.chat.completions.create(messages=talk, **asked)
    answer = {"role": "assistant", "content": first.choices[0].message.content}
    other = [{"role": "user", "content": "Something else"}]
    client.chat.completions.create(messages=other, **asked)
    longer = [*talk, answer, {"role": "user", "content": "on"}]
    again = client.chat.completions.create(messages=longer, **asked)
    assert again.usage is not None
    assert again.usage.prompt_tokens_details is not None
    assert first.usage is not None
    cached = again.usage.prompt_tokens_details.cached_tokens or 0
    assert cached > first.usage.prompt_tokens // 2
    assert cached < again.usage.prompt_tokens
