"""The help of every command, as recorded in tests/golden/help: a change of a text shows in review.

HPCENV_UPDATE_GOLDEN=1 pytest tests/contract/test_help_pages.py writes the pages anew.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from hpcenv.cli._command_line import cli
from hpcenv.cli._help_all import WHOLE, GroupedCommand

PAGES = Path(__file__).resolve().parents[1] / "golden" / "help"


def commands(command: click.Command, context: click.Context) -> Iterator[tuple[str, click.Context]]:
    """Return the name of a page and the context of a command, for the command and all below it."""
    yield "-".join(context.command_path.split()[1:]) or "hpcenv", context
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            inner = command.get_command(context, name)
            assert inner is not None
            yield from commands(inner, click.Context(inner, info_name=name, parent=context, **inner.context_settings))


HELP = dict(commands(cli, click.Context(cli, info_name="hpcenv", **cli.context_settings)))
# Commands with rare options: NAME.txt is the page of --help-all, NAME.short.txt that of --help.
SHORT = [name for name, one in HELP.items() if isinstance(one.command, GroupedCommand)]
UPDATE = "HPCENV_UPDATE_GOLDEN=1 pytest tests/contract/test_help_pages.py"


@pytest.mark.parametrize("name", [*HELP, *(f"{name}.short" for name in SHORT)])
def test_the_help_is_as_recorded(name: str) -> None:
    page, context = PAGES / f"{name}.txt", HELP[name.removesuffix(".short")]
    context.meta.update({} if name.endswith(".short") else {WHOLE: True})
    text = context.command.get_help(context).rstrip() + "\n"
    context.meta.clear()
    if os.environ.get("HPCENV_UPDATE_GOLDEN"):
        page.parent.mkdir(parents=True, exist_ok=True)
        page.write_text(text)
    assert text == page.read_text(), UPDATE


def test_there_is_no_page_of_another_command() -> None:
    assert {page.stem for page in PAGES.glob("*")} == {*HELP, *(f"{name}.short" for name in SHORT)}, UPDATE


@pytest.mark.parametrize(
    ("command", "least", "most"), [("submit", 35, 40), ("reproduce", 20, 40), ("image-pull", 5, 8)]
)
def test_help_shows_what_most_users_need(command: str, least: int, most: int) -> None:
    short, whole = (
        set(re.findall(r"^  (?:-\w, )?(--[\w-]+)", (PAGES / f"{command}{end}.txt").read_text(), re.MULTILINE))
        for end in (".short", "")
    )
    assert least <= len(short) <= most
    assert {"--help", "--help-all", "--json"} <= short < whole
