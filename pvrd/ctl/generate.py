# SPDX-License-Identifier: Apache-2.0
"""Answers one prompt; the text streams as it comes.

The prompt goes through the model's chat template unless --raw is given. Ctrl-C cancels the job in
the daemon.
"""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Any

from pvrd.ctl import common, errors, output

if TYPE_CHECKING:
    import argparse

    from pvrd.client import TextSession

MOST_BYTES = 1 << 20  # of a message to the daemon (docs/api.md)


def arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `pvrctl generate`."""
    text_options(parser)
    parser.add_argument(
        "--raw",
        action="store_true",
        help="go on with the prompt as it stands, without chat template",
    )
    parser.add_argument(
        "--top5", action="store_true", help="with --json: the five best logits at each token"
    )
    parser.add_argument(
        "--logprobs",
        type=common.at_least(0),
        metavar="N",
        help="with --json: the log of each token's chance, and the N likeliest tokens",
    )
    parser.add_argument("prompt", help="the prompt, or - for standard input")


def _bias(given: str) -> tuple[int, float]:
    """ID=B of the command line."""
    name, _, value = given.partition("=")
    token = int(name)
    if not 0 <= token < 1 << 32:
        raise ValueError
    return token, float(value)


_bias.__name__ = "ID=B"  # as argparse names what it could not read


def session_options(parser: argparse.ArgumentParser) -> None:
    """What every command with a text session has."""
    common.job_options(parser)
    parser.add_argument(
        "--context", type=common.at_least(1), metavar="N", help="tokens of prompt and answer (2048)"
    )


def kv_option(parser: argparse.ArgumentParser) -> None:
    """--kv, of what writes."""
    parser.add_argument(
        "--kv",
        choices=("f16", "q8"),
        help="keep keys and values as halves (f16), or in half the memory as int8 (q8)",
    )


def text_options(parser: argparse.ArgumentParser) -> None:
    """What generate and chat share."""
    session_options(parser)
    kv_option(parser)
    parser.add_argument(
        "-n", "--max-tokens", type=common.at_least(1), metavar="N", help="tokens at most (256)"
    )
    parser.add_argument(
        "--temp", type=float, metavar="T", help="temperature; 0: the likeliest token each time (0)"
    )
    parser.add_argument(
        "--top-k",
        type=common.at_least(0),
        metavar="K",
        help="of the K likeliest tokens; 0: off (40)",
    )
    parser.add_argument(
        "--top-p", type=float, metavar="P", help="of the likeliest that sum to P (0.95)"
    )
    parser.add_argument(
        "--min-p",
        type=float,
        metavar="P",
        help="of those with P times the best one's chance (0.05)",
    )
    parser.add_argument(
        "--repeat-penalty",
        type=float,
        metavar="P",
        help="makes what was said lately less likely; 1: off (1)",
    )
    parser.add_argument(
        "--frequency-penalty",
        type=float,
        metavar="P",
        help="the same, for each time it was said (0)",
    )
    parser.add_argument("--presence-penalty", type=float, metavar="P", help="the same, once (0)")
    parser.add_argument(
        "--dry",
        type=float,
        metavar="M",
        help="makes long repetitions less likely: the multiplier of DRY; 0: off (0)",
    )
    parser.add_argument(
        "--mirostat",
        type=float,
        metavar="TAU",
        help="mirostat 2 towards a surprise of TAU bits a token, instead of top-k, top-p and min-p",
    )
    parser.add_argument(
        "--logit-bias",
        action="append",
        type=_bias,
        metavar="ID=B",
        help="added to a token's logit; may be given often",
    )
    parser.add_argument(
        "--seed", type=common.at_least(0), metavar="S", help="the same seed writes the same text"
    )
    parser.add_argument(
        "--stop", action="append", metavar="TEXT", help="end before this text; may be given 8 times"
    )
    parser.add_argument("--system", metavar="TEXT", help="the system message")


def job_settings(args: argparse.Namespace) -> dict[str, Any]:
    """The options of Generate and Chat that were given."""
    pairs = {
        "max_tokens": args.max_tokens,
        "temperature": args.temp,
        "top_k": args.top_k,
        "top_p": args.top_p,
        "min_p": args.min_p,
        "repeat_penalty": args.repeat_penalty,
        "frequency_penalty": args.frequency_penalty,
        "presence_penalty": args.presence_penalty,
        "dry_multiplier": args.dry,
        "mirostat": None if args.mirostat is None else 2,
        "mirostat_tau": args.mirostat,
        "logit_bias": dict(args.logit_bias) if args.logit_bias else None,
        "logprobs": getattr(args, "logprobs", None),
        "seed": args.seed,
        "stop": args.stop,
        "top5": getattr(args, "top5", False) or None,
    }
    return {key: value for key, value in pairs.items() if value is not None}


def session_settings(args: argparse.Namespace) -> dict[str, Any]:
    """The options of OpenText that were given."""
    pairs = {
        "model": args.model,
        "device": args.device,
        "context": args.context,
        "kv": getattr(args, "kv", None),
        "priority": args.priority,
        "share": args.share,
    }
    return {key: value for key, value in pairs.items() if value is not None}


def _check_length(count: int) -> None:
    if count > MOST_BYTES:
        raise errors.CtlError(
            f"The text has more than the {MOST_BYTES >> 20} MiB that pvrd takes.",
            errors.BAD_INPUT,
            "InvalidArgument",
        )


def prompt_text(given: str, raw: bool) -> str:
    """The prompt, from standard input where it is `-`; there the last newline is no part of it
    unless `raw`.

    Raises:
        CtlError: it is not UTF-8, too long, or empty.
    """
    text = given
    if given == "-":
        try:
            data = sys.stdin.buffer.read(MOST_BYTES + 1)
            _check_length(len(data))
            text = data.decode("utf-8")
        except UnicodeDecodeError as error:
            raise errors.CtlError(
                "The prompt on standard input is not UTF-8.", errors.BAD_INPUT
            ) from error
        text = text if raw else text.removesuffix("\n")
    if any("\ud800" <= char <= "\udfff" for char in text):
        raise errors.CtlError("The prompt is not UTF-8.", errors.BAD_INPUT)
    if "\0" in text:
        raise errors.CtlError("The prompt has a NUL character.", errors.BAD_INPUT)
    if not text:
        raise errors.CtlError("The prompt is empty.", errors.BAD_INPUT)
    return text


class Answer:
    """Collects the events of one text stream; `record` is what --json prints."""

    def __init__(self, show: bool) -> None:
        self.text: list[str] = []
        self.ids: list[int] = []
        self.top5: list[Any] = []
        self.logprobs: list[dict[str, Any]] = []  # one for each id, where they were asked for
        self.suspect: list[list[int]] = []  # first and last token of what may be wrong
        self.start: dict[str, Any] = {}
        self.end: dict[str, Any] = {}
        self._show = show
        self._tty = bool(sys.stdout and sys.stdout.isatty())
        self._asked = time.monotonic()
        self._first = 0.0
        self._restarts = 0
        self._device: dict[str, Any] = {}

    def _piece(self, text: str) -> None:
        self.text.append(text)
        if self._show and text:
            sys.stdout.write(output.plain(text) if self._tty else text)
            sys.stdout.flush()

    def take(self, event: dict[str, Any]) -> None:
        """Takes one line of the stream."""
        kind = event.get("type")
        if kind == "start":
            self.start = self._device = event
        elif kind == "token":
            if not self._first:
                self._first = time.monotonic()
            if "id" in event:
                self.ids.append(int(event["id"]))
                if "top5" in event:
                    self.top5.append(event["top5"])
                if "logprobs" in event:
                    self.logprobs.append(
                        {"logprob": event.get("logprob"), "likeliest": event["logprobs"]}
                    )
            self._piece(str(event.get("text", "")))
        elif kind == "device":
            self._device = event
            self._restarts = int(event.get("restarts", self._restarts + 1))
        elif kind == "suspect":
            since = int(event.get("since", 0))
            if since < len(self.ids):
                self.suspect.append([since, len(self.ids) - 1])
                output.warn(
                    f"tokens {since} to {len(self.ids) - 1} may be wrong: "
                    f"{event.get('device_name', '')} computed {event.get('kernel', '')} wrongly"
                )
        elif kind == "end":
            self.end = event
            self._piece(str(event.get("text", "")))

    def record(self, top5: bool) -> dict[str, Any]:
        """The object of `--json generate`; speeds are 0 where nothing was measured."""
        stats = self.end.get("stats") or {}
        last = self.end if self.end.get("device") else self._device
        record = {
            "text": "".join(self.text),
            "token_ids": self.ids,
            "prompt_tokens": self.start.get("prompt_tokens", 0),
            "device": last.get("device", ""),
            "device_name": last.get("device_name", ""),
            "prefill_tokens_per_s": _rate(stats, "prefill"),
            "decode_tokens_per_s": _rate(stats, "decode"),
            "first_token_ms": round(1000 * (self._first - self._asked), 3) if self._first else 0.0,
            "restarts": self.end.get("restarts", self._restarts),
            "model": self.start.get("model", ""),
            "seed": self.start.get("seed", 0),
            "reason": self.end.get("reason", ""),
        }
        if self.logprobs:
            record["logprobs"] = self.logprobs
        if self.suspect:
            record["suspect"] = self.suspect
        return {**record, "top5": self.top5} if top5 else record


def _rate(stats: dict[str, Any], what: str) -> float:
    seconds = float(stats.get(f"{what}_s", 0) or 0)
    return round(float(stats.get(f"{what}_tokens", 0)) / seconds, 3) if seconds > 0 else 0.0


def answer(
    session: TextSession,
    messages: list[dict[str, str]] | None,
    prompt: str,
    settings: dict[str, Any],
    show: bool,
) -> Answer:
    """Runs one job to its end; on Ctrl-C or a reader that went away the job is cancelled in the
    daemon."""
    collected = Answer(show)
    stream = (
        session.generate(prompt, settings) if messages is None else session.chat(messages, settings)
    )
    try:
        for event in stream:
            collected.take(event)
    except BaseException:
        stream.close()
        session.cancel_quietly()
        raise
    return collected


def run(args: argparse.Namespace) -> int:
    """Runs `pvrctl generate`."""
    prompt = prompt_text(args.prompt, args.raw)
    if args.raw and args.system:
        raise errors.CtlError("--system needs the chat template; leave out --raw.", errors.USAGE)
    with common.client(args) as client:
        messages = None
        if not args.raw:
            messages = [{"role": "system", "content": args.system}] if args.system else []
            messages.append({"role": "user", "content": prompt})
        with client.open_text(session_settings(args)) as session:
            common.wait_ready(session, args)
            done = answer(session, messages, prompt, job_settings(args), show=not args.json)
    if args.json:
        output.emit_json(done.record(args.top5))
        return errors.OK
    sys.stdout.write("\n")
    sys.stdout.flush()
    common.speed_note(done.record(False))
    return errors.OK
