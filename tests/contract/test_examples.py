"""Each script of examples/ is trained, stopped, continued and compared on the testbed, and has its row in the README."""

from __future__ import annotations

import re

from tests.conftest import ROOT
from tests.example_cases import EXAMPLES

SCRIPTS = {path.name for path in (ROOT / "examples").glob("*.py")}


def test_each_script_has_a_case_for_the_testbed() -> None:
    assert {case.script for case in EXAMPLES} == SCRIPTS


def test_each_script_has_a_row_in_the_readme() -> None:
    page = (ROOT / "examples" / "README.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^\| `(\w+\.py)` \|", page, re.MULTILINE)) == SCRIPTS


def test_the_names_of_the_runs_differ() -> None:
    assert len({case.name for case in EXAMPLES}) == len(EXAMPLES)
