"""`hpcenv submit --export DIR`: a folder with a job in place of a submission."""

from __future__ import annotations

import os
from pathlib import Path

from hpcenv.cli import _render
from hpcenv.errors import UsageError
from hpcenv.project.context import Context
from hpcenv.project.option_values import argv_of
from hpcenv.project.options import BY_NAME
from hpcenv.project.workspace import Workspace
from hpcenv.submission.handover import export_job
from hpcenv.submission.request import SubmitOptions, value_of

# Options that only affect your own job: somebody else submits the folder later.
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


def run(
    workspace: Workspace, options: SubmitOptions, context: Context, output: str, *, alone: bool, as_json: bool
) -> int:
    """Write the folder and print what it needs; return the exit status.

    Args:
        output: the folder to make.
        alone: `--wait`, `--dry-run` and `--test-only` are not given.

    Raises:
        UsageError: an option that has no meaning for a job that is submitted later.
    """
    typed = [flag for name in _NOT_HERE for flag in argv_of(BY_NAME[name], value_of(options, BY_NAME[name]))[:1]]
    if typed or not alone:
        word = typed[0] if typed else "--wait, --dry-run or --test-only"
        raise UsageError(f"`--export` does not go together with {word}", why="the folder is submitted later")
    folder = Path(os.path.abspath(context.cwd / output))
    result = export_job(workspace, options, context, folder)
    if as_json:
        _render.success("submit", result)
        return 0
    for note in result.notes:
        _render.tell(f"note: {note}")
    _render.say(f"wrote {result.folder}: {result.shape}")
    for need in result.needs:
        _render.tell(f"it needs {need}")
    _render.tell("\nnext: " + _render.quoted(("cd", str(result.folder))) + " && sbatch job.sbatch")
    return 0
