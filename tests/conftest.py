# SPDX-License-Identifier: Apache-2.0
"""Shared by all tests: a skip that tests/allowed_skips.txt does not name fails the run."""

from __future__ import annotations

import signal
import subprocess
import sys
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

TREE = Path(__file__).resolve().parents[1]
LIST = Path(__file__).with_name("allowed_skips.txt")


def read_list(text: str) -> list[tuple[str, str]]:
    """Pairs of patterns, test id and reason.

    Raises:
        ValueError: a line lacks its reason.
    """
    pairs = []
    for line in text.splitlines():
        if not line.strip() or line.startswith("#"):
            continue
        test, bar, reason = (part.strip() for part in line.partition("|"))
        if not bar or not test or not reason:
            raise ValueError(f"allowed_skips.txt: a line is TEST | REASON, not {line!r}")
        pairs.append((test, reason))
    return pairs


class Skips:
    """Collects what was skipped and judges it."""

    def __init__(self, allowed: list[tuple[str, str]]) -> None:
        self.allowed = allowed
        self.seen: list[tuple[str, str]] = []

    def add(self, nodeid: str, longrepr: object) -> None:
        reason = str(longrepr[2] if isinstance(longrepr, tuple) else longrepr)
        self.seen.append((nodeid, reason.removeprefix("Skipped: ")))

    def unlisted(self) -> list[tuple[str, str]]:
        return [
            (nodeid, reason)
            for nodeid, reason in self.seen
            if not any(fnmatchcase(nodeid, t) and fnmatchcase(reason, r) for t, r in self.allowed)
        ]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.skipped:
            self.add(report.nodeid, report.longrepr)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.skipped:
            self.add(report.nodeid, report.longrepr)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self.unlisted() and session.exitstatus in (
            pytest.ExitCode.OK,
            pytest.ExitCode.NO_TESTS_COLLECTED,
        ):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        unlisted = self.unlisted()
        if self.seen:
            terminalreporter.section("SKIPPED", sep="!", yellow=True, bold=True)
        for nodeid, reason in self.seen:
            how = "NOT ALLOWED" if (nodeid, reason) in unlisted else "allowed"
            terminalreporter.line(f"{how}: {nodeid}: {reason}", red=(how != "allowed"))


def pytest_configure(config: pytest.Config) -> None:
    # A shell without job control starts what it puts into the background with Ctrl-C ignored, and
    # that is inherited: the programs that tests interrupt would never notice.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    config.pluginmanager.register(Skips(read_list(LIST.read_text())), "allowed-skips")


@pytest.fixture(scope="session")
def collected(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheels of pvrd and of all that it needs at run time: packages, containers
    and installations of one run are made of the same ones.
    """
    folder = tmp_path_factory.mktemp("wheels")
    subprocess.run(
        [TREE / "tools/install/wheels", TREE, folder, "0", sys.executable],
        stdin=subprocess.DEVNULL, check=True, timeout=900,
    )  # fmt: skip
    return folder
