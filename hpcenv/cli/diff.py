"""`hpcenv diff`."""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence

import click

from hpcenv.cli import _render
from hpcenv.cli._terminal import escape_control
from hpcenv.errors import Status
from hpcenv.judge.verdict_table import shorten
from hpcenv.locking.diff import diff
from hpcenv.locking.difference import Change
from hpcenv.records.manifest import DETERMINISM_PROFILES, DeterminismProfile
from hpcenv.text import cut, plural, wrap

_WIDEST = 100

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
    "--determinism",
    type=click.Choice(DETERMINISM_PROFILES),
    help="Judge both sides by this determinism profile, instead of the profiles in their lockfiles.",
)
@_render.runs_option
@_render.json_option
def command(left: str, right: str, determinism: DeterminismProfile | None, runs: str | None, as_json: bool) -> int:
    """List what differs between two lockfiles, two runs, or a lockfile and a run.

    LEFT and RIGHT are each a lockfile's path or name, REV:NAME for a lockfile as it was in
    a commit, or a run (folder, name, job id): `hpcenv diff HEAD~1:default default`.
    The differences that are hardest to remove come first. hpcenv judges each side by [policy] and by the determinism
    profile of its lockfile, and the stricter judgement counts. hpcenv ends with 26 if a field that must match
    differs, or if a run has no result, otherwise with 0.
    """
    result = diff(left, right, project=_render.cwd(), determinism=determinism, runs_dir=runs, environ=os.environ)
    status = Status.DIFFERENT if result.blocking else 0
    if as_json:
        _render.verdict_on("diff", result, ok=not result.blocking)
        return status
    if not result.changes:
        same = "are the same" if not result.not_compared else "are the same in all that is recorded"
        _render.say(f"{left} and {right} {same}")
        _not_compared(result.not_compared)
        return 0
    for repair, group in itertools.groupby(result.changes, key=lambda change: change.repair):
        _render.say(f"{_TITLES[repair]}:")
        for change in group:
            _show(change)
        _render.say()
    _render.say(f"{plural(len(result.changes), 'difference')}, {len(result.blocking)} that must match")
    _not_compared(result.not_compared)
    return status


def _not_compared(missing: Sequence[str]) -> None:
    for text in missing:
        _render.say(wrap(f"not compared: {text}", whole_words=False))


def _show(change: Change) -> None:
    mark = {"must": "!!", "warn": " !", "info": "  "}[change.severity]
    # Long values, such as the UUIDs of all GPUs, would fill a screen. So they are cut. --json has the whole values.
    left, right = (escape_control(cut(shorten(value), _WIDEST)) for value in (change.left, change.right))
    _render.say(f"{mark} {escape_control(change.field)}: {left} -> {right}")
    if change.severity == "info":
        return
    for label, text in (("why", change.why), ("do", change.remedy)):
        if text:
            _render.say(wrap(f"{label}: {text}", first="     ", indent=10, whole_words=False))
