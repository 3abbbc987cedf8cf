"""`hpcenv bundle make`."""

from __future__ import annotations

from pathlib import Path
from shlex import quote

import click

from hpcenv import size
from hpcenv.cli import _progress, _render
from hpcenv.cli._complete import run_names
from hpcenv.cli._terminal import escape_control
from hpcenv.errors import UsageError
from hpcenv.reproduction.bundle.make import SUFFIX, make
from hpcenv.runs.entries import Sweep
from hpcenv.runs.find import find_submitted


@click.command("make")
@click.argument("run", shell_complete=run_names)
@click.option("-o", "--output", metavar="FILE", help=f"The archive. Default: NAME{SUFFIX} in the current folder.")
@click.option("--with-sif", "sif", metavar="FILE", help="Include this SIF; it must be the locked one.")
@click.option("--with-log", is_flag=True, help="Include job.log. Read it before: it holds what the script printed.")
@click.option("--author", "authors", multiple=True, metavar="NAME", help="Author for CITATION.cff: `Family, Given`.")
@click.option("--runs-dir", "runs", metavar="DIR", help="Folder of runs, if not the project's.")
@_render.json_option
def command(
    run: str,
    output: str | None,
    sif: str | None,
    with_log: bool,
    authors: tuple[str, ...],
    runs: str | None,
    as_json: bool,
) -> None:
    """Make one archive of a run: lockfile, code, command, records and measured values.

    RUN is a run folder, a run name or a job id. The values of credentials, secrets, checkpoints
    and logs stay out, and so do files that git ignores, except modules without credentials.
    What stays out is listed, with the reason.
    """
    folder = run_folder(run, runs)
    target = Path(output) if output else _render.cwd() / f"{folder.name}{SUFFIX}"
    with _progress.shown(as_json=as_json) as on_event:
        made = make(
            folder, target, sif=None if sif is None else Path(sif), log=with_log, authors=authors, on_event=on_event
        )
    if as_json:
        _render.success("bundle make", made)
        return
    _render.say(f"{escape_control(str(made.path))}: {made.files} files, {size.shown(made.size)}")
    _render.say(f"sha256 {made.sha256}")
    for path, why in made.left_out.items():
        _render.say(f"left out: {escape_control(path)}: {escape_control(why)}")
    for note in made.notes:
        _render.tell(f"note: {escape_control(note)}")
    _render.tell(f"next: hpcenv bundle verify {escape_control(str(made.path))}")


def run_folder(run: str, runs: str | None) -> Path:
    """Return the folder of one run.

    Raises:
        UsageError: it is a sweep.
        RunNotFound: no run has that name.
    """
    entry = find_submitted(_render.cwd(), run, runs=runs)
    if isinstance(entry, Sweep):
        raise UsageError(
            f"`{run}` is a sweep", why="a bundle holds one run", hint=f"name one of its runs: {quote(f'{run}/0000')}"
        )
    return entry.folder.path
