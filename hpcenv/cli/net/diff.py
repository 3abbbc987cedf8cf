"""`hpcenv net diff`."""

from __future__ import annotations

import itertools

import click

from hpcenv.cli import _render
from hpcenv.cli._terminal import escape_control
from hpcenv.runs.network import diff_networks
from hpcenv.text import wrap

_TITLES = {
    "profile": "another network",
    "variable": "other settings",
    "warning": "other warnings",
    "hardware": "other hardware",
    "version": "other software of the nodes",
}


@click.command("diff")
@click.argument("left")
@click.argument("right")
@_render.runs_option
@_render.json_option
def command(left: str, right: str, runs: str | None, as_json: bool) -> None:
    """List what differs between the networks of two runs: settings, warnings, adapters, versions.

    LEFT and RIGHT are run folders, run names or job ids. hpcenv compares the values that the runs recorded. `hpcenv
    diff` compares everything else.
    """
    result = diff_networks(_render.cwd(), left, right, runs=runs)
    if as_json:
        _render.success("net diff", result)
        return
    if not result.changes:
        _render.say(f"{escape_control(result.left)} and {escape_control(result.right)}: no difference")
    for kind, changes in itertools.groupby(result.changes, key=lambda change: change.kind):
        _render.say(f"{_TITLES[kind]}:")
        for change in changes:
            _render.say(
                f"  {escape_control(change.name)}: {escape_control(change.left)} -> {escape_control(change.right)}"
            )
    for text in result.not_compared:
        _render.say(wrap(f"not compared: {escape_control(text)}", whole_words=False))
