"""`hpcenv lock`."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import click

from hpcenv.cli import _accept, _progress, _render
from hpcenv.cli._complete import lockfile_names
from hpcenv.cli.image import _conversion
from hpcenv.errors import HpcenvError, LockfileStale, UsageError
from hpcenv.image.reference import parse_source
from hpcenv.locking.lock import CheckResult, check_lock, lock
from hpcenv.progress import Event
from hpcenv.project import lockfile as lock_model
from hpcenv.project import stale
from hpcenv.project.spec import DEFAULT_LOCK
from hpcenv.project.workspace import Workspace


@click.command("lock")
@click.option(
    "--lock",
    "name",
    metavar="NAME",
    default="default",
    show_default=True,
    help="Which lockfile: lockfiles/NAME.lock.toml.",
    shell_complete=lockfile_names,
)
@click.option("--check", is_flag=True, help="Write nothing; say whether the lockfile is stale, and why.")
@click.option("--upgrade", is_flag=True, help="Ask the registry again which image the tag names.")
@click.option("--deep", is_flag=True, help="Import torch, and also lock the libraries that really load.")
@click.option(
    "--from",
    "pins",
    metavar="FILE",
    help="A pylock.toml, requirements.txt, pixi.lock or conda-lock.yml that the installed packages must agree"
    " with. FILE#NAME chooses an environment of pixi.lock, or categories of conda-lock.yml.",
)
@click.option("--spec-only", is_flag=True, help="With --check: compare hpcenv.toml only; needs no SIF and no Slurm.")
@click.option(
    "--all", "every", is_flag=True, help="With --check: also the lockfile of each [environment.NAME] in hpcenv.toml."
)
@click.option("--require-hashes", is_flag=True, help="End with 47 where the sha256 of a package's wheel is not proved.")
@click.option("--no-wheels", is_flag=True, help="Do not look up the wheels' hashes in the package index.")
@click.option(
    "--allow-floating",
    is_flag=True,
    help="Accept an image without a tag or with the tag `latest`. Same as allow-floating in hpcenv.toml.",
)
@_conversion.plain_http
@_accept.option
@_render.json_option
def command(
    name: str,
    check: bool,
    as_json: bool,
    pins: str | None,
    accept: str | None,
    spec_only: bool,
    every: bool,
    require_hashes: bool,
    **options: Any,
) -> int:
    """Resolve the environment and write its lockfile.

    Resolves the image's tag to digests, makes the SIF, and reads Python, torch, libraries
    and every package inside. For image = "host" it reads the Python environment of this
    machine. With --check it writes nothing, and ends with 7 when the lockfile is stale, or
    with 21 when the installed packages differ from those in --from FILE. In a fresh clone,
    add --spec-only.
    """
    path = None if pins is None else Path(os.path.abspath(_render.cwd() / pins))
    if check:
        _refuse_with_check(options)
    elif spec_only or every:
        option = "--spec-only" if spec_only else "--all"
        raise UsageError(f"`{option}` goes with `--check` only", hint="add --check, or leave it out")
    workspace = _render.open_project()
    if not spec_only:
        # Both start the Python of `image = "host"`.
        _accept.require(workspace, accept, as_json=as_json)
    if check:
        compare = partial(
            check_lock, workspace, environ=os.environ, pins=path, spec_only=spec_only, require_hashes=require_hashes
        )
        if every:
            names = dict.fromkeys((name, *sorted(workspace.project.environment)))
            return _check_all(workspace, tuple(names), compare, as_json)
        return _check(workspace, name, compare, as_json)
    return _lock(workspace, name, as_json, pins=path, require_hashes=require_hashes, **options)


def _refuse_with_check(options: dict[str, Any]) -> None:
    """Refuse options that only matter when a lockfile is written: they would be ignored silently."""
    given = [f"--{name.replace('_', '-')}" for name, value in options.items() if value]
    if given:
        raise UsageError(
            f"`--check` does not go with `{given[0]}`",
            why="--check only compares: it writes nothing, and asks no registry and no index",
            hint="leave out one of the two; "
            "--check goes with --lock, --all, --from, --spec-only, --require-hashes and --json",
        )


def _lock(
    workspace: Workspace,
    name: str,
    as_json: bool,
    *,
    upgrade: bool,
    deep: bool,
    pins: Path | None,
    no_wheels: bool,
    allow_floating: bool,
    plain_http: tuple[str, ...],
    require_hashes: bool,
) -> int:
    with _progress.shown(as_json=as_json) as on_event:
        result = lock(
            workspace,
            environ=os.environ,
            report=lambda line: on_event(Event(phase="note", what=line)),
            on_event=on_event,
            name=name,
            allow_floating=allow_floating,
            plain_http=plain_http,
            upgrade=upgrade,
            level="deep" if deep else "full",
            pins=pins,
            wheels_cache=None if no_wheels else _render.cache_folder() / "wheels",
            require_hashes=require_hashes,
        )
    locked = result.lockfile
    if as_json:
        _render.success(
            "lock",
            {
                "path": result.path,
                "changed": result.changed,
                "changes": result.changes,
                "fingerprint": locked.fingerprint,
                "sif": result.sif,
                "notes": result.notes,
            },
        )
        return 0
    for note in result.notes:
        _render.tell(f"note: {note}")
    for change in result.changes:
        _render.say(f"changed: {change}")
    torch, cuda = locked.facts.get("torch.version"), locked.facts.get("torch.cuda")
    python = locked.facts.get("python.version")
    _render.say(f"python {python}, torch {torch}, CUDA {cuda}, {locked.packages.count} packages")
    by_conda = locked.packages.conda_package
    if by_conda:
        pinned = sum(table.proof == "pinned" for table in by_conda)
        _render.say(f"packages of conda: {len(by_conda)}, of which {pinned} are pinned by a file of --from")
    verb = "wrote" if result.changed else "unchanged:"
    _render.say(f"{verb} {workspace.shown(result.path)} ({locked.fingerprint})")
    shape = "--gpus 0 --nproc R" if lock_model.gpu_support(locked) == "none" else "--gpus G"
    which = "" if name == DEFAULT_LOCK else f" --lock {name}"
    _render.tell(f"\nnext: hpcenv submit SCRIPT --nodes N {shape}{which}")
    return 0


def _check(workspace: Workspace, name: str, compare: Callable[..., CheckResult], as_json: bool) -> int:
    result = compare(name=name)
    problem = _stale(workspace, name, result)
    if as_json:
        data = {"path": result.path, "reasons": result.reasons, "notes": result.notes}
        _render.verdict_on("lock", data, ok=result.fresh, problem=problem)
        return 0 if problem is None else problem.exit_status
    for note in result.notes:
        _render.tell(f"note: {note}")
    if problem is not None:
        raise problem
    _render.say(f"{workspace.shown(result.path)} is fresh")
    return 0


def _stale(workspace: Workspace, name: str, result: CheckResult) -> LockfileStale | None:
    if result.fresh:
        return None
    # `ubuntu` names no image: another lock would be refused, too.
    parse_source(workspace.for_lock(name).project.image)
    return LockfileStale(
        f"`{workspace.shown(result.path)}` is stale",
        why="\n".join(str(reason) for reason in result.reasons),
        hint=stale.hint(result.reasons, path=result.path, name=name),
    )


def _check_all(workspace: Workspace, names: tuple[str, ...], compare: Callable[..., CheckResult], as_json: bool) -> int:
    """Check several lockfiles, and say of each what is wrong."""
    checked = [_checked(workspace, name, compare) for name in names]
    problems = [problem for _, problem in checked if problem is not None]
    problem = problems[0] if len(problems) == 1 else _together(problems, len(names)) if problems else None
    if as_json:
        results = [
            {"name": name, "path": workspace.lockfile_path(name), "problem": None if problem is None else problem.what}
            | {"reasons": result.reasons if result else (), "notes": result.notes if result else ()}
            for name, (result, problem) in zip(names, checked, strict=True)
        ]
        _render.verdict_on("lock", {"lockfiles": results}, ok=problem is None, problem=problem)
        return 0 if problem is None else problem.exit_status
    for name, (result, found) in zip(names, checked, strict=True):
        for note in result.notes if result else ():
            _render.tell(f"note: {name}: {note}")
        if found is None:
            _render.say(f"{workspace.shown(workspace.lockfile_path(name))} is fresh")
    if problem is not None:
        raise problem
    return 0


def _checked(
    workspace: Workspace, name: str, compare: Callable[..., CheckResult]
) -> tuple[CheckResult | None, HpcenvError | None]:
    try:
        result = compare(name=name)
        return result, _stale(workspace, name, result)
    except HpcenvError as error:
        return None, error


def _together(problems: list[HpcenvError], count: int) -> HpcenvError:
    """Return one error of several; its status is that of the first."""
    lines = [line for one in problems for line in (one.what, *(f"  {why}" for why in (one.why or "").splitlines()))]
    hints = dict.fromkeys(one.hint for one in problems if one.hint)
    what = f"{len(problems)} of {count} lockfiles are not right"
    return problems[0].changed(what=what, why="\n".join(lines), hint="\n".join(hints) or None)
