# SPDX-License-Identifier: Apache-2.0
"""The chat: messages of several lines, commands, a full context, and a terminal to talk at."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import select
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pvrd.ctl import chat_commands, chat_input
from pvrd.ctl.chat_talk import Talk
from pvrd.ctl.errors import CtlError
from pvrd.errors import ContextFull

LIMIT_S = 60  # ends a broken test


class Stream:
    """Events of an answer."""

    def __init__(self, events: list[dict[str, Any]]) -> None:
        self._events = events

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for event in self._events:
            if event["type"] == "full":
                raise ContextFull("The context is full.")
            yield event

    def close(self) -> None:
        pass


class Session:
    """Answers each question with itself; has room for so many messages, and writes so many
    tokens in a context of as many."""

    def __init__(self, room: int = 99, cut_at: int = 0) -> None:
        self.room, self.cut_at = room, cut_at
        self.asked: list[list[str]] = []

    def chat(self, messages: list[dict[str, str]], settings: dict[str, Any]) -> Stream:
        self.asked.append([m["content"] for m in messages])
        if len(messages) > self.room:
            return Stream([{"type": "full"}])
        cut = len(messages) == self.cut_at
        start = {"type": "start", "prompt_tokens": 7, "context": 8, "model": "m", "device": "cpu"}
        token = {"type": "token", "id": 1, "text": f"re {messages[-1]['content']}"}
        end = {"type": "end", "reason": "length" if cut else "stop"}
        return Stream([start, token, end])

    def cancel_quietly(self) -> None:
        pass


def talk_to(session: Session) -> Talk:
    return Talk(session, {}, "", False)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("typed", "messages"),
    [
        (["one", "two"], ["one", "two"]),
        (["a \\", "b\\", "", "c"], ["a \nb\n", "c"]),
        (['"""', "a", "  b", '"""', "c"], ["a\n  b", "c"]),
        (['"""a', "", 'b"""'], ["a\n\nb"]),
        (['"""one line"""'], ["one line"]),
        (['"""', "never ended"], ["never ended"]),
        (["last \\"], ["last "]),
        (['say """ x'], ['say """ x']),
    ],
)
def test_messages_of_several_lines(typed: list[str], messages: list[str]) -> None:
    lines = iter(typed)
    prompts = []

    def line(prompt: str) -> str | None:
        prompts.append(prompt)
        return next(lines, None)

    found = []
    while (message := chat_input.message(line)) is not None:
        found.append(message)
    assert found == messages
    assert prompts[0] == chat_input.PROMPT


def test_the_older_half_makes_room(capsys: pytest.CaptureFixture[str]) -> None:
    session = Session(room=7)
    talk = talk_to(session)
    for question in "abcd":
        talk.ask(question)
    capsys.readouterr()
    talk.ask("e")
    assert session.asked[-1] == ["c", "re c", "d", "re d", "e"]
    assert talk.counts.dropped == 2
    assert "2 oldest turns were dropped" in capsys.readouterr().err


def test_a_question_that_never_fits_is_refused_and_not_kept() -> None:
    talk = talk_to(Session(room=0))
    with pytest.raises(ContextFull):
        talk.ask("long")
    assert talk.turns == []


def test_an_answer_that_the_context_cuts_makes_room_for_the_next(
    capsys: pytest.CaptureFixture[str],
) -> None:
    talk = talk_to(Session(cut_at=3))
    talk.ask("a")
    talk.ask("b")
    assert talk.turns == [("b", "re b")]
    assert "The answer was cut" in capsys.readouterr().err


def test_retry_asks_again_in_place_of_the_answer() -> None:
    session = Session()
    talk = talk_to(session)
    with pytest.raises(CtlError):
        chat_commands.run(talk, "/retry")
    talk.ask("a")
    talk.ask("b")
    assert chat_commands.run(talk, "/retry")
    assert session.asked[-1] == session.asked[-2] == ["a", "re a", "b"]
    assert len(talk.turns) == 2


