# SPDX-License-Identifier: Apache-2.0
"""Generations: events, stop strings, limits, resuming, several jobs on one state."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine import memory
from engine.backends.cpu import CpuBackend
from engine.backends.null import NullBackend
from engine.errors import ContextFull, DeviceLost, InvalidArgument, OutOfMemory
from engine.text.__main__ import main
from engine.text.generate import Generation, StopMatcher
from engine.text.model import State, TextModel
from engine.text.request import End, Event, Request, Start, Token, message, tokenize

SAMPLED = {"temperature": 1.3, "top_k": 0, "top_p": 0.99, "seed": 11, "max_tokens": 24}
PENALISED = {**SAMPLED, "repeat_penalty": 1.3, "presence_penalty": 0.4, "dry_multiplier": 0.8}
MIROSTAT = {**SAMPLED, "mirostat": 2, "mirostat_tau": 3.0, "mirostat_eta": 0.3}


@pytest.fixture(scope="module")
def model(tiny_q8: Path) -> TextModel:
    return TextModel.load(tiny_q8, "", CpuBackend(2), chunk=8)


@pytest.fixture
def state(model: TextModel) -> Any:
    state = model.state()
    yield state
    state.close()


def run(state: State, request: Request, delivered: Sequence[int] = ()) -> list[Event]:
    g = Generation(state, request, delivered)
    events: list[Event] = []
    while not g.finished:
        events += g.step()
    assert g.step() == []
    assert isinstance(events[0], Start)
    assert isinstance(events[-1], End)
    return events


def tokens(events: list[Event]) -> list[Token]:
    return [e for e in events if isinstance(e, Token)]


def text(events: list[Event]) -> str:
    return "".join(e.text for e in events if not isinstance(e, Start))


def test_events(state: State) -> None:
    request = Request(
        "generate", "hello w1 " * 6, settings={"temperature": 0, "max_tokens": 5, "top5": True}
    )
    events = run(state, request)
    start, end = events[0], events[-1]
    assert start == Start(len(tokenize(state.model, request)[0]), 96)
    assert end.reason == "length"
    assert [t.n for t in tokens(events)] == list(range(5))
    for t in tokens(events):
        assert t.top5 is not None
        assert t.id == t.top5[0][0]
        assert len(t.top5) == 5
        assert [v for _, v in t.top5] == sorted((v for _, v in t.top5), reverse=True)
    assert end.stats["prefill_tokens"] == start.prompt_tokens
    assert end.stats["decode_tokens"] == 4
    assert end.stats["prefill_s"] > 0
    assert end.stats["decode_s"] > 0
    sent = [json.loads(json.dumps(message(e))) for e in events]
    assert [m["t"] for m in sent] == ["text.start"] + ["text.token"] * 5 + ["text.end"]


def test_a_slice_is_a_chunk_or_a_token(state: State) -> None:
    request = Request("generate", "x" * 20, settings={"temperature": 0, "max_tokens": 3})
    g = Generation(state, request)
    counts = []
    while not g.finished:
        before = len(state.tokens)
        g.step()
        counts.append(len(state.tokens) - before)
    assert sum(counts[:3]) == g.prompt_tokens == 22
    assert counts == [8, 8, 6, 1, 1]


@pytest.mark.parametrize(
    "settings",
    [{"temperature": 0, "max_tokens": 24}, SAMPLED, PENALISED, MIROSTAT],
    ids=["greedy", "sampled", "penalised", "mirostat"],
)
def test_resumed_is_undisturbed(model: TextModel, settings: dict[str, Any]) -> None:
    request = Request("generate", "tell me", settings={**settings, "stop": ["\x01\x02\x03"]})
    whole_state = model.state()
    whole = run(whole_state, request)
    ids = [t.id for t in tokens(whole)]
    assert len(ids) > 8
    for cut in (0, 1, 7, len(ids) - 1):
        fresh = model.state()
        rest = run(fresh, request, ids[:cut])
        assert [(t.n, t.id, t.text) for t in tokens(rest)] == [
            (t.n, t.id, t.text) for t in tokens(whole)[cut:]
        ]
        assert rest[0] == whole[0]
        assert (rest[-1].reason, rest[-1].text) == (whole[-1].reason, whole[-1].text)
        fresh.close()
    # All delivered, but not the end: only that is left to say.
    rest = run(whole_state, request, ids)
    assert [type(e) for e in rest] == [Start, End]
    assert rest[-1].reason == whole[-1].reason
    with pytest.raises(InvalidArgument, match="do not belong"):
        Generation(whole_state, request, [*ids, 5])
    with pytest.raises(InvalidArgument, match="do not belong"):
        Generation(whole_state, request, [10_000])
    whole_state.close()


def test_chances(state: State) -> None:
    request = Request("generate", "w1 w2", settings={**SAMPLED, "logprobs": 3})
    for t in tokens(run(state, request)):
        assert t.logprob is not None
        assert t.logprobs is not None
        assert t.logprob <= t.logprobs[0][1] < 0
        assert dict(t.logprobs).get(t.id, t.logprob) == t.logprob  # type: ignore[call-overload]
        assert len(t.logprobs) == 3
    plain = tokens(run(state, Request("generate", "w1 w2", settings=SAMPLED)))
    assert all(t.logprob is None for t in plain)


def test_penalties_keep_an_answer_from_going_round(state: State) -> None:
    greedy = {"temperature": 0, "max_tokens": 40}
    twice = {"presence_penalty": 100.0, "repeat_last_n": 0, **greedy}
    ids = [t.id for t in tokens(run(state, Request("generate", "w1 w2", settings=twice)))]
    assert len(set(ids)) == len(ids) == 40


def test_seeds(state: State) -> None:
    def ids(**settings: Any) -> list[int]:
        return [t.id for t in tokens(run(state, Request("generate", "a b", settings=settings)))]

    assert ids(**SAMPLED) == ids(**SAMPLED)
    assert ids(**SAMPLED) != ids(**{**SAMPLED, "seed": 12})
    free = {k: v for k, v in SAMPLED.items() if k != "seed"}
    assert ids(**free) == ids(**free)  # the prompt is the seed


def test_stop_strings(model: TextModel, state: State) -> None:
    free = run(state, Request("generate", "go", settings={**SAMPLED, "max_tokens": 40}))
    said = text(free)
    stop = said[5:8]
    settings = {**SAMPLED, "max_tokens": 40, "stop": ["never said", stop]}
    events = run(state, Request("generate", "go", settings=settings))
    assert events[-1].reason == "stop"
    assert text(events) == said[: said.index(stop)]
    ids = [t.id for t in tokens(events)]
    assert ids == [t.id for t in tokens(free)][: len(ids)]
    # A stop string that never comes whole takes nothing away.
    settings["stop"] = [said[-2:] + "never said"]
    assert text(run(state, Request("generate", "go", settings=settings))) == said


@given(
    st.text("ab", max_size=30),
    st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
    st.data(),
)
def test_stop_matcher(said: str, stops: list[str], data: st.DataObject) -> None:
    """However the text comes in pieces, what goes on is what is before the first stop string."""
    matcher = StopMatcher(stops)
    out, at = "", 0
    while at < len(said) and not matcher.hit:
        n = data.draw(st.integers(1, 5))
        out += matcher.add(said[at : at + n])
        at += n
        # What was passed on can be the beginning of no stop string any more.
        assert not any(
            said[len(out) :].startswith(s) and len(out) + len(s) <= at - n for s in stops
        )
    ends = [e for s in stops if (e := said.find(s)) >= 0]
    assert matcher.hit == bool(ends) or (ends and at >= len(said))
    if matcher.hit:
        assert said.startswith(out)
        assert not any(s in out for s in stops)
    else:
        assert out + matcher.rest() == said


def test_end_of_answer_token(state: State) -> None:
    """The token that ends an answer is delivered without text; after it comes the end."""
    g = Generation(state, Request("generate", "x", settings={"temperature": 0}))
    g._ends = frozenset(range(300))
    events: list[Event] = []
    while not g.finished:
        events += g.step()
    assert [type(e) for e in events] == [Start, Token, End]
    assert events[1].text == ""
    assert events[2].reason == "stop"


def test_context(model: TextModel) -> None:
    state = model.state(20)
    request = Request("generate", "x" * 10, settings={"temperature": 0})
    events = run(state, request)
    assert events[-1].reason == "length"
    assert events[0].prompt_tokens + len(tokens(events)) == 20
    with pytest.raises(ContextFull, match=r"22 tokens.*20"):
        Generation(state, Request("generate", "x" * 20))
    with pytest.raises(ContextFull):
        Generation(state, Request("generate", "x" * 18))
    assert Generation(state, Request("generate", "x" * 17)).prompt_tokens == 19
    state.close()
    for wrong in (97, -1):
        with pytest.raises(InvalidArgument, match="1 to 96"):
            model.state(wrong)


def test_cancel(state: State) -> None:
    g = Generation(state, Request("generate", "x", settings={**SAMPLED, "stop": ["\x00" * 9]}))
    g.step()
    (end,) = g.cancel()
    assert end.reason == "cancelled"
    assert g.finished
    assert g.cancel() == []
    assert g.step() == []


def test_what_a_session_computed_before_is_kept(state: State) -> None:
    settings = {"temperature": 0, "max_tokens": 4}
    first = run(state, Request("generate", "hello", settings=settings))
    kept = state.tokens.copy()
    longer = run(state, Request("generate", "hello, and more", settings=settings))
    assert longer[-1].stats["prefill_tokens"] < longer[0].prompt_tokens
    again = run(state, Request("generate", "hello", settings=settings))
    assert again[-1].stats["prefill_tokens"] == 1
    assert tokens(again) == tokens(first)
    assert state.tokens == kept


def test_two_generations_on_one_state(state: State) -> None:
    """Taking turns costs time, not the answers."""
    requests = [
        Request("generate", p, settings={"temperature": 0, "max_tokens": 6}) for p in ("ab", "xyz")
    ]
    alone = [[t.id for t in tokens(run(state, r))] for r in requests]
    both = [Generation(state, r) for r in requests]
    got: list[list[int]] = [[], []]
    while not all(g.finished for g in both):
        for g, ids in zip(both, got, strict=True):
            ids += [e.id for e in g.step() if isinstance(e, Token)]
    assert got == alone


def test_chat_without_a_template(state: State) -> None:
    request = Request(
        "chat", messages=[{"role": "user", "content": "Hi"}], settings={"max_tokens": 3}
    )
    ids, stops = tokenize(state.model, request)
    assert state.model.tokenizer.decode(ids) == " User: Hi\nAssistant:"
    assert stops == ("\nUser:",)
    assert len(tokens(run(state, request))) == 3


def test_bad_requests(state: State, tiny: Any, tmp_path: Path) -> None:
    for header in (
        {},
        {"kind": "generate"},
        {"kind": "generate", "prompt": 3},
        {"kind": "sing", "prompt": "x"},
        {"kind": "chat", "messages": []},
        {"kind": "generate", "prompt": "x", "settings": []},
    ):
        with pytest.raises(InvalidArgument):
            Request.parse(header)
    with pytest.raises(InvalidArgument, match="temperature"):
        Generation(state, Request("generate", "x", settings={"temperature": -1}))
    path = tiny.write(tmp_path / "m.gguf", "F16", tokenizer__ggml__add_bos_token=False)
    other = TextModel.load(path, "", NullBackend()).state()
    with pytest.raises(InvalidArgument, match="empty"):
        Generation(other, Request("generate", ""))


def test_nonsense_is_device_loss(tiny_q8: Path) -> None:
    """A null device without numpy computes nothing: its record of zeros is told from logits."""
    state = TextModel.load(tiny_q8, "", NullBackend()).state()
    g = Generation(state, Request("generate", "x"))
    state.executable.write("topk", np.full(130, np.nan, np.float32))
    with pytest.raises(DeviceLost, match="no numbers"):
        g.step()


def test_device_loss_passes_through(tiny_q8: Path) -> None:
    state = TextModel.load(tiny_q8, "", NullBackend(reference=True, lose_at=3)).state()
    g = Generation(state, Request("generate", "x", settings={"temperature": 0}))
    g.step()
    g.step()
    with pytest.raises(DeviceLost):
        g.step()


def test_memory_is_admitted_with_figures(
    model: TextModel, tiny_q8: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "available", lambda: memory.RESERVE + 1000)
    with pytest.raises(OutOfMemory, match=r"KV cache 0 MiB.*64 MiB are available"):
        model.state()
    with pytest.raises(OutOfMemory):
        TextModel.load(tiny_q8, "", NullBackend())


def test_progress_of_loading(tmp_path: Path, tiny_q8: Path) -> None:
    cache = str(tmp_path / "m.pvrm")
    for _ in ("compiled", "from the cache"):
        seen: list[float] = []
        TextModel.load(tiny_q8, cache, NullBackend(), seen.append).close()
        assert seen == sorted(seen)
        assert len(seen) > 10
        assert seen[-1] == 1


def test_command_line(tiny_q8: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tiny_q8), "--explain"]) == 0
    assert "fuse_ffn" in capsys.readouterr().out
    assert main([str(tiny_q8), "--backend", "null", "-n", "3", "--prompt", "hi"]) == 0
    assert "[length; prefill 4 tokens" in capsys.readouterr().out
    assert main([str(tiny_q8), "--chat", "-n", "3"]) == 0
    assert "decode 2 tokens" in capsys.readouterr().out
    assert main(["/does/not/exist.gguf"]) == 1
    assert "exist.gguf cannot be opened: No such file" in capsys.readouterr().err


def test_what_was_there_before_changes_no_digit(model: TextModel) -> None:
    """The same prompt and seed: the same logits after a prefill of all of it, of its last token
    alone, and of a rest of one token behind whole slices."""
    records = []
    for words, before in ((12, ()), (12, (0,)), (12, (5,)), (9, ()), (9, (1,))):
        state = model.state()
        for cut in before:
            ids = tokenize(model, Request("generate", "w1 " * words))[0]
            state.run(ids[: min(model.chunk, len(ids) - cut)], head=False)
        got = run(state, Request("generate", "w1 " * words, settings={**SAMPLED, "top5": True}))
        records.append([(t.id, t.top5) for t in tokens(got)])
        again = run(state, Request("generate", "w1 " * words, settings={**SAMPLED, "top5": True}))
        assert [(t.id, t.top5) for t in tokens(again)] == records[-1]
        state.close()
    assert records[0] == records[1] == records[2]
    assert records[3] == records[4]
