"""`hpcenv rerun`."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from hpcenv.cli import _render
from hpcenv.cli import submit as submit_cli
from hpcenv.cli._dashes import WithDashes, after_dashes
from hpcenv.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from hpcenv.steps.request import Surroundings
    from hpcenv.steps.runs import Run, Sweep

# Of `submit`, what says how this very command goes on; `rerun` has its own.
_OF_THE_VERB = ("json", "as_json", "dry_run", "wait", "test_only")
# Given again they replace what was given for the same name, and leave the others.
_BY_NAME = ("env", "secret", "sweep")
_CHANGEABLE = [
    option
    for option in submit_cli.command.params
    if isinstance(option, click.Option) and option.name not in _OF_THE_VERB
]


@dataclass(frozen=True, kw_only=True)
class FlagChange:
    """A flag of the new run that is not that of the old one; empty where it is not given."""

    flag: str
    before: str
    after: str


def _with_submits_options(command: click.Command) -> click.Command:
    """Give `rerun` every option of `submit`; one that is not typed leaves the run's own."""
    own = {word for option in command.params for word in option.opts}
    command.params[1:1] = [option for option in _CHANGEABLE if not own.intersection(option.opts)]
    return command


@click.command("rerun", cls=WithDashes)
@click.argument("run", required=False)
@click.option("--without", multiple=True, metavar="FLAG", help="Leave out a flag that the run was given: nodelist ...")
@click.option("--failed", is_flag=True, help="Of a sweep: only the runs that did not end well, in their own folders.")
@click.option("--allow-changed", is_flag=True, help="Also where script, code or SIF are not what they were.")
@click.option("--dry-run", is_flag=True, help="Print what would be submitted; write nothing.")
@click.option("--wait", is_flag=True, help="Follow the run and end with its exit status.")
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
    wait: bool,
    as_json: bool,
    **flags: Any,
) -> int:
    """Submit a run again as a new one: same script, arguments, lockfile and flags.

    RUN as in `hpcenv status`, or a sweep. Flags of `hpcenv submit` change the new run, as
    do arguments after --; what changes is shown first. A script, code or SIF that is not
    what it was is refused without --allow-changed.
    """
    from hpcenv.steps.runs import Sweep, find, is_element

    # --runs is both where the run lies and a flag of the new one.
    found = find(_render.cwd(), run, runs=flags["runs"])
    typed = {
        name: value
        for name, value in flags.items()
        if name != "runs" and context.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE
    }
    if failed:
        words = _words_given(typed, without, allow_changed)
        by_name = flags["runs"] is None
        return _rerun_failed(found, words, by_name=by_name, dry_run=dry_run, wait=wait, as_json=as_json)
    first = found.elements[0] if isinstance(found, Sweep) else found
    old = parse_command(first.submission.command)
    if not isinstance(found, Sweep) and is_element(found.folder.path):
        old |= _of_element(found, old)
    new = merge(old, typed, without, after_dashes())
    return _again(found, old, new, allow_changed=allow_changed, dry_run=dry_run, wait=wait, as_json=as_json)


_with_submits_options(command)


def _of_element(run: Run, words: Mapping[str, Any]) -> dict[str, Any]:
    """Return what makes a run of its own of one run of a sweep or array."""
    from hpcenv.steps.sweep import ELEMENT

    index = next((one.value for one in run.manifest.settings if one.name == ELEMENT), None)
    return {
        "sweep": (),
        "array": None,
        "max_parallel": None,
        "args": run.manifest.args,
        "env": words["env"] if index is None else _by_name(words["env"], (f"{ELEMENT}={index}",)),
        "run_name": f"{run.folder.path.parent.name}-{run.folder.path.name}",
    }


