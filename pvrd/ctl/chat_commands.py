# SPDX-License-Identifier: Apache-2.0
"""The commands of a chat: lines that begin with a stroke."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pvrd.ctl import errors, output
from pvrd.ctl.chat_talk import Talk
from pvrd.ctl.target import Target

# What /set takes, by the options' names in the API.
SETTINGS = (
    "max_tokens", "temperature", "top_k", "top_p", "min_p", "seed", "stop",
    "repeat_penalty", "repeat_last_n", "frequency_penalty", "presence_penalty",
    "dry_multiplier", "dry_base", "dry_allowed_length",
    "mirostat", "mirostat_tau", "mirostat_eta",
)  # fmt: skip
_MOST_BYTES = 16 << 20  # of a saved talk


def run(talk: Talk, line: str) -> bool:
    """Does what a line asks for; False when the talk is over.

    Raises:
        CtlError: there is no such command, or it cannot be done.
        PvrdError: of the daemon, where the command asks it something.
    """
    word, _, rest = line.strip().partition(" ")
    if word in ("/exit", "/quit"):
        return False
    if word not in _COMMANDS:
        sentence = f"There is no command {output.plain(word)}; /help lists them."
        raise errors.CtlError(sentence, errors.USAGE)
    _COMMANDS[word][0](talk, rest.strip())
    return True


def _help(talk: Talk, _rest: str) -> None:
    rows = [[f"{word} {given}".rstrip(), text] for word, (_, given, text) in _COMMANDS.items()]
    rows.append(["/exit", "ends the talk, as Ctrl-D does"])
    talk.say(
        output.table(rows) + "A line that ends in \\ goes on in the next; "
        '""" begins and ends a message of several lines.\n'
        "A message that begins with / has a blank before it. Ctrl-C stops an answer."
    )


def _new(talk: Talk, _rest: str) -> None:
    talk.turns.clear()
    talk.question = ""


def _system(talk: Talk, rest: str) -> None:
    if rest:
        talk.system = "" if rest == '""' else rest
    else:
        talk.say(talk.system or "There is no system message.")


def _retry(talk: Talk, _rest: str) -> None:
    if not talk.question:
        raise errors.CtlError("There is nothing to ask again.", errors.USAGE)
    if talk.turns and talk.turns[-1][0] == talk.question:
        talk.turns.pop()
    talk.ask(talk.question)


def _path(rest: str) -> Path:
    if not rest:
        raise errors.CtlError("Which file? Its name follows the command.", errors.USAGE)
    try:
        return Path(rest).expanduser()
    except RuntimeError as error:
        raise _failed(Path(rest), "there is no such user") from error


def _save(talk: Talk, rest: str) -> None:
    path = _path(rest)
    if path.exists():
        _read(path)  # another file's content is never lost
    settings = {key: value for key, value in talk.settings.items() if key in SETTINGS}
    record = {"messages": talk.messages(), "settings": settings}
    text = json.dumps(record, ensure_ascii=False, indent=1) + "\n"
    with Target(str(path)) as target:  # whole or not at all: the talk of before stays
        target.write([memoryview(text.encode("utf-8", "replace"))])
        target.finish()
    talk.say(f"Saved {len(talk.turns)} turns.")


def _load(talk: Talk, rest: str) -> None:
    system, turns, settings = _read(_path(rest))
    talk.system, talk.turns, talk.settings = system, turns, settings
    talk.question = turns[-1][0] if turns else ""
    talk.say(f"Loaded {len(turns)} turns.")


def _failed(path: Path, why: str) -> errors.CtlError:
    sentence = f"{output.plain(str(path))}: {why}."
    return errors.CtlError(sentence, errors.BAD_INPUT, "InvalidArgument")


