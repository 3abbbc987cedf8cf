"""Which tests did not run, and why: hooks of conftest.py, and the account that scripts/test.sh reads.

A test is left out as `long` (the marker; HPCENV_TEST_LONG=1 runs it), as `listed` (not_here.toml names it, with the
reason that it gave), or as `user` (the marker `ordinary_user`, while root runs the others). Every other skip is an
`UNLISTED` line of the account, and status 3 of scripts/test.sh.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import tomlkit

LIST = Path(__file__).with_name("not_here.toml")
# Where to write the account; without it these tests are run by hand.
ACCOUNT = "HPCENV_TEST_ACCOUNT"


@dataclass(frozen=True, kw_only=True)
class Listed:
    """Tests that some kind of machine cannot run.

    Attributes:
        tests: the beginning of their node ids.
        skip: a part of the reason that they give.
        why: what the machine lacks.
        run: the command that runs them elsewhere.
    """

    tests: str
    skip: str
    why: str
    run: str


def listed() -> tuple[Listed, ...]:
    """Read not_here.toml."""
    data: Mapping[str, Any] = tomlkit.parse(LIST.read_text()).unwrap()
    return tuple(Listed(**row) for row in data["not-here"])


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # The demonstration, one test that installs torch, begins first: at the end it would run alone.
    items.sort(key=lambda item: item.path.name != "test_demo.py")
    for item in items:
        if item.get_closest_marker("long") and not os.environ.get("HPCENV_TEST_LONG"):
            item.add_marker(pytest.mark.skip(reason="long: HPCENV_TEST_LONG=1 runs it"))
        if item.get_closest_marker("ordinary_user") and os.geteuid() == 0:
            item.add_marker(pytest.mark.skip(reason="not as root: scripts/test.sh runs it as an ordinary user"))


class Account:
    """What the process that prints the results saw, also of xdist's workers."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.listed = listed()
        self.count = {"ran": 0, "long": 0, "listed": 0, "user": 0}
        self.unlisted: dict[str, str] = {}
        self.seconds: dict[str, float] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        room = "/".join(report.nodeid.partition("::")[0].split("/")[:-1][:3])
        self.seconds[room] = self.seconds.get(room, 0.0) + report.duration
        if report.when == "call" and not report.skipped:
            self.count["ran"] += 1
        elif report.skipped:
            self.leave_out(report.nodeid, report.keywords, getattr(report, "wasxfail", None) or reason_of(report))

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.skipped:
            self.leave_out(report.nodeid, {}, reason_of(report))

    def leave_out(self, test: str, keywords: Mapping[str, Any], reason: str) -> None:
        if "long" in keywords and not os.environ.get("HPCENV_TEST_LONG"):
            self.count["long"] += 1
        elif "ordinary_user" in keywords and os.geteuid() == 0:
            self.count["user"] += 1
        elif any(test.startswith(row.tests) and row.skip in reason for row in self.listed):
            self.count["listed"] += 1
        else:
            self.unlisted[test] = reason

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        terminalreporter.section("seconds of each room")
        rooms = sorted(self.seconds.items(), key=lambda room: -room[1])
        terminalreporter.write_line(", ".join(f"{room} {seconds:.0f}" for room, seconds in rooms if seconds >= 1))

    def pytest_sessionfinish(self) -> None:
        lines = [f"{number} {word}" for word, number in self.count.items()]
        lines += [f"UNLISTED {test}: {reason}" for test, reason in sorted(self.unlisted.items())]
        self.path.write_text("\n".join(lines) + "\n")


def reason_of(report: pytest.TestReport | pytest.CollectReport) -> str:
    """The text of a skip, in one line."""
    said = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    return " ".join(said.removeprefix("Skipped: ").split())


def pytest_configure(config: pytest.Config) -> None:
    path = os.environ.get(ACCOUNT)
    if path and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Account(Path(path)), "account")