def parse_command(command: Sequence[str]) -> dict[str, Any]:
    """Return what a recorded `hpcenv submit ...` command says, as click reads it.

    Raises:
        UsageError: it is another command, or has options that this version does not know.
    """
    if tuple(command[:2]) != ("hpcenv", "submit"):
        raise UsageError(
            "the run cannot be submitted again from its record", why=f"it was made by: {_render.quoted(tuple(command))}"
        )
    try:
        context = submit_cli.command.make_context("submit", list(command[2:]))
    except click.ClickException as error:
        raise UsageError(
            "this version of hpcenv does not understand the run's command",
            why=f"{error.format_message()}: {_render.quoted(tuple(command))}",
        ) from error
    return dict(context.params)


def merge(
    old: Mapping[str, Any], typed: Mapping[str, Any], without: Sequence[str], args: tuple[str, ...] | None
) -> dict[str, Any]:
    """Return the words of the new run: those of the old one, with what was typed in their place.

    Raises:
        UsageError: `without` names what is no flag, or one that the old run was not given.
    """
    new = dict(old)
    by_word = {word.lstrip("-"): option for option in _CHANGEABLE for word in option.opts}
    for word in without:
        option = by_word.get(word.lstrip("-"))
        if option is None or option.name is None:
            raise UsageError(f"`--without {word}`: `hpcenv submit` has no such flag", hint="hpcenv rerun --help")
        if not words_of(option, old):
            raise UsageError(f"`--without {word}`: the run was not given it")
        new[option.name] = _defaults()[option.name]
    for name, value in typed.items():
        new[name] = _by_name(old[name], value) if name in _BY_NAME else value
    if args is not None:
        new["args"] = args
    return new


@functools.cache
def _defaults() -> dict[str, Any]:
    """Return the words of a submission that was given no flag, as click reads one.

    An option that is asked says a marker of click's own for "none" (click 8.4 and 8.5).
    """
    return parse_command(("hpcenv", "submit", "script"))


def _by_name(old: Sequence[str], typed: Sequence[str]) -> tuple[str, ...]:
    pairs = {pair.partition("=")[0]: pair for pair in (*old, *typed)}
    return tuple(pairs.values())


def words_of(option: click.Option, values: Mapping[str, Any]) -> list[str]:
    """Return how an option stands on a command line; nothing where it has its default."""
    assert option.name is not None
    value = values.get(option.name)
    if value is None or value in (_defaults()[option.name], ()):
        return []
    if option.is_flag:
        return [option.opts[0] if value else option.secondary_opts[0]]
    return [word for one in (value if option.multiple else (value,)) for word in (option.opts[0], str(one))]


