"""Shell completion for the names of runs and lockfiles of the project in the current folder. Runs on: LOGIN NODE.

click itself completes commands and options (docs/how-to/submit.md, "Completion"). If a folder cannot be read, there are
no completions and no error message. A message would break the line that the user types.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from hpcenv.errors import HpcenvError

if TYPE_CHECKING:
    from collections.abc import Iterable

    import click

# At most this number of names is returned, because a folder of runs can be very long.
_MOST = 500


def run_names(ctx: click.Context, _parameter: click.Parameter, incomplete: str) -> list[str]:
    """Return the names of run folders, for the argument RUN."""
    from hpcenv.runs.find import runs_folder  # imported here, because every command loads _complete.py

    try:
        folder = runs_folder(Path.cwd(), ctx.params.get("runs"))
        return _starting(incomplete, (entry.name for entry in folder.iterdir() if entry.is_dir()))
    except (HpcenvError, OSError):
        return []


def lockfile_names(_ctx: click.Context, _parameter: click.Parameter, incomplete: str) -> list[str]:
    """Return the names of the project's lockfiles and environments, for `--lock NAME`."""
    from hpcenv.project.workspace import open_workspace  # imported here, because it loads pydantic

    try:
        workspace = open_workspace(Path.cwd())
        files = workspace.lockfile_path("default").parent.glob(f"*{_LOCKFILE}")
        names = {*workspace.project.environment, *(path.name[: -len(_LOCKFILE)] for path in files)}
        return _starting(incomplete, names)
    except (HpcenvError, OSError):
        return []


_LOCKFILE = ".lock.toml"


def _starting(incomplete: str, names: Iterable[str]) -> list[str]:
    found = sorted(name for name in names if name.startswith(incomplete) and not name.startswith("."))
    return found[:_MOST]