def _read(path: Path) -> tuple[str, list[tuple[str, str]], dict[str, Any]]:
    """System message, turns and settings of a saved talk.

    Raises:
        CtlError: it cannot be read, or is none.
    """
    try:
        with path.open("rb") as file:
            record = json.loads(file.read(_MOST_BYTES))
        said = [(str(m["role"]), str(m["content"])) for m in record["messages"]]
        settings = dict(record["settings"])
    except OSError as error:
        raise _failed(path, os.strerror(error.errno or 0)) from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise _failed(path, "it is no saved talk") from error
    system = said.pop(0)[1] if said and said[0][0] == "system" else ""
    if [role for role, _ in said] != ["user", "assistant"] * (len(said) // 2):
        raise _failed(path, "its questions and answers do not alternate")
    if strange := [key for key, value in settings.items() if not _fits(key, value)]:
        raise _failed(path, f"the setting {output.plain(strange[0])} is none of a talk")
    contents = [content for _, content in said]
    return system, list(zip(contents[::2], contents[1::2], strict=True)), settings


def _fits(key: str, value: Any) -> bool:
    """A setting that a saved talk may have."""
    from pvrd.client import OPTIONS

    if key not in SETTINGS or isinstance(value, bool):
        return False
    if OPTIONS[key] == "as":
        return isinstance(value, list) and all(isinstance(text, str) for text in value)
    return isinstance(value, (int, float) if OPTIONS[key] == "d" else int)


def _set(talk: Talk, rest: str) -> None:
    """Shows or changes a setting; without a value it takes the daemon's default again."""
    key, _, value = rest.partition(" ")
    if not rest:
        rows = [[key, str(talk.settings.get(key, "default"))] for key in SETTINGS]
        talk.say(output.table(rows).rstrip("\n"))
    elif key not in SETTINGS:
        sentence = f"There is no setting {output.plain(key)}; /set lists them."
        raise errors.CtlError(sentence, errors.USAGE)
    elif value.strip():
        talk.settings[key] = _value(key, value.strip())
    else:
        talk.settings.pop(key, None)


def _value(key: str, text: str) -> Any:
    """A setting's value of the type that the API wants.

    Raises:
        CtlError: it is none.
    """
    from pvrd.client import OPTIONS, options
    from pvrd.errors import PvrdError

    kind = OPTIONS[key]
    try:
        value: Any = [text] if kind == "as" else float(text) if kind == "d" else int(text)
        options({key: value})
    except (ValueError, PvrdError) as error:
        number = "a number" if kind == "d" else "an integer from 0 on"
        sentence = f"{key} is {number}, not {output.plain(text)}."
        raise errors.CtlError(sentence, errors.USAGE) from error
    return value


def _stats(talk: Talk, _rest: str) -> None:
    counts = talk.counts
    rows = [
        ["answers", str(counts.answers)],
        ["tokens written", str(counts.tokens)],
        ["turns kept", str(len(talk.turns))],
        ["turns dropped", str(counts.dropped)],
        ["context used", f"{counts.used} of {counts.context} tokens"],
    ]
    if counts.last:
        last = counts.last
        rows += [
            ["model", str(last["model"])],
            ["device", f"{last['device']} ({last['device_name']})"],
            ["reading", f"{output.rate(last['prefill_tokens_per_s'])} tokens/s"],
            ["writing", f"{output.rate(last['decode_tokens_per_s'])} tokens/s"],
            ["first token", f"{last['first_token_ms']:.0f} ms"],
        ]
    talk.say(output.table(rows).rstrip("\n"))


_COMMANDS: dict[str, tuple[Callable[[Talk, str], None], str, str]] = {
    "/help": (_help, "", "says this"),
    "/new": (_new, "", "forgets the talk; system message and settings stay"),
    "/system": (_system, "[TEXT]", 'shows or changes the system message; "" takes it away'),
    "/retry": (_retry, "", "asks the last question again"),
    "/save": (_save, "FILE", "writes the talk into a file"),
    "/load": (_load, "FILE", "goes on with a talk that was saved"),
    "/set": (_set, "[KEY [VALUE]]", "shows or changes how answers are made; no value: default"),
    "/stats": (_stats, "", "what the talk has cost so far"),
}
