"""The table of options: each row is complete, and everything else follows from it."""

from __future__ import annotations

import dataclasses
import typing

import click
import pytest

from hpcenv.cli import rerun, submit
from hpcenv.project import option_types, option_values, site_option_types
from hpcenv.project.document import keys
from hpcenv.project.options import BOUNDED, GROUPS, OPTIONS, WRITTEN, Option, in_place
from hpcenv.project.site import SiteFile
from hpcenv.project.spec import Project
from hpcenv.submission.request import SubmitOptions

IDS = [option.name for option in OPTIONS]


@pytest.mark.parametrize("option", OPTIONS, ids=IDS)
def test_a_row_is_complete(option: Option) -> None:
    assert option.help[0].isupper() or option.help.startswith("`")
    assert option.help.endswith(".")
    assert option.group in GROUPS
    assert option.places
    assert (option.kind == "choice") == bool(option.choices)
    assert not option.written or option.sbatch
    assert not option.environment or option.environment.startswith("SBATCH_")


@pytest.mark.parametrize("option", [option for option in OPTIONS if option.kind not in BOUNDED], ids=lambda o: o.name)
def test_an_option_that_takes_any_text_states_what_it_does_outside_the_project(option: Option) -> None:
    assert option.asks is not None, "`asks`: what a recorded value of somebody else does here; empty for nothing"


def test_names_and_texts_are_unique() -> None:
    assert len({option.name for option in OPTIONS}) == len(OPTIONS)
    assert len({option.help for option in OPTIONS}) == len(OPTIONS)
    letters = [option.short for option in OPTIONS if option.short]
    assert len(set(letters)) == len(letters)


@pytest.mark.parametrize("command", [submit.command, rerun.command], ids=["submit", "rerun"])
def test_the_command_line_has_the_options_of_the_table(command: click.Command) -> None:
    options = {option.name: option for option in command.params if isinstance(option, click.Option)}
    for row in in_place("command"):
        assert row.flag in options[row.name].opts
        assert options[row.name].help == row.help
        assert getattr(options[row.name], "group", None) == row.group
    for row in set(OPTIONS) - set(in_place("command")):
        assert row.name not in options


def test_the_tables_of_hpcenv_toml_and_of_a_site_profile_have_their_keys() -> None:
    tables = [row for row in in_place("project") if row.kind != "native"]
    assert keys(option_types.SubmitTable) == tuple(row.key for row in tables)
    site = [row for row in in_place("site") if row.kind != "native"]
    assert keys(site_option_types.SiteSubmitTable) == tuple(row.key for row in site)
    for row in OPTIONS:
        if row.kind == "native":
            assert row.key in keys(Project)
            assert row.key in keys(SiteFile)


def test_python_has_a_keyword_for_each_option() -> None:
    assert typing.get_type_hints(option_types.SubmitKeywords).keys() == {row.name for row in in_place("python")}


def test_each_option_has_a_value_that_is_not_given_at_first() -> None:
    values = SubmitOptions(script=None)
    assert [field.name for field in dataclasses.fields(option_types.OptionValues)] == IDS
    assert {row.name: getattr(values, row.name) for row in OPTIONS} == {row.name: row.absent for row in OPTIONS}
    written = dataclasses.fields(option_types.WrittenOptions)
    assert [field.name for field in written] == [row.name for row in WRITTEN]


@pytest.mark.parametrize(
    ("name", "value", "kept"),
    [
        ("nodes", "4", 4), ("nodes", 4, 4), ("gpus", 0, 0), ("time", "2h", "02:00:00"), ("time", 90, "90"),
        ("grace", "10m", 600), ("grace", 90, 90), ("stage_limit", "200G", 200 * 10**9), ("stage_limit", 5, 5),
        ("torchrun_args", ["--a=b"], ("--a=b",)), ("env", ["A=b=c"], {"A": "b=c"}), ("env", {"A": 1}, {"A": "1"}),
        ("sbatch", ["exclusive", "wckey=a b"], {"exclusive": None, "wckey": "a b"}), ("requeue", "never", "never"),
        ("sbatch", {"exclusive": True, "nice": 5}, {"exclusive": None, "nice": "5"}), ("stage", True, True),
        ("nodes", None, None), ("lock", None, "default"), ("sweep", None, ()),
    ],
)  # fmt: skip
def test_a_value_is_kept_in_one_form(name: str, value: object, kept: object) -> None:
    row = next(option for option in OPTIONS if option.name == name)
    parsed = option_values.parse(row, value)
    assert parsed == kept
    assert option_values.parse(row, parsed) == kept


@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        ("nodes", 0, "must be at least 1"), ("nodes", "x", "must be a whole number"), ("nodes", True, "must be a whole"),
        ("gpus", -1, "must not be negative"), ("partition", "a b", "must be one word"), ("partition", 3, "must be a text"),
        ("time", "soon", "is not a length of time"), ("grace", "soon", "is not a length of time"),
        ("grace", -5, "must not be negative"), ("stage_limit", "lots", "is not a size"), ("stage", 1, "must be true or"),
        ("requeue", "maybe", "must be saved or always or never"), ("env", ["A"], "`A` has no value: use A=VALUE"),
        ("env", ["A=1", "A=2"], "`A` is given twice"), ("env", "A=1", "must be a table"), ("stage_data", "x y", "must be a list"),
        ("env", {"A B": "1"}, "'A B' is not a variable name"), ("secret", {"A": "x"}, "must be `file:PATH` or `env:NAME`"),
    ],
)  # fmt: skip
def test_a_value_that_is_not_valid_is_refused_with_the_reason(name: str, value: object, why: str) -> None:
    row = next(option for option in OPTIONS if option.name == name)
    with pytest.raises(ValueError, match=why.replace("(", r"\(")):
        option_values.parse(row, value)
