"""`hpcenv rerun`."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import click

from hpcenv.cli import _accept, _export, _render, _sweep
from hpcenv.cli import submit as submit_cli
from hpcenv.cli._complete import run_names
from hpcenv.cli._dashes import WithDashes, after_dashes
from hpcenv.cli._help_all import GroupedCommand
from hpcenv.cli._submit_options import submit_options, table_values
from hpcenv.cli._wait import Wait, wait_of, wait_options
from hpcenv.errors import UsageError
from hpcenv.project.option_values import argv_of
from hpcenv.project.options import BY_NAME
from hpcenv.runs.entries import Run, Sweep
from hpcenv.runs.find import find
from hpcenv.submission import request, rerun
from hpcenv.submission.rerun import ChangedInput, OptionChange, Rerun
from hpcenv.submission.sweep_job import read_sweep, rerun_failed


class _RerunCommand(WithDashes, GroupedCommand):
    """A command with the options of `submit`. Words after `--` replace the arguments of the script."""


@click.command("rerun", cls=_RerunCommand)
@click.argument("run", required=False, shell_complete=run_names)
@submit_options
@click.option("--without", multiple=True, metavar="OPTION", help="Leave out an option that the run was submitted with.")
@click.option("--failed", is_flag=True, help="Run the failed runs of a sweep again, each in its old folder.")
@click.option(
    "--allow-changed", is_flag=True, help="Submit even if the script, the code or the SIF has changed since the run."
)
@click.option("--dry-run", is_flag=True, help="Print what would be submitted. Nothing is written or submitted.")
@_export.options
@_accept.option
@wait_options
@_render.json_option
@click.pass_context
def command(
    context: click.Context,
    /,
    run: str | None,
    without: tuple[str, ...],
    failed: bool,
    allow_changed: bool,
    dry_run: bool,
    export: str | None,
    engine: str,
    volume: str | None,
    accept: str | None,
    wait: bool,
    timeout: float | None,
    verbose: bool,
    as_json: bool,
    **params: Any,
) -> int:
    """Submit a run again as a new run: same script, arguments, lockfile and options.

    RUN is a run folder, a run name, a job id or a sweep. Options of `hpcenv submit` and arguments
    after -- change the new run. hpcenv first prints these changes. If the script, the code
    or the SIF has changed, --allow-changed is needed.
    """
    waiting = wait_of(wait, timeout, verbose)
    # --runs-dir names the folder that contains the old run. The new run is made in the same folder.
    found = find(_render.cwd(), run, runs=params["runs_dir"])
    typed = {
        name: value
        for name, value in table_values(params).items()
        if name != "runs_dir" and context.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE
    }
    given = request.parse_flags(typed)
    if export is None:
        _export.require_none(engine, volume)
    else:
        _export.refuse(given, alone=not (wait or dry_run or failed))
    if failed:
        words = _typed_words(given, without, allow_changed=allow_changed)
        by_name = params["runs_dir"] is None
        if not dry_run:
            _accept.require(_render.open_project(), accept, as_json=as_json)
        return _rerun_failed(found, words, by_name=by_name, dry_run=dry_run, wait=waiting, as_json=as_json)
    new = rerun.choose(found, given, without, after_dashes(), submit_cli.context_of())
    if export is not None:
        workspace = _render.open_project(new.context.cwd)
        _accept.require(workspace, accept, as_json=as_json, more=new.recorded)
        old = rerun.for_export(new, workspace, allow_changed=allow_changed)
        return _export.run(
            workspace, old, new.context, os.path.abspath(export), engine=engine, volume=volume, as_json=as_json,
            verb="rerun",
        )  # fmt: skip
    return _again(new, accept, allow_changed=allow_changed, dry_run=dry_run, wait=waiting, as_json=as_json)


def _again(
    new: Rerun, accept: str | None, *, allow_changed: bool, dry_run: bool, wait: Wait | None, as_json: bool
) -> int:
    """Submit the new run, or print its plan for a dry run; return the exit status."""
    workspace = _render.open_project(new.context.cwd)
    if not dry_run:
        _accept.require(workspace, accept, as_json=as_json, more=new.recorded)
    review = _accept.reviewed(workspace, new.recorded) if dry_run else None
    if not as_json:
        _tell_changes(new.folder.name, rerun.changes(new.old, new.options))
    again = rerun.plan_again(new, workspace, allow_changed=allow_changed)
    if not as_json:
        _tell_inputs(again.changed)
    if not dry_run:
        _accept.remember_typed(workspace, new.options, again.plan)
    by_name = new.options.runs_dir is None
    if again.sweep is not None:
        return _sweep.carry_out(
            again.sweep, new.context, by_name=by_name, review=review, wait=wait, as_json=as_json, verb="rerun"
        )
    return submit_cli.carry_out(
        again.plan, new.context, by_name=by_name, review=review, wait=wait, as_json=as_json, verb="rerun"
    )


def _typed_words(given: Mapping[str, Any], without: Sequence[str], *, allow_changed: bool) -> list[str]:
    """Return the options and arguments of this command line that change the run."""
    words = [word for name, value in given.items() for word in argv_of(BY_NAME[name], value) or [BY_NAME[name].flag]]
    words += [word for flag in without for word in ("--without", flag)]
    words += ["--allow-changed"] if allow_changed else []
    args = after_dashes()
    return words if args is None else [*words, "--", *args]


def _rerun_failed(
    found: Run | Sweep, words: Sequence[str], *, by_name: bool, dry_run: bool, wait: Wait | None, as_json: bool
) -> int:
    """Queue the failed runs of a sweep again.

    Their arguments and options cannot be changed, so `words` must be empty.
    """
    if not isinstance(found, Sweep):
        raise UsageError("`--failed` is for sweeps and arrays", why=f"`{found.manifest.run}` is one run")
    if words:
        first = found.elements[0].folder.path
        one = f"{found.folder.name}/{first.name}" if by_name else str(first)
        raise UsageError(
            f"`--failed` cannot be used together with `{_render.quoted(tuple(words))}`",
            why="the runs are queued again in their own folders, as they were submitted",
            hint=f"`{_render.quoted(('hpcenv', 'rerun', one, *words))}` submits one run with these changes",
        )
    if not dry_run:
        result = rerun_failed(found.folder, submit_cli.context_of())
        return _sweep.go_on(result, by_name=by_name, wait=wait, as_json=as_json, verb="rerun", again=True)
    failed = read_sweep(found.folder, os.environ).failed
    if as_json:
        _render.success("rerun", {"elements": failed})
        return 0
    for element in failed:
        _render.say(f"{found.folder.name}/{element.element}: {element.state.state}")
    return 0


def _tell_changes(name: str, changed: Sequence[OptionChange]) -> None:
    _render.tell(f"{name} again" + (", with:" if changed else ", unchanged"))
    for change in changed:
        for sign, words in (("-", change.before), ("+", change.after)):
            if words:
                _render.tell(f"  {sign} {words}")


def _tell_inputs(changed: Sequence[ChangedInput]) -> None:
    for item in changed:
        _render.tell(f"note: {item.what} has changed since the run")