def test_a_talk_is_saved_and_loaded(tmp_path: Path) -> None:
    talk, file = talk_to(Session()), tmp_path / "talk of today.json"
    for line in ("/system Be brief.", "/set temperature 0.5", "/set stop END"):
        assert chat_commands.run(talk, line)
    talk.ask("grüße")
    assert chat_commands.run(talk, f"/save {file}")
    assert chat_commands.run(talk, f"/save {file}"), "a saved talk may be saved over"
    other = talk_to(Session())
    assert chat_commands.run(other, f"/load {file}")
    assert (other.system, other.turns) == ("Be brief.", [("grüße", "re grüße")])
    assert other.settings == {"temperature": 0.5, "stop": ["END"]}
    assert chat_commands.run(other, "/new")
    assert other.messages("x") == [
        {"role": "system", "content": "Be brief."}, {"role": "user", "content": "x"},
    ]  # fmt: skip


def test_a_talk_on_a_full_disk_leaves_the_saved_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    talk, file = talk_to(Session()), tmp_path / "t"
    chat_commands.run(talk, f"/save {file}")
    before = file.read_bytes()
    talk.ask("more")

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "writev", full)
    with pytest.raises(CtlError, match="the disk is full"):
        chat_commands.run(talk, f"/save {file}")
    assert file.read_bytes() == before
    assert os.listdir(tmp_path) == ["t"]


@pytest.mark.parametrize(
    "content",
    [
        "hello", "[]", "{}", '{"messages": 5, "settings": {}}', '{"messages": [], "settings": 5}',
        '{"messages": [{"role": "user", "content": "x"}], "settings": {}}',
        '{"messages": [], "settings": {"model": "x"}}',
        '{"messages": [], "settings": {"top_k": "x"}}',
        '{"messages": [], "settings": {"stop": "x"}}',
        "[" * 100_000,
    ],
)  # fmt: skip
def test_other_files_are_neither_loaded_nor_overwritten(tmp_path: Path, content: str) -> None:
    file = tmp_path / "notes"
    file.write_text(content)
    talk = talk_to(Session())
    for command in ("load", "save"):
        with pytest.raises(CtlError):
            chat_commands.run(talk, f"/{command} {file}")
    assert file.read_text() == content


@pytest.mark.parametrize(
    "line",
    [
        "/nonsense", "/save", "/load /no/such/file", "/save /no/such/folder/x", "/set colour red",
        "/save ~nosuchuser/x", "/load ~nosuchuser/x",
        "/set top_k many", "/set top_k -1", "/set temperature warm",
    ],
)  # fmt: skip
def test_mistakes_are_sentences(line: str) -> None:
    talk = talk_to(Session())
    with pytest.raises(CtlError):
        chat_commands.run(talk, line)
    assert talk.settings == {}


def test_settings_are_shown_and_taken_back(capsys: pytest.CaptureFixture[str]) -> None:
    talk = talk_to(Session())
    chat_commands.run(talk, "/set seed 18446744073709551615")
    assert talk.settings == {"seed": (1 << 64) - 1}
    chat_commands.run(talk, "/set")
    shown = capsys.readouterr().err
    assert "18446744073709551615" in shown
    assert all(key in shown for key in chat_commands.SETTINGS)
    chat_commands.run(talk, "/set seed")
    assert talk.settings == {}


