# SPDX-License-Identifier: Apache-2.0
"""zsh's completion has for each command of pvrctl its summary, its options and their choices."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.passes import OPTIONAL
from pvrd.ctl.main import COMMANDS, parser_for

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = (ROOT / "tools/completion/_pvrctl").read_text()
SHARED: dict[str, str] = dict(
    re.findall(r"^    (shared|jobs|text|sizes)=\((.*?)\)$", SCRIPT, re.M | re.S)
)


def said(command: str) -> str:
    """What the script has for a command, with the lists that it refers to."""
    found: dict[str, str] = dict(
        re.findall(r"^\s+([\w*]+)\) (_arguments.*?) ;;", SCRIPT.partition("rest)")[2], re.M | re.S)
    )
    text = found.get(command, found["*"])
    return text + "".join(known for name, known in SHARED.items() if f"${name}" in text)


def options(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for inner in action.choices.values():
                yield from options(inner)
        elif action.option_strings and action.dest != "help":
            yield action


@pytest.mark.parametrize("command", COMMANDS)
def test_zsh(command: str) -> None:
    text = said(command)
    names = set()
    for option in options(parser_for(command)):
        names |= set(option.option_strings)
        for name in option.option_strings:
            assert re.search(re.escape(name) + r"(?![\w-])", text), name
        for choice in option.choices or ():
            assert re.search(rf"\b{re.escape(str(choice))}\b", text), (option.dest, choice)
    assert set(re.findall(r"--[\w-]+", text)) <= names | {"--help"}
    assert f"'{command}:{COMMANDS[command]}'" in SCRIPT


def test_passes_that_may_be_left_out() -> None:
    (listed,) = re.findall(r"--without\[pass\]:pass:\(([\w ]+)\)", SCRIPT)
    assert sorted(listed.split()) == sorted(OPTIONAL)
    assert all(name in parser_for("compile").format_help() for name in OPTIONAL)
