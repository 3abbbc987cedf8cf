"""`hpcenv reproduce`: repeat a run of another person, and say whether the result is the same. Runs on: LOGIN NODE."""

from __future__ import annotations

import functools
import os
from typing import Any, cast

import click

from hpcenv.cli import _accept, _duration, _progress, _render
from hpcenv.cli import submit as submit_cli
from hpcenv.cli._dashes import WithDashes, after_dashes
from hpcenv.cli._help_all import GroupedCommand, GroupedOption
from hpcenv.cli._submit_options import submit_options, table_values
from hpcenv.cli._wait import interruptible
from hpcenv.cli.wait import wait_telling
from hpcenv.errors import NotComparable, Status
from hpcenv.project.options import GROUPS
from hpcenv.reproduction import reproduction_text
from hpcenv.reproduction.bundle.unpacked import unpacked
from hpcenv.reproduction.new_run import NewRun, ReproductionWish, get_image, reproduce_target
from hpcenv.reproduction.reproduction import Reproduction, find_target
from hpcenv.reproduction.rungs import STEPS, Rung
from hpcenv.runs.entries import open_run
from hpcenv.runs.status import RunStatus
from hpcenv.submission.submit import SubmitResult

_STATUS = {
    "proved": 0, "planned": 0, "reproduced-bitwise": 0, "reproduced-within": Status.WITHIN_TOLERANCE,
    "not-reproduced": Status.RESULTS_DIFFER, "not-proved": Status.RESULTS_DIFFER,
    "not-comparable": NotComparable.exit_status,
}  # fmt: skip


# Groups of options with values in the record of the run. A reproduction changes these values only to find a cause.
_OF_THE_RECORD = ("What runs", "Environment", "Checks", "Many runs")
_OWN: Any = {"cls": GroupedOption, "group": GROUPS[0]}


class _ReproduceCommand(WithDashes, GroupedCommand):
    """A command with the options of `submit`. Words after `--` replace the arguments of the script."""


@click.command("reproduce", cls=_ReproduceCommand)
@click.argument("target")
@click.option(
    "--rung",
    type=click.IntRange(0, 3),
    default=0,
    help="How much of the run is repeated, as listed above. Default: 0.",
    **_OWN,
)
@click.option(
    "--steps", type=click.IntRange(min=1), default=STEPS, metavar="N", **_OWN,
    help=f"Number of optimizer steps that are repeated with --rung 1 or 2. Default: {STEPS}.",
)  # fmt: skip
@click.option(
    "--copy",
    "copy_to",
    metavar="DIR",
    help="Use the code that the run recorded, and write this code into the new folder DIR.",
    **_OWN,
)
@click.option(
    "--allow-changed",
    is_flag=True,
    help="Continue even if the code of this project is not the code of the run.",
    **_OWN,
)
@click.option(
    "--dry-run", is_flag=True, help="Say what the new run costs and what you must accept. Nothing is submitted."
)
@functools.partial(submit_options, rare_groups=_OF_THE_RECORD)
@_accept.option
@click.option(
    "--timeout", metavar="TIME", callback=_duration.parse_seconds,
    help="Wait at most this long, for example 90 (seconds), 30m, 2h or 1d, and then end with exit status 124. The "
    "run continues.",
)  # fmt: skip
@_render.json_option
@click.pass_context
def command(
    context: click.Context, /, target: str, rung: int, steps: int, copy_to: str | None, allow_changed: bool,
    dry_run: bool, accept: str | None,
    timeout: float | None, as_json: bool, **params: Any,
) -> int:  # fmt: skip
    """Repeat TARGET, a run of somebody else, and say whether the result is the same.

    TARGET is a run folder, a run name, a job id, a bundle or a lockfile. The number after --rung says how much of the
    run is repeated:

    \b
        0  proofs from the files: no job, no GPU, no container, no network
        1  the first steps on one node, with the same global batch
        2  the first steps, with the same number of nodes and ranks
        3  the whole run, with the same number of nodes and ranks

    hpcenv first says what the new run costs and what you must accept. Then hpcenv gets the image (from the store,
    from the bundle, or from its registry by its digest), submits, waits and compares. Options of `hpcenv submit`
    apply to the new run. hpcenv ends with 0 if the result is reproduced to the last bit, 40 if it is reproduced
    within the tolerance, 41 if it is not reproduced, and 42 if nothing can be compared.
    """  # noqa: D301  (click's mark for "do not wrap")
    with _progress.shown(as_json=as_json) as on_event:
        target, note = unpacked(_render.cwd(), target, on_event=on_event)
    if note:
        _render.tell(note)
    found = find_target(_render.cwd(), target, runs=params["runs_dir"], compared=bool(note))
    typed = {
        name: value
        for name, value in table_values(params).items()
        if name != "runs_dir" and context.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE
    }
    wish = ReproductionWish(
        rung=cast("Rung", rung), steps=steps, options=typed, args=after_dashes(), copy_to=copy_to,
        allow_changed=allow_changed, dry_run=dry_run,
    )  # fmt: skip

    def ask(new: NewRun, page: Reproduction) -> None:
        for line in () if as_json else reproduction_text.before_lines(page):
            _render.tell(line)
        _accept.require(new.workspace, accept, as_json=as_json, more=new.recorded)

    def fetch(new: NewRun) -> tuple[NewRun, str]:
        with _progress.shown(as_json=as_json) as on_event:
            return get_image(new, os.environ, on_event)

    def wait(result: SubmitResult) -> RunStatus:
        _render.tell(f"submitted {result.run}: {result.shape}, job {result.job_id}")
        with interruptible(f"{result.run} continues", str(result.run_folder)):
            return wait_telling([open_run(result.run_folder)], timeout, as_json=as_json)[0]

    page = reproduce_target(
        found, wish, submit_cli.context_of(), _render.open_project, accept=ask, fetch=fetch, wait=wait
    )
    status = _STATUS[page.verdict]
    if as_json:
        _render.verdict_on("reproduce", page, ok=status == 0)
    else:
        _render.say(reproduction_text.render(page))
    return status
