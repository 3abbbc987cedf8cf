"""`hpcenv reproduce`: repeat a run of somebody else, and say whether the result is the same. Runs on: LOGIN NODE."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import click

from hpcenv.cli import _accept, _duration, _progress, _render
from hpcenv.cli import submit as submit_cli
from hpcenv.cli._dashes import WithDashes, after_dashes
from hpcenv.cli._submit_options import GroupedCommand, submit_options, table_values
from hpcenv.cli._wait import interruptible
from hpcenv.cli.wait import wait_telling
from hpcenv.errors import NotComparable, Status
from hpcenv.reproduction import reproduction_text
from hpcenv.reproduction.bundle.archive import Archive, counted
from hpcenv.reproduction.bundle.unpacked import unpack_once
from hpcenv.reproduction.cost import proofs_cost
from hpcenv.reproduction.new_run import (
    ReproductionWish,
    get_image,
    judge_new_run,
    plan_new_run,
    submit_new_run,
)
from hpcenv.reproduction.reproduction import Reproduction, find_target, proved
from hpcenv.reproduction.rungs import STEPS, Rung
from hpcenv.runs.entries import open_run

_STATUS = {
    "proved": 0, "planned": 0, "reproduced-bitwise": 0, "reproduced-within": Status.WITHIN_TOLERANCE,
    "not-reproduced": Status.RESULTS_DIFFER, "not-proved": Status.RESULTS_DIFFER,
    "not-comparable": NotComparable.exit_status,
}  # fmt: skip


class _ReproduceCommand(WithDashes, GroupedCommand):
    """A command with the options of `submit`; what follows `--` replaces the arguments of the script."""


@click.command("reproduce", cls=_ReproduceCommand)
@click.argument("target")
@click.option(
    "--rung", type=click.IntRange(0, 3), default=0, show_default=True, help="How much is repeated, see above."
)
@click.option(
    "--steps", type=click.IntRange(min=1), default=STEPS, show_default=True, metavar="N",
    help="How many optimizer steps rungs 1 and 2 repeat.",
)  # fmt: skip
@click.option("--copy", "copy_to", metavar="DIR", help="Use the run's own copy of its code, put into this new folder.")
@click.option("--allow-changed", is_flag=True, help="Go on if the code here is not the code of the run.")
@click.option("--dry-run", is_flag=True, help="Say what it costs and what must be accepted. Nothing is submitted.")
@submit_options
@_accept.option
@click.option(
    "--timeout", metavar="TIME", callback=_duration.parse_seconds,
    help="Wait at most this long, then end with exit status 124; the run continues. 90 (seconds), 30m, 2h, 1d.",
)  # fmt: skip
@_render.json_option
@click.pass_context
def command(
    context: click.Context, /, target: str, rung: int, steps: int, copy_to: str | None, allow_changed: bool,
    dry_run: bool, accept: str | None,
    timeout: float | None, as_json: bool, **params: Any,
) -> int:  # fmt: skip
    """Repeat TARGET, a run of somebody else, and say whether the result is the same.

    TARGET is a run folder, a run name, a job id, a bundle or a lockfile. Rungs:

    \b
        0  proofs from the files: no job, no GPU, no container, no network
        1  the first steps on one node, with the same global batch
        2  the first steps in the same shape
        3  the whole run in the same shape

    It says first what it costs and what must be accepted. Then it gets the image: it is here, or
    in the bundle, or fetched by its digest. Then it submits, waits and compares. Options of
    `hpcenv submit` apply to the new run. Ends with 0 if it is reproduced to the last bit, 40
    within the tolerance, 41 if not, 42 if nothing can be compared.
    """  # noqa: D301  (click's mark for "do not wrap")
    found = find_target(_render.cwd(), _unpacked(target, as_json=as_json), runs=params["runs_dir"])
    proofs = found.proofs()
    if rung == 0:
        return _show(proved(found, proofs, proofs_cost()), as_json=as_json)
    typed = {
        name: value
        for name, value in table_values(params).items()
        if name != "runs_dir" and context.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE
    }
    wish = ReproductionWish(
        rung=cast("Rung", rung), steps=steps, options=typed, args=after_dashes(), copy_to=copy_to,
        allow_changed=allow_changed,
    )  # fmt: skip
    new = plan_new_run(found, wish, submit_cli.context_of(), _render.open_project)
    page = new.page(found, proofs, os.environ)
    if dry_run:
        return _show(page, as_json=as_json)
    if not as_json:
        for line in reproduction_text.before_lines(page):
            _render.tell(line)
    _accept.require(new.workspace, accept, as_json=as_json, more=new.recorded)
    with _progress.shown(as_json=as_json) as on_event:
        new, image = get_image(new, os.environ, on_event)
    result = submit_new_run(new, submit_cli.context_of())
    _render.tell(f"submitted {result.run}: {result.shape}, job {result.job_id}")
    with interruptible(f"{result.run} continues", str(result.run_folder)):
        (status,) = wait_telling([open_run(result.run_folder)], timeout, as_json=as_json)
    return _show(judge_new_run(replace(page, image=image), new, result, status, _render.cwd()), as_json=as_json)


def _unpacked(target: str, *, as_json: bool) -> str:
    """Return the folder of a bundle, which is unpacked here once; another target unchanged.

    Raises:
        BundleInvalid: it is no bundle, or was changed, or would write outside its folder; nothing is written then.
        WouldOverwrite: the folder exists, and is not this bundle.
    """
    path = Path(os.path.abspath(_render.cwd() / target))
    if not path.is_file() or path.suffix == ".toml":
        return target
    with _progress.shown(as_json=as_json) as on_event, Archive(path) as archive:
        folder = _render.cwd() / archive.folder
        written = unpack_once(archive, folder, step=counted(on_event, "stage", path.name, archive.size))
    _render.tell(f"unpacked {path.name} to {folder}" if written else f"{path.name} was unpacked before, to {folder}")
    return str(folder)


def _show(page: Reproduction, *, as_json: bool) -> int:
    status = _STATUS[page.verdict]
    if as_json:
        _render.verdict_on("reproduce", page, ok=status == 0)
    else:
        _render.say(reproduction_text.render(page))
    return status
