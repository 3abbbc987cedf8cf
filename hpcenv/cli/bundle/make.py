"""`hpcenv bundle make`."""

from __future__ import annotations

import click

from hpcenv import size
from hpcenv.cli import _progress, _render
from hpcenv.cli._complete import run_names
from hpcenv.cli._terminal import escape_control
from hpcenv.reproduction.bundle.make import SUFFIX, bundle


@click.command("make")
@click.argument("run", shell_complete=run_names)
@click.option("-o", "--output", metavar="FILE", help=f"The archive. Default: NAME{SUFFIX} in the current folder.")
@click.option("--with-sif", "sif", metavar="FILE", help="Include this SIF, which must be the SIF of the lockfile.")
@click.option(
    "--with-log",
    is_flag=True,
    help="Include job.log. Read job.log first, because it contains the output of the script.",
)
@click.option(
    "--author", "authors", multiple=True, metavar="NAME", help="Author for CITATION.cff, written as `Family, Given`."
)
@_render.runs_option
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
    """Make an archive of a run: lockfile, code, command, records and measured values.

    RUN is a run folder, a run name or a job id. These are left out: values of credentials,
    secrets, checkpoints, logs, and files that git ignores. Python modules without credentials are included even if
    git ignores them. hpcenv lists what is left out, with the reason.
    """
    with _progress.shown(as_json=as_json) as on_event:
        made = bundle(
            run, output, with_sif=sif, with_log=with_log, author=authors, project=_render.cwd(), runs_dir=runs,
            on_event=on_event,
        )  # fmt: skip
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
