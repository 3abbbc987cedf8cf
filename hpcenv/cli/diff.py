"""`hpcenv diff`."""

from __future__ import annotations

import itertools
import textwrap
from typing import TYPE_CHECKING

import click

from hpcenv.cli import _render

if TYPE_CHECKING:
    from hpcenv.model.diff import Change

# Found by `diff`, and by nothing else: the two sides differ in something that matters.
DIFFERENT = 1

_TITLES = {
    "hardware": "other hardware",
    "driver": "other driver",
    "image": "other image",
    "python": "other Python",
    "torch": "other torch",
    "library": "other libraries",
    "package": "other packages",
    "file": "changed files",
    "setting": "other settings",
    "note": "for the record",
}


@click.command("diff")
@click.argument("left")
@click.argument("right")
@click.option(
    "--profile",
    type=click.Choice(["default", "bitwise"]),
    default="default",
    show_default=True,
    help="How strict: bitwise for runs that shall agree in every bit.",
)
@click.option("--runs", metavar="DIR", help="Folder of runs, if not the project's.")
@_render.json_option
def command(left: str, right: str, profile: str, runs: str | None, as_json: bool) -> int:
    """Say what differs between two lockfiles, two runs, or a lockfile and a run.

    LEFT and RIGHT are each a lockfile's path or name, or a run (folder, name, job id).
    What is hardest to repair comes first. Ends with 1 when something that must match
    differs, else with 0.
    """
    from hpcenv.steps.diff import diff

    result = diff(_render.cwd(), left, right, profile="bitwise" if profile == "bitwise" else "default", runs=runs)
    if as_json:
        _render.verdict_on("diff", result, ok=not result.blocking)
        return DIFFERENT if result.blocking else 0
    if not result.changes:
        _render.say(f"{left} and {right} are the same")
        return 0
    for repair, group in itertools.groupby(result.changes, key=lambda change: change.repair):
        _render.say(f"{_TITLES[repair]}:")
        for change in group:
            _show(change)
        _render.say()
    count = len(result.changes)
    plural = "" if count == 1 else "s"
    _render.say(f"{count} difference{plural}, {len(result.blocking)} that must match")
    return DIFFERENT if result.blocking else 0


def _show(change: Change) -> None:
    from hpcenv.node.table import shorten

    mark = {"must": "!!", "warn": " !", "info": "  "}[change.severity]
    _render.say(f"{mark} {change.field}: {shorten(change.left)} -> {shorten(change.right)}")
    if change.severity == "info":
        return
    for word, text in (("why", change.why), ("do", change.remedy)):
        if text:
            _render.say(textwrap.fill(f"{word}: {text}", 80, initial_indent="     ", subsequent_indent="          "))
