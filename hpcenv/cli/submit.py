"""`hpcenv submit`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import click

from hpcenv.cli import _accept, _estimate, _export, _follow, _render, _sweep
from hpcenv.cli._dashes import KnowsDashes, after_dashes
from hpcenv.cli._help_all import GroupedCommand, RareOption
from hpcenv.cli._submit_options import submit_options, table_values
from hpcenv.cli._wait import Wait, interruptible, wait_of, wait_options
from hpcenv.project.acceptance import Review
from hpcenv.project.context import Context
from hpcenv.records.codec import encode_record
from hpcenv.submission.plan import Plan
from hpcenv.submission.plan_job import plan_job
from hpcenv.submission.request import from_command_line
from hpcenv.submission.submit import SubmitResult, submit


class _SubmitCommand(KnowsDashes, GroupedCommand):
    """A command with the options of a submission. It stores which words were typed after `--`."""


@click.command("submit", cls=_SubmitCommand, context_settings={"ignore_unknown_options": False})
@click.argument("script")
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
@submit_options
@click.option(
    "--test-only", cls=RareOption, is_flag=True, help="Ask Slurm when the job would start. Nothing is submitted."
)
@click.option("--dry-run", is_flag=True, help="Print what would be submitted. Nothing is written or submitted.")
@_export.options
@_accept.option
@wait_options
@_render.json_option
def command(
    test_only: bool,
    dry_run: bool,
    wait: bool,
    timeout: float | None,
    verbose: bool,
    export: str | None,
    engine: str,
    volume: str | None,
    accept: str | None,
    as_json: bool,
    **params: Any,
) -> int:
    """Submit SCRIPT. torchrun runs SCRIPT on every node, in the locked environment.

    Everything after -- goes to the script, unchanged:

    \b
        hpcenv submit train.py --nodes 2 --gpus 8 -- --lr 3e-4
        hpcenv submit -m package.train --nodes 2 --gpus 8 -- --lr 3e-4
    """  # noqa: D301  (click's mark for "do not wrap")
    waiting = wait_of(wait, timeout, verbose)
    stray = _before_dashes(params["args"])
    context, options = context_of(), from_command_line(params["script"], params["args"], table_values(params))
    workspace = _render.open_project(script=params["script"])
    # A dry run and --test-only start no program of the project, and queue no job.
    if not (dry_run or test_only):
        _accept.require(workspace, accept, as_json=as_json)
    if export is not None:
        _export.refuse(vars(options), alone=not (test_only or dry_run or wait))
        return _export.run(workspace, options, context, export, engine=engine, volume=volume, as_json=as_json)
    _export.require_none(engine, volume)
    if test_only:
        return _estimate.show(workspace, options, context, alone=not (dry_run or wait), as_json=as_json)
    if options.sweep or options.array is not None:
        return _sweep.submit(workspace, options, context, dry_run=dry_run, wait=waiting, as_json=as_json)
    plan = plan_job(workspace, options, context)
    plan = replace(plan, notes=(*stray, *plan.notes))
    if not dry_run:
        _accept.remember_typed(workspace, options, plan)
    review = _accept.reviewed(workspace) if dry_run else None
    by_name = options.runs_dir is None
    return carry_out(plan, context, by_name=by_name, review=review, wait=waiting, as_json=as_json)


def _before_dashes(arguments: Sequence[str]) -> tuple[str, ...]:
    """Return a note about arguments of the script that were typed before `--`, for example the `G` of `--mem 10 G`."""
    # The script itself may also be typed after `--`.
    before = arguments[: max(0, len(arguments) - len(after_dashes() or ()))]
    if not before:
        return ()
    goes = "is an argument" if len(before) == 1 else "are arguments"
    return (f"{', '.join(f'`{word}`' for word in before)} {goes} of the script, typed before `--`",)


def carry_out(
    plan: Plan,
    context: Context,
    *,
    by_name: bool,
    review: Review | None,
    wait: Wait | None,
    as_json: bool,
    verb: str = "submit",
) -> int:
    """Submit a plan, or print it for a dry run. If `wait` is set, follow the run until it ends. Return the exit status.

    Args:
        by_name: whether other commands find the run by its name. With --runs-dir, these commands need its folder.
        review: the settings that the user must accept. A dry run prints them. With None, the plan is submitted.
        verb: name of the command, for the JSON envelope.
    """
    if review is not None:
        _show_plan(plan, review, as_json=as_json, verb=verb)
        return 0

    result = submit(plan, context)
    word = result.run if by_name else str(result.run_folder)
    if wait is None:
        if as_json:
            _render.success(verb, result)
        else:
            show_submitted(result, word)
        return 0
    if not as_json:
        show_submitted(result, word)

    with interruptible(f"{result.run} continues", word, again=("logs", "-f")):
        return _follow.follow(result, word, wait, as_json=as_json, verb=verb)


def context_of() -> Context:
    """Return the environment, the folder, the time and other values that only `cli/` reads."""
    return Context(
        environ=os.environ,
        cwd=_render.cwd(),
        now=_render.local_time(),
        token=_render.token(),
        command=_render.command_line(),
        cache=_render.cache_folder(),
    )


def _show_plan(plan: Plan, review: Review, *, as_json: bool, verb: str = "submit") -> None:
    """Print the batch script and the manifest exactly as `submit` would write them."""
    if as_json:
        data = {"script": plan.script, "manifest": plan.manifest, "shape": plan.request.shape, "notes": plan.notes}
        _render.success(verb, {**data, "acceptance": review})
        return
    for note in plan.notes:
        _render.tell(f"note: {note}")
    _accept.show(review)
    _render.tell(f"dry run: {plan.request.shape}; nothing is written")
    if plan.script:
        _render.tell("---- job.sbatch")
        _render.put(plan.script)
    _render.tell("---- manifest.json")
    _render.put(encode_record(plan.manifest))


def show_submitted(result: SubmitResult, word: str) -> None:
    """Print the submitted run, and the next commands. In these commands, `word` names the run."""
    for note in result.notes:
        _render.tell(f"note: {note}")
    jobs = f"jobs {', '.join(result.chain)}, one after the other" if result.chain else f"job {result.job_id}"
    _render.say(f"submitted {result.run}: {result.shape}, {jobs}")
    _render.tell(f"run folder {result.run_folder}")
    commands = [_render.quoted(("hpcenv", *verb, word)) for verb in (("status",), ("logs", "-f"))]
    _render.tell("\nnext: " + "    ".join(commands))
