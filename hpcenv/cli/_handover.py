"""`hpcenv export sbatch`: the flags of `hpcenv submit`, and a folder instead of a job."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click

from hpcenv.cli import _render
from hpcenv.cli import submit as submit_verb

# Flags that are about a job of one's own: a folder is submitted later, by somebody else.
_NOT_HERE = frozenset(
    (
        *("run_name", "runs", "cluster", "wait", "dry_run", "test_only", "sweep", "array", "max_parallel", "chain"),
        *("stage_data", "dependency"),
    )
)


def _run(output: str, as_json: bool, **words: Any) -> None:
    """Write a folder with a job that a person without hpcenv can submit.

    It holds the batch script, the code (what git tracks; without git the Python files at
    and below SCRIPT's folder), the lockfile and a README.txt. Everything after -- goes to
    the script.
    """
    from hpcenv.steps.handover import export_sbatch

    asked = submit_verb.asked_for({**_unasked(), **words})
    folder = Path(os.path.abspath(_render.cwd() / output))
    result = export_sbatch(_render.open_project(), asked, submit_verb.surroundings(), folder)
    if as_json:
        _render.success("export", result)
        return
    for note in result.notes:
        _render.tell(f"note: {note}")
    _render.say(f"wrote {result.folder}: {result.shape}")
    for need in result.needs:
        _render.tell(f"it needs {need}")
    _render.tell("\nnext: " + _render.quoted(("cd", str(result.folder))) + " && sbatch job.sbatch")


def _unasked() -> dict[str, Any]:
    """Return the values of flags that nobody gave."""
    found: dict[str, Any] = {}
    for option in submit_verb.command.params:
        if option.name in _NOT_HERE and isinstance(option, click.Option):
            found[option.name] = () if option.multiple else False if option.is_flag else None
    return found


command = click.Command(
    "sbatch",
    callback=_run,
    help=_run.__doc__,
    params=[
        *(p for p in submit_verb.command.params if p.name not in _NOT_HERE),
        click.Option(["-o", "--output"], metavar="DIR", required=True, help="The folder to make."),
    ],
)
