# SPDX-License-Identifier: Apache-2.0
"""generate and chat as processes: what is printed, what the daemon is asked, every way to end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from pvrd.errors import NAMES

pytestmark = pytest.mark.bus

REFUSALS = {
    "NotAuthorized": 4, "QuotaExceeded": 4, "Busy": 4, "OutOfMemory": 4, "InvalidArgument": 5,
    "UnknownModel": 5, "BadModel": 5, "UnsupportedModel": 5, "ContextFull": 5, "DeviceLost": 1,
    "Cancelled": 1, "Timeout": 1, "SlowReader": 1, "ShuttingDown": 1, "NoSuchSession": 1,
    "Internal": 1,
}  # fmt: skip


def test_text_goes_to_standard_output_alone(fake) -> None:
    done = fake.run("generate", "hello world")
    assert (done.code, done.text, done.err) == (0, "hello world held\n", "")


def test_json_is_one_object(fake) -> None:
    done = fake.run("--json", "generate", "--top5", "hello world")
    assert done.code == 0
    record = done.json
    assert record.pop("first_token_ms") > 0
    assert record == {
        "text": "hello world held", "token_ids": [100, 101], "prompt_tokens": 2, "device": "cpu",
        "device_name": "Fake CPU", "prefill_tokens_per_s": 8.0, "decode_tokens_per_s": 4.0,
        "restarts": 1, "model": "echo", "seed": 7, "reason": "stop",
        "top5": [[[0, 1.5]], [[1, 1.5]]],
    }  # fmt: skip
    assert "top5" not in fake.run("generate", "--json", "x").json


def test_options_reach_the_daemon(fake) -> None:
    done = fake.run(
        "generate", "--model", "tiny", "--device", "cpu", "--context", "64", "--priority", "3",
        "-n", "5", "--temp", "0.5", "--top-k", "7", "--top-p", "0.9", "--min-p", "0.1",
        "--seed", "18446744073709551615", "--stop", "a", "--stop", "b",
        "--repeat-penalty", "1.1", "--frequency-penalty", "0.1", "--presence-penalty", "0.2",
        "--dry", "0.8", "--mirostat", "3", "--logit-bias", "5=-2", "--logprobs", "2",
        "--system", "Be brief.", "hi",
    )  # fmt: skip
    assert done.code == 0
    session = fake.expect("options", model="tiny")
    assert session == {"model": "tiny", "device": "cpu", "context": 64, "priority": 3}
    assert fake.expect("messages")["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "hi"},
    ]
    assert fake.expect("job") == {
        "max_tokens": 5, "temperature": 0.5, "top_k": 7, "top_p": 0.9, "min_p": 0.1,
        "seed": 18446744073709551615, "stop": ["a", "b"],
        "repeat_penalty": 1.1, "frequency_penalty": 0.1, "presence_penalty": 0.2,
        "dry_multiplier": 0.8, "mirostat": 2, "mirostat_tau": 3.0, "logit_bias": {"5": -2.0},
        "logprobs": 2,
    }  # fmt: skip


@pytest.mark.parametrize("bias", ["5", "5=x", "x=5", "-1=5", "99999999999999999999=5"])
def test_a_bias_that_is_none(fake, bias: str) -> None:
    done = fake.run("generate", f"--logit-bias={bias}", "x")
    assert done.code == 2
    assert f"argument --logit-bias: invalid ID=B value: {bias!r}" in done.err


def test_raw_goes_without_template(fake) -> None:
    assert fake.run("generate", "--raw", "a b").text == "a b held\n"
    assert fake.run("generate", "--raw", "--system", "x", "a").failed(2)


def test_prompt_from_standard_input(fake) -> None:
    assert fake.run("generate", "-", stdin="grüße 你好\n".encode()).text == "grüße 你好 held\n"
    assert "UTF-8" in fake.run("generate", "-", stdin=b"\xff").failed(5)
    assert "empty" in fake.run("generate", "-").failed(5)
    assert "empty" in fake.run("generate", "").failed(5)
    assert "NUL" in fake.run("generate", "-", stdin=b"a\0b").failed(5)
    assert "UTF-8" in fake.run("generate", b"\xff").failed(5)


def test_every_error_has_its_exit_code_at_the_call(fake) -> None:
    assert set(REFUSALS) == set(NAMES)
    for name in ("Busy", "UnknownModel", "DeviceLost"):
        sentence = fake.run("generate", "--model", name, "x").failed(REFUSALS[name])
        assert sentence == f"The fake says {name}."


@pytest.mark.parametrize("name", sorted(REFUSALS))
def test_every_error_has_its_exit_code_in_the_stream(fake, name: str) -> None:
    done = fake.run("--json", "generate", "--model", f"late-{name}", "x")
    assert done.failed(REFUSALS[name]) == "It went wrong."
    assert done.json == {"error": name, "message": "It went wrong.", "exit_code": REFUSALS[name]}


def test_the_daemon_dies_in_the_middle(mortal) -> None:
    done = mortal.run("generate", "--model", "dies", "a b c")
    assert done.failed(1) == "The daemon ended before the work was done."
    assert done.text == "a b "


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_cancels_the_job(fake, signum: signal.Signals) -> None:
    with fake.start("generate", "--model", "endless", "x") as process:
        assert process.stdout is not None
        assert process.stdout.read(2) == b"x "
        process.send_signal(signum)
        fake.expect("cancel")
        _out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (130, b"")


def test_a_reader_that_goes_away_cancels_the_job(fake) -> None:
    with fake.start("generate", "--model", "endless", "x") as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.read(2) == b"x "
        process.stdout.close()
        fake.expect("cancel")
        assert process.stderr.read() == b""
        assert process.wait(60) == 1


def test_a_closed_standard_output_is_a_sentence(fake) -> None:
    script = 'exec "$@" >&-'
    command = ["sh", "-c", script, "sh", sys.executable, "-m", "pvrd.ctl.main", "generate", "x"]
    done = subprocess.run(command, env=fake.env, stderr=subprocess.PIPE, text=True, timeout=60)
    assert done.returncode == 1
    assert done.stderr == "pvrctl: Standard output: Bad file descriptor.\n"


def test_a_full_disk_is_a_sentence(fake) -> None:
    with open("/dev/full", "wb") as full:
        done = fake.run("generate", "x", stdout=full)
    assert done.failed(1) == "Standard output: No space left on device."


def test_control_characters_of_a_model_do_not_reach_a_terminal(fake) -> None:
    ours, theirs = os.openpty()
    done = fake.run("generate", "a\x1b[31mb", stdout=theirs)
    os.close(theirs)
    assert done.code == 0
    assert os.read(ours, 999) == b"a?[31mb held\r\n"
    os.close(ours)


def test_chat_remembers(fake) -> None:
    done = fake.run("chat", "--system", "S", stdin=b"one\n\ntwo\n/new\nthree\n/exit\nfour\n")
    assert (done.code, done.text) == (0, "one held\ntwo held\nthree held\n")
    seen = [fake.expect("messages")["messages"] for _ in range(3)]
    while seen[-1][-1]["content"] != "three":
        seen.append(fake.expect("messages")["messages"])
    first, second, third = ([m["content"] for m in messages] for messages in seen[-3:])
    assert first == ["S", "one"]
    assert second == ["S", "one", "one held", "two"]
    assert third == ["S", "three"]


def test_chat_in_json_is_a_line_an_answer(fake) -> None:
    done = fake.run("--json", "chat", stdin=b"one\ntwo\n")
    assert done.code == 0
    assert len(done.text.splitlines()) == 2


def test_ctrl_c_ends_a_chat_that_is_no_terminal(fake) -> None:
    with fake.start("chat", "--model", "endless") as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(b"x\n")
        process.stdin.flush()
        assert process.stdout.read(2) == b"x "
        process.send_signal(signal.SIGINT)
        fake.expect("cancel")
        process.communicate(timeout=60)
    assert process.returncode == 130


def read_until(fd: int, wanted: bytes) -> bytes:
    """What a terminal shows, up to and with `wanted`."""
    shown = b""
    while wanted not in shown:
        shown += os.read(fd, 1024)
    return shown


def test_ctrl_c_on_a_terminal_drops_the_answer_and_the_talk_goes_on(fake) -> None:
    ours, theirs = os.openpty()
    options = {"stdin": theirs, "stdout": theirs, "stderr": theirs, "start_new_session": True}
    with fake.start("chat", "--model", "endless", **options) as process:
        os.close(theirs)
        read_until(ours, b"> ")
        os.write(ours, b"hello\n")
        read_until(ours, b"hello hello ")
        process.send_signal(signal.SIGINT)
        fake.expect("cancel")
        read_until(ours, b"> ")
        os.write(ours, b"/exit\n")
        assert process.wait(60) == 0
    os.close(ours)