def test_the_history_goes_on_from_chat_to_chat(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    file = chat_input.history_file()
    assert file == tmp_path / "pvrd/chat_history"
    monkeypatch.setenv("XDG_STATE_HOME", "relative")
    assert chat_input.history_file() == Path.home() / ".local/state/pvrd/chat_history"


# --- as a process


@pytest.mark.bus
def test_a_full_context_drops_the_oldest_turn_and_says_so(fake) -> None:
    done = fake.run("chat", "--model", "small", stdin=b"one\ntwo\nthree\n")
    assert (done.code, done.text) == (0, "one held\ntwo held\nthree held\n")
    assert done.err == "pvrctl: The context is full. The oldest turn was dropped.\n"


@pytest.mark.bus
def test_commands_reach_the_daemon(fake) -> None:
    lines = b'/system Be kind.\n/set max_tokens 9\n"""\none\ntwo"""\n/stats\n'
    done = fake.run("chat", stdin=lines)
    assert (done.code, done.text) == (0, "one\ntwo held\n")
    assert "of 99 tokens" in done.err
    fake.expect("messages", messages=[
        {"role": "system", "content": "Be kind."}, {"role": "user", "content": "one\ntwo"},
    ])  # fmt: skip
    assert fake.expect("job") == {"max_tokens": 9}
    assert "no command /bogus" in fake.run("chat", stdin=b"/bogus\n").failed(2)


class Terminal:
    """A chat at a pseudo terminal."""

    def __init__(self, fake: Any, state: Path, *options: str) -> None:
        self._fd, theirs = os.openpty()
        self._shown = b""  # and not yet asked for
        env = {**fake.env, "XDG_STATE_HOME": str(state), "TERM": "xterm"}
        streams = dict.fromkeys(("stdin", "stdout", "stderr"), theirs)
        self.process = fake.start("chat", *options, env=env, start_new_session=True, **streams)
        os.close(theirs)

    def __enter__(self) -> Terminal:
        self.until("> ")
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._fd)

    def until(self, wanted: str) -> str:
        """What is shown, up to and with that."""
        while wanted.encode() not in self._shown:
            assert select.select([self._fd], [], [], LIMIT_S)[0], self._shown
            self._shown += os.read(self._fd, 1024)
        before, _, self._shown = self._shown.partition(wanted.encode())
        return before.decode() + wanted

    def interrupt(self) -> None:
        """Ctrl-C, until it is answered: readline does not notice one between its prompt and its
        wait, where no finger is that fast.
        """
        for _ in range(LIMIT_S):
            os.kill(self.process.pid, signal.SIGINT)
            if select.select([self._fd], [], [], 1)[0]:
                return
        raise AssertionError("Ctrl-C is not answered")

    def type(self, text: str) -> None:
        os.write(self._fd, text.encode())


@pytest.mark.bus
def test_a_terminal_has_history_and_survives_mistakes(fake, tmp_path: Path) -> None:
    file = tmp_path / "pvrd/chat_history"
    with Terminal(fake, tmp_path) as terminal:
        terminal.type("/bogus\n")
        assert "/help lists them" in terminal.until("them.\r\n")
        terminal.until("> ")
        for line in ('"""', "first", "second"):
            terminal.type(f"{line}\n")
            terminal.until(chat_input.MORE)
        terminal.type('"""\n')
        terminal.until("first\r\nsecond held")
        terminal.until("> ")
        terminal.interrupt()  # drops what is typed
        terminal.until("> ")
        terminal.type("/exit\n")
        assert terminal.process.wait(60) == 0
    assert file.read_text().splitlines() == ["/bogus", '"""', "first", "second", '"""', "/exit"]
    assert file.stat().st_mode & 0o777 == 0o600
    with Terminal(fake, tmp_path) as terminal:
        terminal.type("\x1b[A\x1b[A\x1b[A\n")  # three lines up
        terminal.until("second held")
        terminal.until("> ")  # the end of input is one only where a line may begin
        terminal.type("\x04")
        assert terminal.process.wait(60) == 0
    with Terminal(fake, tmp_path, "--no-history") as terminal:
        terminal.type("private\n")
        terminal.until("private held")
        terminal.until("> ")
        terminal.type("/exit\n")
        assert terminal.process.wait(60) == 0
    assert file.read_text().splitlines()[-1] == "second"


@pytest.mark.bus
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_that_ends_programs_ends_a_chat(fake, tmp_path: Path, number: int) -> None:
    with Terminal(fake, tmp_path) as terminal:
        terminal.type("hello\n")
        terminal.until("hello held")
        terminal.until("> ")
        for _ in range(LIMIT_S):  # as interrupt(): readline may miss the first
            terminal.process.send_signal(number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                assert terminal.process.wait(1) == 130
                break
    assert "hello" in (tmp_path / "pvrd/chat_history").read_text(), "what was typed is kept"


@pytest.mark.bus
def test_a_refusal_on_a_terminal_does_not_end_the_talk(fake, tmp_path: Path) -> None:
    with Terminal(fake, tmp_path, "--model", "late-Busy") as terminal:
        terminal.type("x\n")
        terminal.until("It went wrong.")
        terminal.until("> ")
        terminal.type("/exit\n")
        assert terminal.process.wait(60) == 0


def test_a_saved_talk_is_json_for_people(tmp_path: Path) -> None:
    talk = talk_to(Session())
    talk.ask("a")
    chat_commands.run(talk, f"/save {tmp_path / 't'}")
    saved = json.loads((tmp_path / "t").read_text())
    assert [m["role"] for m in saved["messages"]] == ["user", "assistant"]
