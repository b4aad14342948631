# SPDX-License-Identifier: Apache-2.0
"""What several commands share: the connection, options of jobs, waiting for a model to load."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pvrd.ctl import errors, output

if TYPE_CHECKING:
    import argparse
    import subprocess

    from pvrd.client import Client, Session


@contextlib.contextmanager
def client(args: argparse.Namespace) -> Iterator[Client]:
    """The connection to the daemon that --bus, $PVRD_BUS or the buses name.

    Raises:
        CtlError: there is no daemon, or it refused; with the sentence and the exit code for it.
    """
    from pvrd.client import Client
    from pvrd.errors import PvrdError

    try:
        with Client(args.bus) as connection:
            yield connection
    except PvrdError as error:
        sentence = output.sentence(str(error))
        raise errors.CtlError(sentence, errors.code_of(error.name), error.name) from error


def global_options() -> argparse.ArgumentParser:
    """A parser with the global options, to be a parent of every other: they may stand anywhere."""
    import argparse

    shared = argparse.ArgumentParser(add_help=False)
    group = shared.add_argument_group("global options")
    group.add_argument(
        "--bus",
        default=argparse.SUPPRESS,
        metavar="user|system|ADDRESS",
        help="the bus of the daemon (default: $PVRD_BUS, else system if pvrd is there, else user)",
    )
    group.add_argument(
        "--json", action="store_true", default=argparse.SUPPRESS, help="output for programs"
    )
    return shared


def actions(parser: argparse.ArgumentParser, **helps: str) -> dict[str, argparse.ArgumentParser]:
    """The parsers of a command's own commands: name -> parser; `action` will be the name."""
    inner = parser.add_subparsers(dest="action", metavar="|".join(helps))
    return {
        name: inner.add_parser(
            name, help=text, description=text, parents=[global_options()], allow_abbrev=False
        )
        for name, text in helps.items()
    }


def at_least(low: int) -> Callable[[str], int]:
    """A type for argparse: an integer from `low` on."""

    def number(text: str) -> int:
        value = int(text)
        if value < low:
            raise ValueError
        return value

    number.__name__ = f"integer from {low} on"
    return number


def from_environment(name: str) -> int | None:
    """An option's value from its twin in the environment, an integer from 0 on; None without it.

    Raises:
        CtlError: it is something else.
    """
    text = os.environ.get(name)
    try:
        return at_least(0)(text) if text else None
    except ValueError as error:
        sentence = f"{name} is an integer from 0 on, not {output.plain(text or '')}."
        raise errors.CtlError(sentence, errors.USAGE, "InvalidArgument") from error


def engine_program(module: str, arguments: list[str]) -> tuple[list[str], dict[str, str]]:
    """Command and environment of `python -m MODULE`, for what pvrctl, which imports nothing of the
    engine, has done by a program of its own."""
    root = str(Path(__file__).resolve().parent.parent.parent)
    path = os.environ.get("PYTHONPATH", "")
    env = {**os.environ, "PYTHONPATH": f"{root}:{path}" if path else root}
    return [sys.executable, "-P", "-m", module, *arguments], env


def run_engine(module: str, arguments: list[str]) -> subprocess.CompletedProcess[str]:
    """Such a program, from start to end."""
    import subprocess

    command, env = engine_program(module, arguments)
    return subprocess.run(
        command,
        env=env,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
    )


def number(value: float) -> float | int:
    """A number that is whole as an integer, which it is in JSON, too."""
    return int(value) if value == int(value) else value


def ratio(small: int, large: int) -> float | int:
    """How many times larger, to three digits."""
    return number(round(large / small, 3))


def job_options(parser: argparse.ArgumentParser) -> None:
    """The options that all jobs have."""
    parser.add_argument("--device", choices=("auto", "gpu", "cpu"), help="where to run it (auto)")
    parser.add_argument(
        "--model", metavar="NAME", help="the model's name, as `pvrctl models` lists it"
    )
    parser.add_argument(
        "--priority", type=at_least(0), metavar="0-15", help="above 11 asks for authorisation (5)"
    )
    parser.add_argument(
        "--share", type=at_least(0), metavar="0-100", help="percent of the device, guaranteed (0)"
    )


def wait_ready(session: Session, args: argparse.Namespace) -> None:
    """Shows how far the model is loaded, where somebody looks on; jobs wait for it in the daemon
    anyway."""
    if args.json or not os.isatty(2):
        return
    meter = output.Progress("loading")
    try:
        for done in session.loading():
            meter.update(done, 1.0)
    finally:
        meter.clear()


def speed_note(record: dict[str, Any]) -> None:
    """The line under an answer, on a terminal alone."""
    if os.isatty(2) and os.isatty(1):
        note = (
            f"{len(record['token_ids'])} tokens, "
            f"{output.rate(record['decode_tokens_per_s'])} tokens/s on "
            f"{record['device']} ({output.plain(record['device_name'])})"
        )
        if record["restarts"]:
            note += f", {record['restarts']} restarts"
        if record["reason"] == "length":
            note += ", cut at the length asked for"
        output.warn(note)


def device_name(client: Client, kind: str) -> str:
    """The name of the device of a kind, as the daemon lists it; empty where it does not."""
    for device in client.properties().get("Devices", ()):
        if device.get("kind") == kind:
            return str(device.get("name", ""))
    return ""


def default_model(client: Client, kind: str) -> str:
    """The model of a kind that is taken when none is named."""
    return next(
        (
            str(model["name"])
            for model in client.models()
            if model.get("kind") == kind and model.get("default")
        ),
        "",
    )
