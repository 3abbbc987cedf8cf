"""`hpcenv rerun`: submit a run again as a new run, with the same inputs.

Runs on: LOGIN NODE. The options come from request.json of the first run. The lockfile is the copy in the folder of the
first run. The script, the code and the SIF must be unchanged.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hpcenv.errors import Command, FileUnusable, RecordInvalid, UsageError
from hpcenv.project.acceptance import Asked, asked_by_options
from hpcenv.project.code_listing import changed_files
from hpcenv.project.context import Context
from hpcenv.project.gone_options import without_gone
from hpcenv.project.option_values import argv_of
from hpcenv.project.options import BY_NAME, Option, in_place
from hpcenv.project.workspace import Workspace
from hpcenv.records.code_listing import Listing
from hpcenv.records.files import load_record
from hpcenv.records.manifest import Manifest
from hpcenv.records.request import RequestRecord
from hpcenv.records.run_folder import RunFolder
from hpcenv.records.verdict import Verdict
from hpcenv.runs.entries import Run, Sweep, is_element
from hpcenv.submission.first_variables import with_first_variables
from hpcenv.submission.plan import Plan
from hpcenv.submission.plan_job import plan_job
from hpcenv.submission.request import SubmitOptions, command_of, from_record, value_of
from hpcenv.submission.sweep_job import ELEMENT, SweepPlan, plan_sweep
from hpcenv.text import listed


@dataclass(frozen=True, kw_only=True)
class OptionChange:
    """An option that has a different value in the new run than in the old run.

    Attributes:
        flag: the option; `--` for the arguments of the script.
        before: the option on the command line of the old run; empty if the old run was submitted without the option.
        after: the option on the command line of the new run; empty if the new run does not have the option.
    """

    flag: str
    before: str
    after: str


@dataclass(frozen=True, kw_only=True)
class ChangedInput:
    """An input of a run that has changed since the run was submitted."""

    what: str
    before: str
    now: str


@dataclass(frozen=True, kw_only=True)
class Rerun:
    """A run or sweep to run again, and the options of the new run or sweep.

    Attributes:
        folder: the folder of the old run or sweep.
        first: the folder of the old run; for a sweep, the folder of its first run.
        before: the manifest of the run in `first`.
        old: the options of the old run.
        options: the options of the new run.
        recorded: the parts of the old run's record that the user must accept, for example variables.
        context: the context of the new run.
    """

    folder: Path
    first: RunFolder
    before: Manifest
    old: SubmitOptions
    options: SubmitOptions
    recorded: tuple[Asked, ...]
    context: Context


@dataclass(frozen=True, kw_only=True)
class RerunPlan:
    """The plan of a new run, and the inputs that have changed since the first run was submitted.

    Attributes:
        plan: the plan of the new run; for a sweep, the common part of the plans of its runs.
        sweep: the plan of the new sweep, with `plan` in it; None for one run.
        changed: the changed inputs.
    """

    plan: Plan
    sweep: SweepPlan | None
    changed: tuple[ChangedInput, ...]


def choose(
    found: Run | Sweep,
    given: Mapping[str, Any],
    without: Sequence[str],
    args: tuple[str, ...] | None,
    context: Context,
) -> Rerun:
    """Return the run to repeat. The options that the user typed replace the old options.

    Args:
        found: the run or sweep to repeat.
        given, without, args: as for `change`.
        context: the context of this command.

    Raises:
        UsageError, RecordInvalid: as for `read_options` and `change`.
        FileUnusable: as for `context_again`.
    """
    if isinstance(found, Sweep):
        one, folder = found.elements[0], found.folder
        recorded = read_options(folder, one.submission.command)
    else:
        one, folder = found, found.folder.path
        recorded = options_of_run(found)
    before = load_record(Manifest, one.folder.manifest)
    old = with_own_checkpoint(recorded, before)
    new = change(old, given, without, args)
    asked = asked_by_record(new, given)
    if new.name is not None and new.name == old.name:
        new = replace(new, name=free_name(new.name, folder.parents[1 if is_element(folder) else 0]))
    here = context_again(context, before, command_of(new))
    return Rerun(folder=folder, first=one.folder, before=before, old=old, options=new, recorded=asked, context=here)


def plan_again(new: Rerun, workspace: Workspace, *, allow_changed: bool) -> RerunPlan:
    """Plan the new run.

    The new run uses the lockfile of the first run. If the user names another lockfile, the new run uses that lockfile.
    The nodes will compare the new run with the first run.

    Raises:
        UsageError: an input of the first run has changed, and `allow_changed` is not set.
        HpcenvError: as for `plan_job` and `plan_sweep`.
    """
    other_lock = new.options.lock != new.old.lock
    options = new.options if other_lock else with_own_lockfile(new.options, RunFolder(new.folder))
    sweep = None
    if options.sweep or options.array is not None:
        sweep = plan_sweep(workspace, options, new.context)
        plan = _compared(sweep.plan, new)
        sweep = replace(sweep, plan=plan)
    else:
        plan = _compared(plan_job(workspace, options, new.context), new)
    changed = require_same_inputs(new.before, plan, allow=allow_changed, other_lock=other_lock)
    return RerunPlan(plan=plan, sweep=sweep, changed=changed)


def for_export(new: Rerun, workspace: Workspace, *, allow_changed: bool) -> SubmitOptions:
    """Return the options for the export of a run. Options such as the name, and the runs to wait for, are left out.

    Raises:
        UsageError: a sweep is exported, or as for `plan_again`.
        HpcenvError: as for `plan_again`.
    """
    if new.options.sweep or new.options.array is not None:
        raise UsageError("a sweep cannot be exported", why="an export is one run", hint="name one of its runs")
    plan_again(new, workspace, allow_changed=allow_changed)
    other_lock = new.options.lock != new.old.lock
    options = new.options if other_lock else with_own_lockfile(new.options, RunFolder(new.folder))
    return replace(
        options, name=None, runs_dir=None, cluster=None, chain=None, stage_data=(), dependency=None, after=()
    )


def _compared(plan: Plan, new: Rerun) -> Plan:
    """Return the plan with the values of the first run that the nodes compare, and with notes about removed options."""
    path = new.first.verdict
    verdict = load_record(Verdict, path) if path.is_file() else None
    plan = with_first_variables(plan, new.before, verdict, new.context.environ)
    return replace(plan, notes=(*notes_on_gone(new.folder), *plan.notes))


def read_options(folder: Path, command: Sequence[str]) -> SubmitOptions:
    """Return the options with which a run or sweep was submitted.

    Args:
        folder: the folder of the run or sweep.
        command: the recorded command line, for the error.

    Raises:
        UsageError: the run has no request.json, because it calls a Python function, or an older hpcenv submitted it.
        RecordInvalid: request.json is damaged.
    """
    path = RunFolder(folder).request
    if not path.is_file():
        raise UsageError(
            "the run cannot be submitted again from its record",
            why=f"it has no `{path}`. This command made the run: {shlex.join(command)}",
            hint="enter that command again, or start that program again",
        )
    return from_record(load_record(RequestRecord, path))


def notes_on_gone(folder: Path) -> tuple[str, ...]:
    """Return a note for each option that was removed from hpcenv, if the option had an effect on the run.

    Args:
        folder: the folder of the run or sweep. `read_options` has already read the options of this run or sweep.
    """
    return without_gone(load_record(RequestRecord, RunFolder(folder).request).options)[1]


def options_of_run(run: Run) -> SubmitOptions:
    """Return the options of one run. An element of a sweep becomes a separate run.

    Raises:
        UsageError, RecordInvalid: as for `read_options`.
    """
    options = read_options(run.folder.path, run.submission.command)
    if not is_element(run.folder.path):
        return options
    index = next((setting.value for setting in run.manifest.settings if setting.name == ELEMENT), None)
    return replace(
        options,
        sweep=(),
        array=None,
        max_parallel=None,
        args=run.manifest.args,
        env=options.env if index is None else {**options.env, ELEMENT: index},
        name=f"{run.folder.path.parent.name}-{run.folder.path.name}",
    )


def change(
    old: SubmitOptions, given: Mapping[str, Any], without: Sequence[str], args: tuple[str, ...] | None
) -> SubmitOptions:
    """Return the options of the new run: the options of the old run, some of them with new values.

    Args:
        given: option name -> new value. Some options have several entries: variables, secrets, options for sbatch and
            srun, and sweeps. For these options, only the entries with the same name are replaced.
        without: names of options that the new run does not get. The names may begin with `--`.
        args: arguments of the script; None keeps the arguments of the old run.

    Raises:
        UsageError: `without` names an unknown option, or an option that the old run did not have.
    """
    rows = {option.key: option for option in in_place("command")}
    values: dict[str, Any] = {}
    for word in without:
        option = rows.get(word.lstrip("-"))
        if option is None:
            raise UsageError(
                f"`--without {word}`: `hpcenv submit` has no such option", hint=Command("hpcenv", "rerun", "--help")
            )
        if not argv_of(option, value_of(old, option)):
            raise UsageError(f"`--without {word}`: the run was submitted without it")
        values[option.name] = option.absent
    for name, value in given.items():
        values[name] = _changed(getattr(old, name), value, name)
    return replace(old, **values, args=old.args if args is None else args)


def only_recorded(options: SubmitOptions, given: Mapping[str, Any]) -> SubmitOptions:
    """Return only the options that come from the record, without the options that the user typed for the new run."""
    typed: dict[str, Any] = {
        name: {key: kept for key, kept in getattr(options, name).items() if key not in value}
        if isinstance(value, Mapping)
        else BY_NAME[name].absent
        for name, value in given.items()
    }
    return replace(options, **typed)


def with_own_checkpoint(options: SubmitOptions, before: Manifest) -> SubmitOptions:
    """Return the options with the path of the checkpoint from which the old run resumed.

    The path is needed, because `--resume-from` may name a run, and this run may have a newer checkpoint now.
    """
    return replace(options, resume_from=before.resume_from) if before.resume_from else options


def asked_by_record(options: SubmitOptions, given: Mapping[str, Any]) -> tuple[Asked, ...]:
    """Return the parts of a run's record that the user must accept, because the run may belong to another user.

    Args:
        options: the options of the new run.
        given: options that the user typed. The user need not accept these options.
    """
    return asked_by_options(only_recorded(options, given), "the record of the run", script=options.script)


def _changed(old: Any, given: Any, name: str) -> Any:
    if isinstance(given, Mapping):
        return {**old, **given}
    if name == "sweep":
        return tuple({axis.partition("=")[0]: axis for axis in (*old, *given)}.values())
    return given


def changes(old: SubmitOptions, new: SubmitOptions) -> tuple[OptionChange, ...]:
    """Return the options and arguments that differ, in the order of the table."""
    found = [
        OptionChange(flag=option.flag, before=before, after=after)
        for option in in_place("command")
        if (before := _shown_option(old, option)) != (after := _shown_option(new, option))
    ]
    before, after = shlex.join(("--", *old.args)), shlex.join(("--", *new.args))
    return (*found, *([OptionChange(flag="--", before=before, after=after)] if before != after else []))


def _shown_option(options: SubmitOptions, option: Option) -> str:
    return shlex.join(argv_of(option, value_of(options, option)))


def with_own_lockfile(options: SubmitOptions, run: RunFolder) -> SubmitOptions:
    """Return the options with the copy of the lockfile in the run folder.

    Raises:
        FileUnusable: the run folder has no lockfile.
    """
    if not run.lockfile.is_file():
        raise FileUnusable(
            f"`{run.lockfile}` does not exist", why="the run's own lockfile is needed", hint="--lock NAME"
        )
    # The lockfile is not compared with hpcenv.toml, because hpcenv.toml may have changed since the run.
    return replace(options, lockfile=run.lockfile, frozen=True)


def context_again(context: Context, manifest: Manifest, command: tuple[str, ...]) -> Context:
    """Return the context of the new run. Relative paths begin in the folder in which the old run was submitted.

    Raises:
        FileUnusable: this folder is missing, or the user cannot read this folder.
    """
    folder = Path(manifest.submitted_in or manifest.workdir)
    here = ("run it in your own copy of the project: ", Command(*command))
    try:
        os.scandir(folder).close()
    except PermissionError as error:
        why = f"{error.strerror}; the run was submitted in this folder, by its owner"
        raise FileUnusable(f"you cannot look into `{folder}`", why=why, hint=here) from error
    except OSError as error:
        raise FileUnusable(
            f"`{folder}` does not exist", why="the run was submitted in this folder", hint=here
        ) from error
    return replace(context, cwd=folder, command=command)


def changed_inputs(before: Manifest, now: Manifest) -> tuple[ChangedInput, ...]:
    """Return which inputs of a run have changed since the submission. Pure."""
    pairs = [("the script", before.script_sha256, now.script_sha256), ("the module", before.module, now.module)]
    pairs.append(("the console script", before.entry, now.entry))
    if before.source is not None and now.source is not None:
        pairs.append(("the code's commit", before.source.commit, now.source.commit))
        pairs.append(("the changes that are not committed", before.source.diff_sha256, now.source.diff_sha256))
        if before.source.digest and now.source.digest:
            pairs.append((_COPIED, before.source.digest, now.source.digest))
    elif (before.source is None) != (now.source is None):
        was, is_now = ("its own place" if one is None else "a copy of the code" for one in (before.source, now.source))
        pairs.append(("where the script runs from", was, is_now))
    if before.sif is not None and now.sif is not None:
        pairs.append(("the SIF", before.sif.sha256, now.sif.sha256))
    pairs.append(("the environment's kind", before.environment.kind, now.environment.kind))
    if before.environment.kind == now.environment.kind == "host":
        pairs.append(("the environment's Python", before.environment.python, now.environment.python))
    return tuple(ChangedInput(what=what, before=a, now=b) for what, a, b in pairs if a != b)


def require_same_inputs(before: Manifest, plan: Plan, *, allow: bool, other_lock: bool) -> tuple[ChangedInput, ...]:
    """Return which inputs have changed; refuse changes that are not allowed.

    Args:
        allow: whether changes are allowed.
        other_lock: whether the user names another lockfile. If so, another environment is expected.

    Raises:
        UsageError: an input has changed, and changes are not allowed.
    """
    found = (_with_names(one, before, plan) for one in changed_inputs(before, plan.manifest))
    changed = tuple(one for one in found if one is not None)
    if other_lock:
        changed = tuple(one for one in changed if one.what != "the SIF" and "environment" not in one.what)
    if changed and not allow:
        raise UsageError(
            f"the run `{before.run}` cannot run again with its former inputs",
            why="\n".join(f"{one.what} was {_shown(one.before)} and is {_shown(one.now)}" for one in changed),
            hint=(
                "add --allow-changed, or restore the former inputs; ",
                Command("hpcenv", "diff", before.run, "NEW_RUN"),
                " compares the runs afterwards",
            ),
        )
    return changed


def _with_names(changed: ChangedInput, before: Manifest, plan: Plan) -> ChangedInput | None:
    """Return a change of the code with the names of the files that differ; None if no file differs."""
    if changed.what != _COPIED or plan.source is None:
        return changed
    try:
        then = load_record(Listing, RunFolder(Path(before.run_folder)).listing)
        names = [path.partition("/")[2] for path in changed_files(then, plan.source.listing)]
    except (RecordInvalid, OSError):
        return changed
    if not names:
        return None
    return replace(changed, what=f"{_COPIED} ({listed(names, _NAMED)})")


_COPIED = "the digest of the copied files"
_NAMED = 3


def _shown(value: str) -> str:
    return value[:12] if re.fullmatch("[0-9a-f]{40,64}", value) else value or "nothing"


def free_name(name: str, folder: Path) -> str:
    """Return a name for a run that repeats the run `name`: `name` itself if it is free, else for example `name-2`."""
    if not os.path.lexists(folder / name):
        return name
    # If there is a run `first`, the name after `first-2` is `first-3`. If there is no run `seed`, the name after
    # `seed-2` is `seed-2-2`.
    stem = re.sub(r"-[0-9]{1,4}\Z", "", name)
    stem = (stem if os.path.lexists(folder / stem) else name)[:90]
    number = 2
    while os.path.lexists(folder / f"{stem}-{number}"):
        number += 1
    return f"{stem}-{number}"
