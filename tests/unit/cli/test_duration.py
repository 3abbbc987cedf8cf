"""A plain number is minutes in --time and seconds elsewhere: a note says so where it can be mistaken."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hpcenv.cli._command_line import cli
from hpcenv.cli._duration import tell_unit
from hpcenv.project.options import OPTIONS

NOTE = "note: {0} is {1} seconds, and a plain number of --time is minutes: write the unit, {0}s\n"


@pytest.mark.parametrize(
    ("words", "flag"),
    [
        (("wait", "nosuch", "--timeout", "90"), "--timeout 90"),
        (("clean", "nosuch", "--older-than", "30"), "--older-than 30"),
        (("submit", "nosuch.py", "--grace", "120"), "--grace 120"),
    ],
)
def test_a_plain_number_of_seconds_is_told(hpcenv: Any, project: Path, words: tuple[str, ...], flag: str) -> None:
    assert hpcenv(*words, cwd=project).stderr.startswith(NOTE.format(flag, flag.split()[1]))


@pytest.mark.parametrize("value", ["90s", "2m", "0", "01:30"])
def test_nothing_is_told_of_another_form(hpcenv: Any, project: Path, value: str) -> None:
    assert "note: --timeout" not in hpcenv("wait", "nosuch", "--timeout", value, cwd=project).stderr


def test_no_option_of_the_table_counts_seconds_without_a_word() -> None:
    rows = {row.name for row in OPTIONS if row.kind == "seconds" and "command" in row.places}
    command = cli.get_command(None, "submit")  # type: ignore[arg-type]
    told = {one.name for one in command.params if getattr(one.callback, "__name__", "") == tell_unit.__name__}
    assert rows == told == {"grace", "idle_end"}
