# SPDX-License-Identifier: Apache-2.0
"""Says what is accelerated, what is not, why, and how to mend it; works without a daemon too."""

from __future__ import annotations

import os
import sys
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from pvrd.ctl import errors, output

if TYPE_CHECKING:
    import argparse

    from pvrd.doctor import Finding

_MARKS = {True: "ok", False: "!!", None: "??"}


def arguments(parser: argparse.ArgumentParser) -> None:
    """`pvrctl doctor` has the global options alone."""


def ask_daemon(bus: str | None) -> tuple[dict[str, Any] | None, str]:
    """What the daemon says of itself in the form of Facts.daemon, or None and why it does not
    answer."""
    from pvrd.client import Client
    from pvrd.errors import PvrdError

    try:
        with Client(bus) as client:
            state = client.properties()
            notes = client.diagnostics()
    except PvrdError as error:
        return None, str(error)
    from pvrd.doctor import daemon_facts

    return daemon_facts(state, notes), ""


def run(args: argparse.Namespace) -> int:
    """Runs `pvrctl doctor`; exit code 0 as soon as it could tell, whatever it had to say."""
    import pwd

    from pvrd.doctor import diagnose
    from pvrd.facts import gather

    daemon, problem = ask_daemon(args.bus)
    try:
        user = pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        user = str(os.geteuid())
    findings = diagnose(gather(daemon=daemon, daemon_error=problem, user=user))
    if args.json:
        output.emit_json([finding.record() for finding in findings])
    else:
        sys.stdout.write(output.plain(words(findings)))
    return errors.OK


def words(findings: Sequence[Finding]) -> str:
    """The findings for people."""
    lines = []
    for finding in findings:
        lines.append(f"{_MARKS[finding.ok]}  {finding.check:<13} {finding.what}")
        for label, text in (("why", finding.why), ("mend", finding.mend)):
            if text:
                lines += textwrap.wrap(
                    f"{label}: {text}",
                    100,
                    initial_indent=" " * 18,
                    subsequent_indent=" " * 24,
                    break_long_words=False,
                    break_on_hyphens=False,
                )
    return "\n".join(lines) + "\n"
