# SPDX-License-Identifier: Apache-2.0
"""Lists, adds and removes models."""

from __future__ import annotations

import os
import stat
import sys
from typing import TYPE_CHECKING, Any

from pvrd.ctl import common, compile, errors, output

if TYPE_CHECKING:
    import argparse


def arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `pvrctl models`."""
    actions = common.actions(
        parser,
        list="the models that pvrd knows (what `models` alone does)",
        add="copy a model file into pvrd's store",
        remove="remove a model that was added",
    )
    add, remove = actions["add"], actions["remove"]
    add.add_argument(
        "file", metavar="FILE", help="GGUF, ONNX, pvrm, or what `pvrctl compile` takes"
    )
    compile.weights_option(add)
    add.add_argument("--name", help="the name to give it (default: from the file's name)")
    add.add_argument("--licence", help="the model's licence, to be shown by `models`")
    add.add_argument("--origin", help="where it comes from, likewise")
    add.add_argument(
        "--replace", action="store_true", help="in place of the model that has this name"
    )
    remove.add_argument("name", metavar="NAME")


def run(args: argparse.Namespace) -> int:
    """Runs `pvrctl models`."""
    if args.action == "add":
        return _add(args)
    with common.client(args) as client:
        if args.action == "remove":
            client.remove_model(args.name)
            models = []
        else:
            models = client.models()
    if args.action == "remove":
        _say(args, {"removed": args.name}, f"Removed {args.name}.")
    elif args.json:
        output.emit_json(models)
    elif not models:
        sys.stdout.write("No models. `pvrctl models add FILE` adds one.\n")
    else:
        rows = [
            [
                str(model.get("name", "")) + (" *" if model.get("default") else ""),
                str(model.get("kind", "")),
                output.size(int(model.get("size", 0))),
                str(model.get("source", "")),
                str(model.get("arch", "") or "-"),
                str(model.get("licence", "") or "-"),
            ]
            for model in models
        ]
        sys.stdout.write(
            output.plain(
                output.table(rows, ("NAME", "KIND", "SIZE", "FROM", "ARCHITECTURE", "LICENCE"))
            )
        )
        if any(model.get("default") for model in models):
            sys.stdout.write("* taken when no model is named\n")
    return errors.OK


def _say(args: argparse.Namespace, record: dict[str, Any], sentence: str) -> None:
    if args.json:
        output.emit_json(record)
    else:
        sys.stdout.write(output.plain(sentence) + "\n")


def name_for(file: str) -> str:
    """A model's name made of a file's name, as pvrd itself names a loose file."""
    from pvrd.models import slug

    return slug(os.path.splitext(os.path.basename(file))[0])


def _add(args: argparse.Namespace) -> int:
    with compile.ready(args.file, args.weights) as file:
        return _add_file(args, file)


def _add_file(args: argparse.Namespace, file: str) -> int:
    name = args.name or name_for(args.file)
    try:
        # A FIFO would make open() wait for a writer.
        fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise errors.CtlError(
            f"{output.plain(args.file)}: {os.strerror(error.errno or 0)}.",
            errors.BAD_INPUT,
            "InvalidArgument",
        ) from error
    meter = output.Progress(f"adding {name}")
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise errors.CtlError(
                f"{output.plain(args.file)} is no regular file.",
                errors.BAD_INPUT,
                "InvalidArgument",
            )
        settings = {
            "licence": args.licence,
            "origin": args.origin,
            "replace": args.replace or None,
            "interactive": True if sys.stdin and sys.stdin.isatty() else None,
        }
        end: dict[str, Any] = {}
        with common.client(args) as client:
            for event in client.add_model(fd, name, settings):
                if event.get("type") == "progress":
                    meter.update(float(event.get("done", 0)), float(event.get("total", 0)) or None)
                else:
                    end = {
                        key: value
                        for key, value in event.items()
                        if key not in ("v", "seq", "type")
                    }
    finally:
        meter.clear()
        os.close(fd)
    _say(
        args,
        {"name": name, **end},
        f"Added {end.get('name', name)} ({output.size(int(end.get('size', 0)))}).",
    )
    return errors.OK
