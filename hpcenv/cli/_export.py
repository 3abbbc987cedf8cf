"""`--export DIR` of `hpcenv submit` and `hpcenv rerun`: write a folder with a job, instead of a submission."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import click

from hpcenv.cli import _render
from hpcenv.cli._help_all import RareOption
from hpcenv.errors import UsageError
from hpcenv.exports.export import ENGINES, export_training
from hpcenv.project.context import Context
from hpcenv.project.option_values import argv_of
from hpcenv.project.options import BY_NAME
from hpcenv.project.workspace import Workspace
from hpcenv.submission.handover import export_job
from hpcenv.submission.request import SubmitOptions

# Options that affect only a job of this user. They cannot be exported, because another person submits the folder later.
_NOT_HERE = (
    "name",
    "runs_dir",
    "cluster",
    "sweep",
    "array",
    "max_parallel",
    "chain",
    "stage_data",
    "dependency",
    "after",
)

_SLURM = "slurm"

# Values of sbatch's own --export: ALL, NONE, NIL, and lists of variables. A path has a slash before a comma or `=`.
_OF_SBATCH = re.compile(r"(?i:ALL|NONE|NIL)|[^/,=]*[,=].*")


def _folder(_context: click.Context, _option: click.Parameter, value: str | None) -> str | None:
    """Return the value of `--export`. Refuse a value that sbatch would use as a list of variables."""
    if value is not None and _OF_SBATCH.fullmatch(value):
        raise UsageError(
            f"`--export {value}` is an option of sbatch",
            why="--export of hpcenv names a folder to write, and nothing is submitted",
            hint=f"variables are --env NAME=VALUE and --pass-env NAME; for a folder of this name: ./{value}",
        )
    return value


def options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command the options of an export."""
    for option in reversed((
        click.option(
            "--export", cls=RareOption, metavar="DIR", callback=_folder,
            help="Write a folder that a person without hpcenv can submit. Nothing is submitted.",
        ),
        click.option(
            "--format", "engine", cls=RareOption, type=click.Choice((_SLURM, *ENGINES)), metavar="ENGINE",
            default=_SLURM, show_default=True,
            help=f"With --export: what will start the job: {', '.join((_SLURM, *ENGINES))}.",
        ),
        click.option(
            "--volume", cls=RareOption, metavar="CLAIM:PATH",
            help="With --export to Kubernetes: the volume claim that contains the code, and the path of this volume "
            "in the container.",
        ),
    )):  # fmt: skip
        command = option(command)
    return command


def require_none(engine: str, volume: str | None) -> None:
    """Refuse options of an export if `--export` is not given."""
    if engine != _SLURM or volume is not None:
        why = "they say what is written into the folder of an export"
        raise UsageError("`--format` and `--volume` need `--export DIR`", why=why, hint="add --export DIR")


def refuse(typed: Mapping[str, Any], *, alone: bool) -> None:
    """Refuse options that have no effect on a job that is submitted later.

    Args:
        typed: name of an option -> value.
        alone: whether `--wait`, `--dry-run` and `--test-only` are all not given.
    """
    flags = [flag for name in _NOT_HERE if name in typed for flag in argv_of(BY_NAME[name], typed[name])[:1]]
    if flags or not alone:
        word = flags[0] if flags else "--wait, --dry-run or --test-only"
        raise UsageError(
            f"`--export` cannot be used together with {word}",
            why="the folder is submitted later",
            hint=f"leave out {word}",
        )


def run(
    workspace: Workspace,
    options: SubmitOptions,
    context: Context,
    output: str,
    *,
    engine: str,
    volume: str | None,
    as_json: bool,
    verb: str = "submit",
) -> int:
    """Write the folder, print the requirements of its job, and return the exit status.

    Args:
        output: the folder to make.
        engine: the value of `--format`.
        volume: the value of `--volume`.
        verb: name of the command, for the JSON envelope.
    """
    folder = Path(os.path.abspath(context.cwd / output))
    if engine == _SLURM and volume is None:
        result = export_job(workspace, options, context, folder)
    else:
        result = export_training(workspace, options, context, folder, engine=engine, volume=volume)
    if as_json:
        _render.success(verb, result)
        return 0
    for note in result.notes:
        _render.tell(f"note: {note}")
    _render.say(f"wrote {result.folder}: {result.shape}")
    for need in result.needs:
        _render.tell(f"it needs {need}")
    for one in result.lost:
        _render.tell(f"not there: {one}")
    _render.tell("\nnext: " + _render.quoted(("cd", str(result.folder))) + f" && {result.start}")
    return 0
