# SPDX-License-Identifier: Apache-2.0
"""Shows or changes the configuration of the daemon."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

from pvrd.ctl import common, errors, output

if TYPE_CHECKING:
    import argparse


def arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `pvrctl config`."""
    actions = common.actions(
        parser,
        get="the values in force (what `config` alone does)",
        set="change values, at once and kept over restarts",
    )
    actions["get"].add_argument("keys", nargs="*", metavar="SECTION.KEY")
    actions["set"].add_argument("pairs", nargs="+", metavar="SECTION.KEY=VALUE")


def run(args: argparse.Namespace) -> int:
    """Runs `pvrctl config`."""
    with common.client(args) as client:
        current = client.config()
        if args.action == "set":
            changed = dict(split(pair) for pair in args.pairs)
            client.set_config({key: typed(key, text, current) for key, text in changed.items()})
            current = client.config()
            keys = list(changed)
        else:
            keys = list(getattr(args, "keys", ()))
    for key in keys:
        _known(key, current)
    shown = {key: current[key] for key in keys or sorted(current)}
    if args.json:
        output.emit_json(shown)
    elif len(keys) == 1 and args.action == "get":
        sys.stdout.write(output.plain(text_of(shown[keys[0]])) + "\n")
    else:
        sys.stdout.write(
            output.plain("".join(f"{key} = {text_of(value)}\n" for key, value in shown.items()))
        )
    return errors.OK


def split(pair: str) -> tuple[str, str]:
    """`key=value` in two.

    Raises:
        CtlError: there is no `=`.
    """
    key, equals, value = pair.partition("=")
    if not equals or not key.strip():
        raise errors.CtlError(
            f"{output.plain(pair)!r} is not of the form SECTION.KEY=VALUE.",
            errors.USAGE,
            "InvalidArgument",
        )
    return key.strip(), value.strip()


def _known(key: str, current: dict[str, Any]) -> None:
    if key not in current:
        raise errors.CtlError(
            f"There is no setting {output.plain(key)!r}; `pvrctl config get` lists them.",
            errors.BAD_INPUT,
            "InvalidArgument",
        )


def typed(key: str, text: str, current: dict[str, Any]) -> tuple[str, Any]:
    """A value in the type of the one in force, with its D-Bus type.

    Raises:
        CtlError: there is no such key, or the text is no value of that type.
    """
    _known(key, current)
    now = current[key]
    try:
        if isinstance(now, bool):
            return "b", {"true": True, "false": False}[text.lower()]
        if isinstance(now, int):
            value = int(text)
            if not -(1 << 63) <= value < 1 << 64:  # what the bus can carry
                raise ValueError
            return ("t", value) if value >= 0 else ("x", value)
        if isinstance(now, float):
            return "d", float(text)
        if isinstance(now, list):
            items = json.loads(text)
            if not isinstance(items, list) or not all(isinstance(item, str) for item in items):
                raise ValueError
            return "as", items
    except (ValueError, KeyError, RecursionError) as error:
        kind = {
            bool: "true or false",
            int: "a whole number",
            float: "a number",
            list: 'a list of texts, ["a", "b"]',
        }[type(now)]
        raise errors.CtlError(
            f"{key} is {kind}, not {output.plain(text)!r}.", errors.BAD_INPUT, "InvalidArgument"
        ) from error
    return "s", text


def text_of(value: Any) -> str:
    """A value as it stands in the configuration file, texts without quotes."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