def command_of(values: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the command that gives these words: what is recorded for the new run."""
    options = [word for option in _CHANGEABLE for word in words_of(option, values)]
    args = ("--", *values["args"]) if values["args"] else ()
    return ("hpcenv", "submit", values["script"], *options, *args)


def changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> tuple[FlagChange, ...]:
    """Return which flags and arguments differ."""
    found = []
    for option in _CHANGEABLE:
        before, after = (_render.quoted(tuple(words_of(option, values))) for values in (old, new))
        if before != after:
            found.append(FlagChange(flag=option.opts[0], before=before, after=after))
    before, after = (_render.quoted(("--", *values["args"])) for values in (old, new))
    if before != after:
        found.append(FlagChange(flag="--", before=before, after=after))
    return tuple(found)


def _again(
    found: Run | Sweep, old: dict[str, Any], new: dict[str, Any], *, allow_changed: bool, dry_run: bool, wait: bool,
    as_json: bool,
) -> int:  # fmt: skip
    from hpcenv import wire
    from hpcenv.steps import rerun
    from hpcenv.steps.plan import plan_job
    from hpcenv.steps.runs import Sweep, is_element

    folder = found.folder if isinstance(found, Sweep) else found.folder.path
    record = found.elements[0].folder.manifest if isinstance(found, Sweep) else found.folder.manifest
    manifest = wire.read(wire.Manifest, record)
    if new["run_name"] is not None and new["run_name"] == old["run_name"]:
        new["run_name"] = rerun.free_name(new["run_name"], folder.parents[1 if is_element(folder) else 0])
    around = rerun.around_again(submit_cli.surroundings(), manifest, command_of(new))
    other_lock = new["lock_name"] != old["lock_name"]
    asked = rerun.asked_again(submit_cli.asked_for(new), wire.RunFolder(folder), other_lock=other_lock)
    workspace = _render.open_project(around.cwd)
    if not as_json:
        _tell_changes(folder.name, changes(old, new))
    if asked.sweep or asked.array is not None:
        return _sweep_again(workspace, asked, around, manifest, allow_changed, other_lock, dry_run, wait, as_json)
    plan = plan_job(workspace, asked, around)
    changed = rerun.require_same_inputs(manifest, plan, allow=allow_changed, other_lock=other_lock)
    _tell_inputs(changed, as_json=as_json)
    return submit_cli.carry_out(
        plan, around, by_name=new["runs"] is None, dry_run=dry_run, wait=wait, as_json=as_json, verb="rerun"
    )


def _sweep_again(
    workspace: Any, asked: Any, around: Surroundings, manifest: Any, allow: bool, other_lock: bool, dry_run: bool,
    wait: bool, as_json: bool,
) -> int:  # fmt: skip
    from hpcenv.cli import _sweep
    from hpcenv.steps import rerun
    from hpcenv.steps.sweep import plan_sweep

    planned = plan_sweep(workspace, asked, around)
    changed = rerun.require_same_inputs(manifest, planned.plan, allow=allow, other_lock=other_lock)
    _tell_inputs(changed, as_json=as_json)
    return _sweep.carry_out(
        planned, around, by_name=asked.runs is None, dry_run=dry_run, wait=wait, as_json=as_json, verb="rerun"
    )


def _words_given(typed: Mapping[str, Any], without: Sequence[str], allow_changed: bool) -> list[str]:
    """Return what was typed that changes a run."""
    given = [option for option in _CHANGEABLE if option.name in typed]
    words = [word for option in given for word in words_of(option, typed) or option.opts[:1]]
    words += [word for flag in without for word in ("--without", flag)]
    words += ["--allow-changed"] if allow_changed else []
    args = after_dashes()
    return words if args is None else [*words, "--", *args]


def _rerun_failed(
    found: Run | Sweep, words: Sequence[str], *, by_name: bool, dry_run: bool, wait: bool, as_json: bool
) -> int:
    """Queue the runs of a sweep again that did not end well; they stay what they are, so `words` must be none."""
    import os

    from hpcenv.cli import _sweep
    from hpcenv.steps.runs import Sweep
    from hpcenv.steps.sweep import read_sweep, rerun_failed

    if not isinstance(found, Sweep):
        raise UsageError("`--failed` is for sweeps and arrays", why=f"{found.manifest.run} is one run")
    if words:
        first = found.elements[0].folder.path
        one = f"{found.folder.name}/{first.name}" if by_name else str(first)
        raise UsageError(
            f"`--failed` does not go together with `{_render.quoted(tuple(words))}`",
            why="the runs are queued again in their own folders, as they were submitted",
            hint=f"`{_render.quoted(('hpcenv', 'rerun', one, *words))}` submits one of them as a new run, changed",
        )
    if not dry_run:
        result = rerun_failed(found.folder, submit_cli.surroundings())
        return _sweep.go_on(result, by_name=by_name, wait=wait, as_json=as_json, verb="rerun", again=True)
    failed = read_sweep(found.folder, os.environ).failed
    if as_json:
        _render.success("rerun", {"elements": failed})
        return 0
    for element in failed:
        _render.say(f"{found.folder.name}/{element.element}: {element.state.state}")
    return 0


def _tell_changes(name: str, changed: Sequence[FlagChange]) -> None:
    _render.tell(f"{name} again" + (", with:" if changed else ", unchanged"))
    for change in changed:
        for sign, words in (("-", change.before), ("+", change.after)):
            if words:
                _render.tell(f"  {sign} {words}")


def _tell_inputs(changed: Sequence[Any], *, as_json: bool) -> None:
    for one in () if as_json else changed:
        _render.tell(f"note: {one.what} is not what it was")
